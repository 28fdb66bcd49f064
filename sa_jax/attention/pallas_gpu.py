"""Windowed attention on NVIDIA GPUs: which lanes of the GPU kernels each pattern takes.

What the kernels leave out, first-token sinks and sink logits, joins their result by the
log-sum-exp.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sa_jax.attention import gpu_engine, masks
from sa_jax.attention import permutation as permutations
from sa_jax.attention.gpu_kernels import Lanes, Rules
from sa_jax.attention.launch import (
    Launch,
    Tile,
    card_of,
    common_dtype,
    default_device,
    launch_for,
)

# For the interpreter, so that short inputs take several blocks either way.
INTERPRETED = Launch(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))
# Logits of sinks that a query doesn't see.
_UNSEEN = -1e30


@dataclasses.dataclass(frozen=True)
class Options:
    """What is fixed at trace time.

    Attributes:
      is_causal: whether a query sees only positions up to its own.
      scale: of the logits.
      logits_soft_cap: c in c·tanh(logits / c), or None.
      num_sinks: first tokens of a segment that are always visible.
      launch: None takes the table's for the default device.
      interpret: whether to run in Pallas' interpreter, on any device.
    """

    is_causal: bool
    scale: float
    logits_soft_cap: float | None = None
    num_sinks: int = 0
    launch: Launch | None = None
    interpret: bool = False


def own_order(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    sink_logits: jax.Array | None,
    options: Options,
    *,
    window: int | None,
) -> jax.Array:
    """Full (window None) and sliding-window attention; see `functions.full_attention`."""
    # Positions of a segment increase with the token: they count only for distances.
    back, ahead = None, 0 if options.is_causal else None
    if window is not None:
        back, ahead = (window - 1, 0) if options.is_causal else masks.window_sides(window)
    coordinate = None if window is None else _by_head(positions)
    segment = _by_head(segment_ids)
    lanes = Lanes(query_segment=segment, key_segment=segment, coordinate=coordinate)
    runs = None if segment is None else _runs(segment)
    rules = _rules(options, back, ahead, is_causal=False)
    return _attention(query, key, value, segment_ids, sink_logits, options, lanes, runs, rules)


def stochastic(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    permutation: jax.Array,
    segment_ids: jax.Array | None,
    sink_logits: jax.Array | None,
    options: Options,
    *,
    window: int,
    mixes_segments: bool,
) -> jax.Array:
    """Stochastic attention by a permutation `[B or 1, T]` or `[B, K, T]`.

    See `functions.stochastic_attention`; mixes_segments says whether segments may stand in several
    runs of slots, as a caller's permutation may leave them.
    """
    token = _by_head(permutation)
    segment = _in_lanes(segment_ids, token)
    lanes = Lanes(token, query_segment=segment, key_segment=segment)
    runs = None if segment is None or mixes_segments else _runs(segment)
    sides = masks.window_sides(window)
    rules = _rules(options, *sides, is_causal=options.is_causal)
    return _attention(query, key, value, segment_ids, sink_logits, options, lanes, runs, rules)


def stochastic_partition(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    permutation: jax.Array,
    segment_ids: jax.Array | None,
    sink_logits: jax.Array | None,
    options: Options,
    *,
    chunk_size: int,
) -> jax.Array:
    """Stochastic partition attention by a permutation `[B or 1, T]` or `[B, K, T]`.

    See `functions.stochastic_partition_attention`. Every chunk is a segment of its own, whose
    tokens stand in their order.
    """
    permutation = _by_head(permutation)
    batch, heads, length = permutation.shape
    ids = segment_ids
    if ids is not None:
        batch = max(batch, ids.shape[0])
        permutation = jnp.broadcast_to(permutation, (batch, heads, length))
        ids = jnp.repeat(jnp.broadcast_to(ids, (batch, length)), heads, axis=0)
    chunks = permutations.partition(
        permutation.reshape(batch * heads, length), ids, min(chunk_size, length)
    )
    token, number = (
        jnp.broadcast_to(x, (batch * heads, length)).reshape(batch, heads, length) for x in chunks
    )
    runs = _runs(number)
    is_whole = ids is None and chunk_size % _launch(options, query, key, value).block == 0
    # Blocks that lie in one chunk each meet no other.
    segment = None if is_whole else jnp.where(number < length, number + 1, 0)
    lanes = Lanes(token, query_segment=segment, key_segment=segment)
    ahead = 0 if options.is_causal else None
    rules = _rules(options, None, ahead, is_causal=False)
    return _attention(query, key, value, segment_ids, sink_logits, options, lanes, runs, rules)


def _rules(options, back, ahead, *, is_causal):
    return Rules(back, ahead, is_causal, options.scale, options.logits_soft_cap)


def _launch(options, query, key, value):
    """The launch asked for, or the interpreter's, or the table's."""
    if options.launch is not None:
        return options.launch
    if options.interpret:
        return INTERPRETED
    dtype = common_dtype(query, key, value)
    return launch_for(card_of(default_device()), dtype, query.shape[-1])


def _attention(query, key, value, segment_ids, sink_logits, options, lanes, runs, rules):
    """Attention by lanes of the T tokens, and to the sinks."""
    length = query.shape[1]
    num_sinks = min(options.num_sinks, length)
    if num_sinks:
        ids = jnp.ones((1, length), jnp.int32) if segment_ids is None else segment_ids
        is_sink = _in_lanes(permutations.segment_rank(ids) < num_sinks, lanes.token)
        segment = lanes.query_segment
        segment = jnp.ones_like(is_sink, jnp.int32) if segment is None else segment
        lanes = lanes._replace(query_segment=segment, key_segment=jnp.where(is_sink, -1, segment))
    is_joined = num_sinks > 0 or sink_logits is not None
    output, lse = gpu_engine.attend(
        query,
        key,
        value,
        lanes,
        runs,
        rules,
        _launch(options, query, key, value),
        interpret=options.interpret,
        is_joined=is_joined,
    )
    if not is_joined:
        return output
    first = None
    if num_sinks:
        first = _first_tokens(query, key, value, segment_ids, options, num_sinks)
    output = _join(output, lse, first, sink_logits)
    if segment_ids is None:
        return output
    # Zeros there are; so are the gradients, whatever comes in.
    return jnp.where((segment_ids > 0)[..., None, None], output, 0)


def _first_tokens(query, key, value, segment_ids, options, number):
    """Logits of the first tokens of each query's segment `[B, T, N, c]`; values by kv head."""
    batch, length, kv_heads, head_dim = key.shape
    rank = jnp.arange(number, dtype=jnp.int32)
    token = rank[None, None]
    if segment_ids is None:
        sees = jnp.ones((1, 1, 1), bool)
        key, value = (x[:, None, :number] for x in (key, value))
    else:
        token = permutations.segment_start(segment_ids)[..., None] + token
        sees = rank < permutations.segment_length(segment_ids)[..., None]
        sees &= (segment_ids > 0)[..., None]
        flat = token.reshape(token.shape[0], -1)
        shape = (batch, length, number, kv_heads, head_dim)
        key, value = (permutations.take_rows(x, flat).reshape(shape) for x in (key, value))
        key, value = (jnp.where(sees[..., None, None], x, 0) for x in (key, value))
        query = jnp.where((segment_ids > 0)[..., None, None], query, 0)
    if options.is_causal:
        sees &= token <= jnp.arange(length, dtype=jnp.int32)[:, None]
    query = query.reshape(batch, length, kv_heads, -1, head_dim)
    logits = options.scale * _einsum('btkgh,btckh->btkgc', query, key)
    if options.logits_soft_cap is not None:
        logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
    return jnp.where(sees[:, :, None, None], logits, _UNSEEN), value


