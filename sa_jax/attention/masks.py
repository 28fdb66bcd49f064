"""Visibility, the specification of every attention function, as dense boolean masks.

Each function here writes one relation visible(i, j) down: True where query i sees key j. Positions
and segment ids are `[B or 1, T]` for queries and `[B or 1, S]` for keys; masks are
`[B or 1, T, S]`, with a head axis `[B or 1, N or 1, T, S]` once combined.
"""

import jax
import jax.numpy as jnp

from sa_jax.attention import permutation as permutations


def window_sides(window: int) -> tuple[int, int]:
    """How many slots a two-sided window of `window` keys, itself included, reaches back and on."""
    return window // 2, (window - 1) // 2


def same_segment(query_segment_ids: jax.Array, key_segment_ids: jax.Array) -> jax.Array:
    """Key j is valid and in the segment of query i."""
    equal = query_segment_ids[:, :, None] == key_segment_ids[:, None, :]
    return equal & (key_segment_ids[:, None, :] > 0)


def not_later(query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Causality: p(j) <= p(i)."""
    return key_positions[:, None, :] <= query_positions[:, :, None]


def sliding_window(
    query_positions: jax.Array, key_positions: jax.Array, window: int, is_causal: bool
) -> jax.Array:
    """Causal: 0 <= p(i) - p(j) < window; else the window has as many keys on both sides."""
    back, ahead = (window - 1, 0) if is_causal else window_sides(window)
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    return (-ahead <= distance) & (distance <= back)


def in_slots(slot: jax.Array, segment_ids: jax.Array, window: int, circular: bool) -> jax.Array:
    """A window in slots (paper, section 3), before causality.

    Args:
      slot: `[B or 1, T]` or `[B, K, T]`, the slot of each token.
      segment_ids: `[B or 1, T]`.
      window: keys a query sees, itself included, where nothing cuts the window off.
      circular: whether slots wrap around within a segment.

    Returns:
      `[B or 1, T, T]`, or `[B, K, T, T]` for slots per key/value head.
    """
    back, ahead = window_sides(window)
    distance = slot[..., :, None] - slot[..., None, :]
    if not circular:
        return (-ahead <= distance) & (distance <= back)
    length = permutations.segment_length(segment_ids)
    length = (length[:, None] if slot.ndim == 3 else length)[..., :, None]
    distance = distance % length
    return (distance <= back) | (length - distance <= ahead)


def in_chunks(slot: jax.Array, segment_ids: jax.Array, chunk_size: int) -> jax.Array:
    """Ranks of both slots within the segment fall in one chunk of a partition, before causality.

    Args:
      slot: `[B or 1, T]` or `[B, K, T]`, the slot of each token.
      segment_ids: `[B or 1, T]`.
      chunk_size: slots per chunk; the last one of a segment may have fewer.

    Returns:
      `[B or 1, T, T]`, or `[B, K, T, T]` for slots per key/value head.
    """
    same = same_segment(segment_ids, segment_ids)
    same = same[:, None] if slot.ndim == 3 else same
    rank = (same & (slot[..., None, :] < slot[..., :, None])).sum(-1)
    chunk = rank // chunk_size
    return same & (chunk[..., :, None] == chunk[..., None, :])


def first_tokens(segment_ids: jax.Array, count: int) -> jax.Array:
    """The first `count` tokens of each segment as `[B or 1, 1, S]`: sinks every query sees."""
    return (permutations.segment_rank(segment_ids) < count)[:, None, :]


def in_blocks(chosen: jax.Array, block: jax.Array) -> jax.Array:
    """Key j lies in a block that query i chose.

    Args:
      chosen: int32 `[B, T, N, k]`, blocks by number, -1 for none.
      block: int32 `[B or 1, T]`, the number of each token's block.

    Returns:
      `[B, N, T, T]`.
    """
    chosen = jnp.moveaxis(chosen, 2, 1)[:, :, :, None, :]
    return (chosen == block[:, None, None, :, None]).any(-1)


def own_order(
    query_tokens: tuple[jax.Array, jax.Array],
    key_tokens: tuple[jax.Array, jax.Array],
    window: int | None,
    is_causal: bool,
    num_sinks: int,
) -> jax.Array:
    """Visibility `[B or 1, T, S]` of full (window None) and sliding-window attention."""
    (query_positions, query_segments), (key_positions, key_segments) = query_tokens, key_tokens
    mask = same_segment(query_segments, key_segments)
    if window is not None:
        near = sliding_window(query_positions, key_positions, window, is_causal)
        mask &= near | first_tokens(key_segments, num_sinks)
    return mask & not_later(query_positions, key_positions) if is_causal else mask


def stochastic(
    permutation: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    window: int,
    is_causal: bool,
    circular: bool,
    num_sinks: int,
) -> jax.Array:
    """Visibility `[B or 1, T, T]`, or `[B, K, T, T]`, of stochastic attention."""
    slot = permutations.inverse_permutation(permutation)
    mask = in_slots(slot, segment_ids, window, circular)
    return _within_segments(mask, positions, segment_ids, is_causal, num_sinks)


def local_stochastic(
    permutation: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    window: int,
    local_window: int,
    num_sinks: int,
) -> jax.Array:
    """Visibility of causal attention to the union of a sliding and a stochastic window.

    `[B or 1, T, T]`, or `[B, K, T, T]`.
    """
    slot = permutations.inverse_permutation(permutation)
    near = sliding_window(positions, positions, local_window, True)
    mask = in_slots(slot, segment_ids, window, False) | (near[:, None] if slot.ndim == 3 else near)
    return _within_segments(mask, positions, segment_ids, True, num_sinks)


def stochastic_partition(
    permutation: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    chunk_size: int,
    is_causal: bool,
    num_sinks: int,
) -> jax.Array:
    """Visibility `[B or 1, T, T]`, or `[B, K, T, T]`, of stochastic partition attention."""
    slot = permutations.inverse_permutation(permutation)
    mask = in_chunks(slot, segment_ids, chunk_size)
    return _within_segments(mask, positions, segment_ids, is_causal, num_sinks)


def _within_segments(mask, positions, segment_ids, is_causal, num_sinks):
    """Adds the sinks to what permuted tokens see; leaves out other segments and later tokens."""
    others = same_segment(segment_ids, segment_ids)
    if is_causal:
        others &= not_later(positions, positions)
    sinks = first_tokens(segment_ids, num_sinks)
    if mask.ndim == 4:
        others, sinks = others[:, None], sinks[:, None]
    return (mask | sinks) & others


def with_heads(mask: jax.Array, heads: int) -> jax.Array:
    """`[B, T, S]` or `[B, K, T, S]` as `[B, 1, T, S]` or `[B, N, T, S]`."""
    if mask.ndim == 3:
        return mask[:, None]
    return jnp.repeat(mask, heads // mask.shape[1], axis=1)
