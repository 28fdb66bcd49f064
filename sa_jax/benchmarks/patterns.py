"""The patterns that are timed: this package's attention functions, by the names of a sweep."""

from collections.abc import Callable

import jax

import sa_jax
from sa_jax.attention import masks, reference
from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.benchmarks.settings import Draw, Sweep
from sa_jax.models.layers import join_paths

TWO_SIDED = 'sliding_window_two_sided'
GATED = 'sa_swa'
_LABELS = {
    'full': 'full',
    'sliding_window': 'SWA',
    TWO_SIDED: 'SWA, two-sided',
    'stochastic': 'SA',
    GATED: 'SA + SWA, gated',
    'stochastic_partition': 'SA, partition',
    'moba': 'MoBA',
}
# Of query, key, value and what the pattern takes besides.
Attention = Callable[[jax.Array, jax.Array, jax.Array, Draw], jax.Array]


def label(kind: str) -> str:
    """What tables and figures call a kind."""
    return _LABELS.get(kind, kind)


def options(kind: str, sweep: Sweep) -> dict:
    """The options of a registered kind under the settings of a sweep."""
    own = {
        'full': {},
        'sliding_window': {'window': sweep.window},
        'stochastic': {'window': sweep.window},
        'stochastic_partition': {'chunk_size': sweep.chunk_size},
        'moba': {'block_size': sweep.block_size, 'top_k': sweep.top_k},
    }
    return own[kind] if kind in own else sweep.options.get(kind, {})


def build(kind: str, sweep: Sweep, implementation: str) -> Attention:
    """The attention function of a kind.

    Stochastic kinds get their permutation and find its inverse themselves. Kinds that other
    packages register draw what they need from a key.

    Args:
      kind: a registered name, GATED or TWO_SIDED.
      sweep: the settings.
      implementation: of this package's functions, or 'default'.

    Raises:
      ValueError: no such kind, or another package's asked for an implementation.
    """
    if kind == GATED:
        paths = [build(name, sweep, implementation) for name in ('stochastic', 'sliding_window')]

        def gated(query, key, value, draw):
            outputs = [path(query, key, value, draw) for path in paths]
            return join_paths(outputs, jax.nn.sigmoid(draw.gates))

        return gated

    is_causal = sweep.is_causal and kind != TWO_SIDED
    kind = 'sliding_window' if kind == TWO_SIDED else kind
    registered = get_attention(kind)
    arguments = options(kind, sweep)
    if kind not in _LABELS:
        if implementation != 'default':
            raise ValueError(f'another package has {kind!r}; it has no implementations to choose')
        context = AttentionContext(key=jax.random.key(sweep.seed), is_causal=is_causal)
        return lambda query, key, value, draw: registered.function(
            query, key, value, context, **arguments
        )
    function = getattr(sa_jax, f'{kind}_attention')
    arguments['is_causal'] = is_causal
    arguments['implementation'] = None if implementation == 'default' else implementation

    def attention(query, key, value, draw):
        drawn = {'permutation': draw.permutation} if kind.startswith('stochastic') else {}
        return function(query, key, value, **drawn, **arguments)

    return attention


def build_reference(kind: str, sweep: Sweep) -> Attention:
    """The dense float32 reference of a kind.

    Raises:
      ValueError: the kind has no mask to make one of.
    """
    if kind in _LABELS:
        return build(kind, sweep, 'reference')
    registered = get_attention(kind)
    if registered.mask is None:
        raise ValueError(f'{kind!r} has no mask, so nothing to compare with')
    context = AttentionContext(key=jax.random.key(sweep.seed), is_causal=sweep.is_causal)

    def attention(query, key, value, draw):
        del draw
        mask = registered.mask(query, key, context, **options(kind, sweep))
        return reference.masked_attention(query, key, value, mask, scale=query.shape[-1] ** -0.5)

    return attention


def visible_keys(kind: str, sweep: Sweep, length: int) -> float:
    """Keys a query sees on average; of gated paths, their sum."""
    if kind == GATED:
        return sum(visible_keys(name, sweep, length) for name in ('stochastic', 'sliding_window'))
    is_causal = sweep.is_causal and kind != TWO_SIDED
    kind = 'sliding_window' if kind == TWO_SIDED else kind
    count = get_attention(kind).visible_keys
    if count is None:
        return (length + 1) / 2 if is_causal else float(length)
    return count(length, is_causal=is_causal, **options(kind, sweep))


def flops(kind: str, sweep: Sweep, length: int, mode: str) -> float:
    """Floating-point operations of a call that visible pairs need, a multiply-add as 2.

    The forward pass has two products, QKᵀ and that with V. The backward has five: QKᵀ once more,
    and two each for the gradients that the two products send back.
    """
    product = 2.0 * sweep.batch * sweep.heads * sweep.head_dim * length
    products = 2 if mode == 'forward' else 7
    return products * product * visible_keys(kind, sweep, length)


def window_sides(kind: str, sweep: Sweep) -> tuple[int, int]:
    """How many slots a window of a windowed kind reaches back and ahead."""
    if kind == 'sliding_window' and sweep.is_causal:
        return sweep.window - 1, 0
    return masks.window_sides(sweep.window)