def _join(output, lse, first, sink_logits):
    """A softmax `[B, T, N, H]` with its log-sum-exp `[B, T, N]`, and what else it runs over."""
    batch, length, heads, head_dim = output.shape
    kv_heads = heads if first is None else first[1].shape[3]
    by_group = (batch, length, kv_heads, heads // kv_heads)
    lse = lse.reshape(*by_group, 1)
    parts = [lse]
    if first is not None:
        parts.append(first[0])
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(*by_group[2:], 1)
        parts.append(jnp.broadcast_to(sinks, lse.shape))
    total = jax.nn.logsumexp(jnp.concatenate(parts, axis=-1), axis=-1, keepdims=True)
    joined = jnp.exp(lse - total) * output.reshape(*by_group, head_dim).astype(jnp.float32)
    if first is not None:
        weights = jnp.exp(first[0] - total).astype(first[1].dtype)
        joined += _einsum('btkgc,btckh->btkgh', weights, first[1])
    return joined.reshape(output.shape).astype(output.dtype)


def _einsum(spec, a, b):
    """A product in float32; float32 operands in full precision."""
    precision = 'highest' if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _by_head(x):
    """`[B or 1, T]` or `[B or 1, K, T]` as an array of lanes `[B or 1, K or 1, T]`."""
    return x[:, None] if x is not None and x.ndim == 2 else x


def _in_lanes(x, token):
    """`[B or 1, T]` by lane, `[B or 1, K or 1, T]`, for the token in each lane."""
    if x is None or token is None:
        return _by_head(x)
    return jnp.take_along_axis(_by_head(x), token, axis=-1, mode='clip')


def _runs(segment):
    """The first and the last lane of each lane's segment, which stands in one run."""
    start = permutations.segment_start(segment)
    return start, start + permutations.segment_length(segment) - 1
