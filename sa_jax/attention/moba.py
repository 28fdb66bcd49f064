"""Mixture of block attention: the choice of blocks, and attention to the chosen ones.

The fast path treats each (query, chosen block) as a query of its own, sorts them by block, so that
neighbours need the same keys, and joins a query's parts by their log-sum-exps.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sa_jax.attention import blockwise, masks, plans
from sa_jax.attention import permutation as permutations
from sa_jax.attention.lanes import Settings

# Queries and blocks scored at a time while choosing.
_QUERIES, _BLOCKS = 256, 256


def block_numbers(segment_ids: jax.Array, block_size: int) -> jax.Array:
    """The number of each token's block, counted along the row: int32 like `segment_ids`."""
    begins = permutations.segment_rank(segment_ids) % block_size == 0
    return jnp.cumsum(begins, axis=-1, dtype=jnp.int32) - 1


def first_blocks(number: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The number of the first block of each token's segment."""
    return jnp.take_along_axis(number, permutations.segment_start(segment_ids), axis=1)


def block_means(key: jax.Array, number: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Means of the keys of each block, float32 `[B, T, K, H]` by block number, 0 beyond."""
    length = key.shape[1]
    is_valid = segment_ids > 0
    keys = jnp.where(is_valid[..., None, None], key, 0).astype(jnp.float32)
    total = jax.vmap(lambda x, n: jax.ops.segment_sum(x, n, length))(keys, number)
    count = jax.vmap(lambda x, n: jax.ops.segment_sum(x, n, length))(
        is_valid.astype(jnp.float32), number
    )
    return total / jnp.maximum(count, 1)[..., None, None]


def mask(
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    block_size: int,
    top_k: int,
    num_sinks: int,
) -> jax.Array:
    """Visibility `[B, N, T, T]`, after the official naive implementation: dense in every step."""
    batch, length, heads, _ = query.shape
    segment_ids = jnp.broadcast_to(segment_ids, (batch, length))
    number = block_numbers(segment_ids, block_size)
    means = block_means(key, number, segment_ids)
    scores = jnp.einsum(
        'btnh,bcnh->btnc',
        jnp.where((segment_ids > 0)[..., None, None], query, 0).astype(jnp.float32),
        jnp.repeat(means, heads // key.shape[2], axis=2),
        precision='highest',
    )
    block = jnp.arange(length)
    is_past = (block >= first_blocks(number, segment_ids)[..., None]) & (block < number[..., None])
    is_own = block == number[..., None]
    scores = jnp.where(is_past[:, :, None], scores, -jnp.inf)
    scores = jnp.where(is_own[:, :, None], jnp.inf, scores)
    best, chosen = lax.top_k(lax.stop_gradient(scores), min(top_k, length))
    visible = masks.in_blocks(jnp.where(best == -jnp.inf, -1, chosen), number)
    others = masks.same_segment(segment_ids, segment_ids) & masks.not_later(positions, positions)
    sinks = masks.first_tokens(segment_ids, num_sinks)
    return (visible | sinks[:, None]) & others[:, None]


def choose_blocks(
    query: jax.Array,
    key: jax.Array,
    segment_ids: jax.Array,
    number: jax.Array,
    top_k: int,
) -> jax.Array:
    """The blocks each query head attends to, never [T, blocks] scores at once.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`.
      segment_ids: `[B, T]`.
      number: `[B, T]`, see `block_numbers`.
      top_k: blocks a query.

    Returns:
      int32 `[B, T, N, top_k]`: the own block, then past ones from the best on, -1 where there are
      no more.
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    own = jnp.broadcast_to(number[..., None, None], (batch, length, heads, 1))
    if top_k == 1:
        return own
    size, span = min(_QUERIES, length), min(_BLOCKS, length)
    missing = -length % size
    is_valid = segment_ids > 0
    query = jnp.where(is_valid[..., None, None], query, 0).astype(jnp.float32)
    query = query.reshape(batch, length, kv_heads, -1, head_dim)
    first = jnp.where(is_valid, first_blocks(number, segment_ids), length)
    last = jnp.where(is_valid, number, 0)
    query = jnp.pad(query, ((0, 0), (0, missing), (0, 0), (0, 0), (0, 0)))
    first = jnp.pad(first, ((0, 0), (0, missing)), constant_values=length)
    last = jnp.pad(last, ((0, 0), (0, missing)))
    means = block_means(key, number, segment_ids)

    def choose(index):
        q, low, high = (
            lax.dynamic_slice_in_dim(x, index * size, size, axis=1) for x in (query, first, last)
        )

        def look(step, carry):
            wanted = low.min() + step * span
            start = jnp.clip(wanted, 0, length - span)
            scores = jnp.einsum(
                'bqkgh,bckh->bqkgc',
                q,
                lax.dynamic_slice_in_dim(means, start, span, axis=1),
                precision='highest',
            )
            block = start + jnp.arange(span, dtype=jnp.int32)
            is_past = (low[..., None] <= block) & (block < high[..., None]) & (block >= wanted)
            scores = jnp.where(is_past[:, :, None, None], scores, -jnp.inf)
            # Earlier blocks stand first and win ties.
            best, chosen = carry
            scores = jnp.concatenate([best, scores], axis=-1)
            chosen = jnp.concatenate(
                [chosen, jnp.broadcast_to(block, (*chosen.shape[:-1], span))], axis=-1
            )
            best, where = lax.top_k(scores, top_k - 1)
            return best, jnp.take_along_axis(chosen, where, axis=-1)

        shape = (*q.shape[:-1], top_k - 1)
        carry = jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32)
        steps = -(-(high.max() - low.min()) // span)
        best, chosen = lax.fori_loop(0, steps, look, carry)
        return jnp.where(best == -jnp.inf, -1, chosen)

    past = lax.map(choose, jnp.arange((length + missing) // size))
    past = jnp.moveaxis(past, 0, 1).reshape(batch, length + missing, heads, top_k - 1)
    return jnp.concatenate([own, past[:, :length]], axis=-1)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sink_logits: jax.Array | None,
    segment_ids: jax.Array,
    *,
    block_size: int,
    top_k: int,
    num_sinks: int,
    scale: float,
    logits_soft_cap: float | None,
) -> jax.Array:
    """MoBA in blocks; see `moba_attention`. Linear but for the scores of T · T / block_size."""
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    segment_ids = jnp.broadcast_to(segment_ids, (batch, length))
    number = block_numbers(segment_ids, block_size)
    chosen = choose_blocks(
        lax.stop_gradient(query), lax.stop_gradient(key), segment_ids, number, top_k
    )
    # Parts [B·K, T·G·k]: one for each query, head of the group and choice.
    chosen = chosen.reshape(batch, length, kv_heads, group * top_k)
    chosen = jnp.moveaxis(chosen, 2, 1).reshape(batch * kv_heads, -1)
    plan, sizes = plans.chosen_blocks(
        chosen,
        *(jnp.repeat(x, kv_heads, axis=0) for x in (segment_ids, number)),
        block_size=block_size,
        parts=group * top_k,
        is_own=jnp.arange(group * top_k) % top_k == 0,
        num_sinks=num_sinks,
    )
    query = blockwise.heads_to_examples(query, kv_heads)
    query = jnp.repeat(query.reshape(batch * kv_heads, -1, 1, head_dim), top_k, axis=1)
    key, value = (blockwise.heads_to_examples(x, kv_heads) for x in (key, value))
    settings = Settings(sizes, scale, logits_soft_cap)
    output, lse = blockwise.blockwise_attention(query, key, value, None, plan, settings)

    shape = (batch * kv_heads, length, group, top_k)
    output, lse = output.reshape(*shape, head_dim).astype(jnp.float32), lse.reshape(shape)
    if sink_logits is not None:
        sinks = jnp.tile(
            sink_logits.astype(jnp.float32).reshape(kv_heads, 1, group, 1), (batch, 1, 1, 1)
        )
        lse_all = jnp.concatenate([lse, jnp.broadcast_to(sinks, (*shape[:-1], 1))], axis=-1)
    else:
        lse_all = lse
    weights = jnp.exp(lse - jax.nn.logsumexp(lse_all, axis=-1, keepdims=True))
    output = (weights[..., None] * output).sum(-2).astype(query.dtype)
    return blockwise.examples_to_heads(output, kv_heads)
