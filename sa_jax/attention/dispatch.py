"""Which implementation runs a call: the one place where a path is picked."""

import functools
import inspect
from collections.abc import Callable

import jax

from sa_jax.attention import inputs, launch

KERNELS = ('pallas', 'pallas_interpret')
IMPLEMENTATIONS = ('reference', 'xla', *KERNELS)


def pick(
    implementation: str | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    obstacle: str | None,
    is_plain: bool,
) -> str:
    """The implementation to run.

    Args:
      implementation: what the caller asks for; None for the best.
      query: `[B, T, N, H]`, a tracer or concrete.
      key: `[B, S, K, H]`.
      value: `[B, S, K, H]`.
      obstacle: what keeps the call from the GPU kernels, if anything but its arrays does.
      is_plain: whether it is causal or full attention without more, which cuDNN runs too, faster.

    Returns:
      One of `IMPLEMENTATIONS`, or 'cudnn'.

    Raises:
      ValueError: no such implementation, or it can't run the call.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f'implementation={implementation!r}; expected None or one of '
            f'{", ".join(map(repr, IMPLEMENTATIONS))}'
        )
    if implementation in ('reference', 'xla'):
        return implementation
    obstacle = obstacle or launch.obstacle(query, key, value)
    arrays = [x for x in (query, key, value) if isinstance(x, jax.Array) and inputs.is_concrete(x)]
    device = next(iter(arrays[0].devices())) if arrays else launch.default_device()
    card = launch.card_of(device)
    has_kernels = card is not None and int(card.removeprefix('sm')) >= 80
    if implementation is None:
        if obstacle or not has_kernels or not _is_on_one_device(arrays):
            return 'xla'
        return 'cudnn' if is_plain and _cudnn_runs(query, key, value) else 'pallas'
    if obstacle:
        raise ValueError(
            f'implementation={implementation!r} cannot run this call: {obstacle}. Pass None for '
            "the best that can, or 'xla'"
        )
    # Tracers may be bound for a device that isn't here.
    if implementation == 'pallas' and arrays and not has_kernels:
        raise ValueError(
            "implementation='pallas' needs an NVIDIA GPU of compute capability 8.0 or more, and "
            f"the arrays are on {device}: pass None or 'xla', or 'pallas_interpret' to try the "
            "kernels' numbers, slowly"
        )
    return implementation


def _is_on_one_device(concrete):
    """Whether the call surely is: XLA would copy the kernels' operands to all of several."""
    if concrete:
        return all(len(x.devices()) == 1 for x in concrete)
    axes = jax.sharding.get_abstract_mesh().axis_types
    in_shard_map = bool(axes) and all(axis is jax.sharding.AxisType.Manual for axis in axes)
    return in_shard_map or jax.device_count() == 1


def _cudnn_runs(query, key, value):
    """Whether cuDNN, as JAX calls it, takes the arrays."""
    dtypes = {x.dtype for x in (query, key, value)}
    head_dim = query.shape[-1]
    return (
        # Not where one compiles for a GPU that isn't there.
        jax.default_backend() == 'gpu'
        and len(dtypes) == 1
        and dtypes.pop().name in ('bfloat16', 'float16')
        and head_dim <= 128
        and head_dim % 8 == 0
    )


def compiled(
    function: Callable | None = None,
    *,
    obstacle: Callable[[dict], str | None] = lambda call: None,
    is_plain: Callable[[dict], bool] = lambda call: False,
) -> Callable:
    """Picks the implementation, and jits a function whose keyword-only arguments are static.

    Compiled as one also where the caller is not: hundreds of small operations plan the blocks.

    Args:
      function: takes query, key and value first, and the keyword `implementation`.
      obstacle: what keeps a call, its arguments by name, from the GPU kernels; None if nothing.
      is_plain: whether a call is one that cuDNN serves.

    Returns:
      The function, or a decorator where there is none.
    """
    if function is None:
        return functools.partial(compiled, obstacle=obstacle, is_plain=is_plain)
    signature = inspect.signature(function)
    static = [
        name for name, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    jitted = jax.jit(function, static_argnames=static)

    @functools.wraps(function)
    def run(*arguments, implementation, **options):
        call = signature.bind(*arguments, implementation=implementation, **options).arguments
        implementation = pick(
            implementation, *arguments[:3], obstacle=obstacle(call), is_plain=is_plain(call)
        )
        return jitted(*arguments, implementation=implementation, **options)

    return run
