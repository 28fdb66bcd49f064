"""Mixture of block attention: the choice of blocks, and attention to the chosen ones."""

import jax
import jax.numpy as jnp

from sa_jax.attention import masks
from sa_jax.attention import permutation as permutations


def block_numbers(segment_ids: jax.Array, block_size: int) -> jax.Array:
    """The number of each token's block, counted along the row: int32 like `segment_ids`."""
    begins = permutations.segment_rank(segment_ids) % block_size == 0
    return jnp.cumsum(begins, axis=-1, dtype=jnp.int32) - 1


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
    group = heads // key.shape[2]
    segment_ids = jnp.broadcast_to(segment_ids, (batch, length))
    number = block_numbers(segment_ids, block_size)
    is_valid = segment_ids > 0
    belongs = (number[:, None, :] == jnp.arange(length)[:, None]) & is_valid[:, None, :]
    keys = jnp.where(is_valid[..., None, None], key, 0).astype(jnp.float32)
    totals = jnp.einsum('bnt,btkh->bnkh', belongs.astype(jnp.float32), keys, precision='highest')
    means = totals / jnp.maximum(belongs.sum(-1), 1)[..., None, None]
    scores = jnp.einsum(
        'btnh,bcnh->btnc',
        jnp.where(is_valid[..., None, None], query, 0).astype(jnp.float32),
        jnp.repeat(means, group, axis=2),
        precision='highest',
    )
    first = jnp.take_along_axis(number, permutations.segment_start(segment_ids), axis=1)
    block = jnp.arange(length)
    is_past = (block >= first[..., None]) & (block < number[..., None])
    is_own = block == number[..., None]
    scores = jnp.where(is_past[:, :, None], scores, -jnp.inf)
    scores = jnp.where(is_own[:, :, None], jnp.inf, scores)
    best, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), min(top_k, length))
    chosen = jnp.where(best == -jnp.inf, -1, chosen)
    visible = masks.moba(chosen, number)
    others = masks.same_segment(segment_ids, segment_ids)
    others &= masks.not_later(positions, positions)
    sinks = masks.first_tokens(segment_ids, num_sinks)
    return (visible | sinks[:, None]) & others[:, None]
