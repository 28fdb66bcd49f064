"""The engine of `implementation='pallas'`: launches the GPU kernels, forward and backward.

Which blocks a block must meet is found here, outside the kernels, from the window's sides and the
runs that segments stand in: a causal window visits one side only, packed documents only their own.
"""

import dataclasses
import functools
import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from sa_jax.attention import gpu_kernels
from sa_jax.attention import permutation as permutations
from sa_jax.attention.gpu_kernels import Lanes, Rules
from sa_jax.attention.launch import Launch

# The first and the last lane `[B or 1, K or 1, T]` of the run that each lane's segment fills.
Runs = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]
# The log-sum-exp of no keys. It is put in exactly: a difference of two products of such numbers,
# rounded differently, is anything.
_NOTHING = -1e29


class _Plan(NamedTuple):
    """Lanes, and for each kernel the ranges of blocks `[B or 1, K or 1, blocks]` to meet."""

    lanes: Lanes
    forward: tuple[jax.Array, jax.Array]
    dq: tuple[jax.Array, jax.Array]
    dkv: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Settings:
    rules: Rules
    launch: Launch
    interpret: bool
    is_joined: bool  # whether the log-sum-exp is used, and has a gradient
    lanes: int  # their number, T in whole blocks
    is_indirect: bool  # whether rows are read through an index


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lanes: Lanes,
    runs: Runs | None,
    rules: Rules,
    launch: Launch,
    *,
    interpret: bool,
    is_joined: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of `[B, T, N, H]` to `[B, T, K, H]` by lanes.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`.
      value: `[B, T, K, H]`.
      lanes: of the T tokens, in arrays `[B or 1, K or 1, T]`.
      runs: where segments stand in runs of lanes; None: anywhere.
      rules: the window's sides and the logits'.
      launch: the kernels' tiles.
      interpret: whether to run in Pallas' interpreter, on any device.
      is_joined: whether the log-sum-exp is used.

    Returns:
      The output `[B, T, N, H]` in query's dtype, and the log-sum-exp of the logits, float32
      `[B, T, N]`; queries without keys have zeros and one too small to weigh anything.
    """
    head_dim, dtype = query.shape[-1], query.dtype
    # The kernels take powers of two, from the smallest tile of the tensor cores on.
    missing = max(16, 1 << (head_dim - 1).bit_length()) - head_dim
    common = jnp.result_type(query.dtype, key.dtype, value.dtype)
    query, key, value = (
        jnp.pad(x.astype(common), ((0, 0), (0, 0), (0, 0), (0, missing)))
        for x in (query, key, value)
    )
    if rules.scale <= 0:
        # The kernels take the largest product for the largest logit.
        query = query * np.sign(rules.scale).astype(common)
        rules = dataclasses.replace(rules, scale=abs(rules.scale) or 1.0)
    length = query.shape[1]
    tokens = lanes.token
    is_permuted = tokens is not None and tokens.shape[1] == 1 and not launch.fused
    if is_permuted:
        tokens = tokens[:, 0]
        inverse = permutations.inverse_permutation(tokens)
        query, key, value = (permutations.permute(x, tokens, inverse) for x in (query, key, value))
    padded = -(-length // launch.block) * launch.block
    rules = dataclasses.replace(rules, is_fused=tokens is not None and not is_permuted)
    is_indirect = rules.is_fused or padded > length or lanes.query_segment is not None
    settings = _Settings(rules, launch, interpret, is_joined, padded, is_indirect)
    output, lse = _attention(settings, query, key, value, _plan(lanes, runs, settings, length))
    if is_permuted:
        output, lse = (permutations.permute(x, inverse, tokens) for x in (output, lse))
    elif tokens is not None:
        lse = _to_tokens(lse, tokens)
    return output[..., :head_dim].astype(dtype), lse


def _to_tokens(x, tokens):
    """`[B, T, N]` by lane to tokens, given those in the lanes `[B or 1, K or 1, T]`."""
    batch, length, heads = x.shape
    x = jnp.moveaxis(x, 1, 2).reshape(batch, tokens.shape[1], -1, length)
    inverse = permutations.inverse_permutation(tokens)
    x = jnp.take_along_axis(x, inverse[:, :, None], axis=-1)
    return jnp.moveaxis(x.reshape(batch, heads, length), 1, 2)


def _plan(lanes, runs, settings, length):
    """Pads lanes to whole blocks, and finds what each block meets."""
    rules, launch = settings.rules, settings.launch
    missing = settings.lanes - length

    def pad(x):
        return jnp.pad(x, ((0, 0), (0, 0), (0, missing)))

    segment, token = lanes.query_segment, lanes.token
    if missing:
        if segment is None:
            segment = jnp.ones((1, 1, length), jnp.int32)
            lanes = lanes._replace(query_segment=segment, key_segment=segment)
        lanes, runs = jax.tree.map(pad, (lanes, runs))
        if token is not None:
            beyond = jnp.arange(length, settings.lanes, dtype=jnp.int32)
            beyond = jnp.broadcast_to(beyond, (*token.shape[:2], missing))
            lanes = lanes._replace(token=jnp.concatenate([token, beyond], axis=-1))
    if segment is not None:
        is_valid = lanes.query_segment > 0
        row = jnp.arange(settings.lanes, dtype=jnp.int32)[None, None]
        row = lanes.token if rules.is_fused else row
        row, is_valid = jnp.broadcast_arrays(row, is_valid)
        first = jnp.argmax(is_valid, axis=-1, keepdims=True)
        first = jnp.take_along_axis(row, first, axis=-1)
        lanes = lanes._replace(read=jnp.where(is_valid, row, first))
    # A window in positions spans at most as many lanes, for positions of a segment increase.
    ranges = functools.partial(_ranges, settings.lanes, lanes.query_segment, runs)
    forward, dq, dkv = launch.forward, launch.dq, launch.dkv
    return _Plan(
        lanes,
        ranges(forward.block_q, forward.block_k, rules.back, rules.ahead),
        ranges(dq.block_q, dq.block_k, rules.back, rules.ahead),
        ranges(dkv.block_k, dkv.block_q, rules.ahead, rules.back),
    )


def _ranges(lanes, segment, runs, own, other, before, after):
    """The blocks of `other` lanes [start, stop) that each block of `own` lanes must meet."""
    first = np.arange(0, lanes, own, dtype=np.int32)[None, None]
    last = first + np.int32(own - 1)
    low = np.zeros_like(first) if before is None else np.maximum(first - before, 0)
    high = np.minimum(last + (lanes if after is None else after), lanes - 1)
    if runs is not None or segment is not None:
        is_valid = np.ones((1, 1, lanes), bool) if segment is None else segment > 0
        start, end = (np.int32(0), np.int32(lanes - 1)) if runs is None else runs
        start, end = jnp.where(is_valid, start, lanes), jnp.where(is_valid, end, -1)
        start, end = (x.reshape(*x.shape[:2], -1, own) for x in (start, end))
        low, high = jnp.maximum(low, start.min(-1)), jnp.minimum(high, end.max(-1))
    return jnp.asarray(low // other, jnp.int32), jnp.asarray(high // other + 1, jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings, query, key, value, plan):
    """Output `[B, T, N, H]` by token and log-sum-exp `[B, T, N]` by lane."""
    return _attention_forward(settings, query, key, value, plan)[0]


def _attention_forward(settings, query, key, value, plan):
    length, heads = query.shape[1:3]
    output, lse = _call(
        gpu_kernels.forward_kernel,
        settings,
        settings.launch.forward,
        heads,
        (query, key, value, plan.lanes, *plan.forward),
        (_rows(settings, query), _statistic(settings, query)),
    )
    output = output[:, :length]
    natural = jnp.moveaxis(lse[..., :length], 1, 2) * math.log(2)
    return (output, jnp.maximum(natural, _NOTHING)), (query, key, value, plan, output, lse)


def _attention_backward(settings, residuals, gradients):
    query, key, value, plan, output, lse = residuals
    do, dlse = gradients
    length, heads = query.shape[1:3]
    if settings.is_joined:
        missing = lse.shape[-1] - length
        dlse = jnp.pad(jnp.moveaxis(dlse, 1, 2), ((0, 0), (0, 0), (0, missing)))
    else:
        dlse = None
    dq, delta = _call(
        gpu_kernels.dq_kernel,
        settings,
        settings.launch.dq,
        heads,
        (query, key, value, plan.lanes, *plan.dq, output, do, lse, dlse),
        (_rows(settings, query), _statistic(settings, query)),
    )
    dk, dv = _call(
        gpu_kernels.dkv_kernel,
        settings,
        settings.launch.dkv,
        key.shape[2],
        (query, do, lse, delta, key, value, plan.lanes, *plan.dkv),
        (_rows(settings, key), _rows(settings, value)),
        grouped=4,
    )
    return dq[:, :length], dk[:, :length], dv[:, :length], None


_attention.defvjp(_attention_forward, _attention_backward)


def _rows(settings, x):
    """A result with a row for every lane, tokens first, for `[B, T, N or K, H]`."""
    return jax.ShapeDtypeStruct((x.shape[0], settings.lanes, *x.shape[2:]), x.dtype)


def _statistic(settings, query):
    """A result `[B, N, L]`."""
    return jax.ShapeDtypeStruct((query.shape[0], query.shape[2], settings.lanes), jnp.float32)


def _call(kernel, settings, tile, heads, inputs, outputs, grouped=0):
    """Runs a kernel for every block, `heads` and example: the one place that calls Pallas.

    Every reference shows a program its example and its head's part: of query heads that share a
    key/value head, that one; of the first `grouped` inputs, all that share its head.

    Pallas' Triton back end is deprecated: it goes on working in the JAX versions this package
    supports. When it goes, the kernels can move to Mosaic GPU (`plgpu.kernel`: one kernel for each
    architecture, and float32 stays with 'xla'), or to jax-triton, in Triton's own language.
    """
    batch = outputs[0].shape[0]
    own = tile.block_k if grouped else tile.block_q
    # Rows read through an index wait for it: as far ahead takes a stage more for each.
    stages = 2 * tile.stages - 1 if settings.is_indirect else tile.stages
    # Heads vary fastest: those that run together read neighbouring rows.
    grid = (heads, settings.lanes // own, batch)
    in_specs = tuple(
        jax.tree.map(functools.partial(_spec, heads, number < grouped), x)
        for number, x in enumerate(inputs)
    )
    return pl.pallas_call(
        functools.partial(kernel, tile=tile, rules=settings.rules),
        out_shape=outputs,
        grid=grid,
        in_specs=in_specs,
        out_specs=tuple(_spec(heads, False, x) for x in outputs),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=stages),
        interpret=settings.interpret,
        name=kernel.__name__,
    )(*inputs)


# Said anew at every lowering; `_call` says what follows from it.
warnings.filterwarnings('ignore', 'The Pallas Triton backend is deprecated', DeprecationWarning)


def _spec(heads, is_grouped, x):
    """A head's part of `[B or 1, C, L]` or `[B or 1, T, C, H]`, for a program of `heads`."""
    axis = x.ndim - 2 if x.ndim == 4 else 1
    shape = [None, *x.shape[1:]]
    shape[axis] = x.shape[axis] // heads if is_grouped else None
    sharing = max(heads // x.shape[axis], 1)

    def index(head, block, example):
        del block
        place = [0] * x.ndim
        place[0] = example if x.shape[0] > 1 else 0
        place[axis] = head // sharing
        return tuple(place)

    return pl.BlockSpec(tuple(shape), index)
