"""Which lanes each pattern needs: the way from visibility relations to blocks.

Block sizes: a block of B queries under a window of w keys computes B + w - 1 keys a query, so small
blocks waste less and large ones run faster; the sizes here were the fastest measured on the CPU.
"""

import jax
import jax.numpy as jnp

from sa_jax.attention import inputs, masks
from sa_jax.attention import permutation as permutations
from sa_jax.attention.blockwise import Keys, Plan, Queries

_FAR = inputs.FARTHEST
_LONGEST_CHUNK = 1024


def sizes(queries: int, keys: int, reach: int) -> tuple[int, int]:
    """Lanes per block of queries and per chunk of keys, for `reach` keys a query."""
    block = 64
    while block < min(reach // 2, 256):
        block *= 2
    block = min(block, queries)
    span = min(block + reach - 1, keys)
    return block, span if span <= _LONGEST_CHUNK else _LONGEST_CHUNK // 2


Tokens = tuple[jax.Array, jax.Array]  # positions and segment ids, `[B or 1, T]`


def everything(tokens: Tokens, is_causal: bool) -> tuple[Plan, int, int]:
    """Full attention over tokens in their own order; also the block and the chunk."""
    segment_ids = tokens[1]
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    start = permutations.segment_start(segment_ids)
    stop = start + permutations.segment_length(segment_ids)
    stop = index + 1 if is_causal else stop
    return _ranges(tokens, tokens, start, stop, None, is_causal, None)


def elsewhere(
    query_tokens: Tokens, key_tokens: Tokens, window: int | None, is_causal: bool, num_sinks: int
) -> tuple[Plan, int, int]:
    """Full (window None) and sliding-window attention to keys with tokens of their own.

    Returns:
      The plan, the queries per block and the keys per chunk.
    """
    query_positions, query_segment = query_tokens
    positions, segment = key_tokens
    first, run_length = _runs(query_segment, segment)
    bounds = _interval(query_positions, window, is_causal)
    start = _first_at_least(positions, bounds[0], first, first + run_length)
    stop = _first_at_least(positions, bounds[1] + 1, first, first + run_length)
    sinks = None
    if num_sinks:
        number = jnp.arange(num_sinks, dtype=jnp.int32)
        is_there = (query_segment > 0)[..., None] & (number < run_length[..., None])
        sinks = jnp.where(is_there, first[..., None] + number, -1)
    return _ranges(query_tokens, key_tokens, start, stop, window, is_causal, sinks)


def _interval(positions, window, is_causal):
    """The first and the last position that queries see."""
    if window is None:
        low = jnp.full_like(positions, -_FAR)
        return low, positions if is_causal else jnp.full_like(positions, _FAR)
    back, ahead = (window - 1, 0) if is_causal else masks.window_sides(window)
    return positions - back, positions + ahead


def _ranges(query_tokens, key_tokens, start, stop, window, is_causal, sinks):
    """A plan in which each query needs the keys [start, stop), in their own order."""
    query_positions, query_segment = query_tokens
    positions, segment = key_tokens
    reach = segment.shape[-1] if window is None else window
    block, chunk = sizes(query_segment.shape[-1], segment.shape[-1], reach)
    start, stop = _block_ranges(start, stop, (query_segment > 0) & (stop > start), block)
    latest = query_positions if is_causal else None
    interval = _interval(query_positions, window, is_causal)
    queries = Queries(query_segment, *interval, latest, None, None, sinks)
    is_sink = _is_sink(segment, 0 if sinks is None else sinks.shape[-1])
    keys = Keys(segment, positions, positions, None, None, is_sink)
    return Plan(_pad_queries(queries, block), keys, start, stop), block, chunk


def band(tokens: Tokens, window: int, is_causal: bool, num_sinks: int) -> tuple[Plan, int, int]:
    """A sliding window over tokens in their own order; also the block and the chunk."""
    positions, segment_ids = tokens
    back, ahead = (window - 1, 0) if is_causal else masks.window_sides(window)
    # Positions may leave gaps but never less than one apart: the window in tokens covers it.
    queries = Queries(
        segment_ids,
        *_interval(positions, window, is_causal),
        positions if is_causal else None,
        None,
        None,
        _own_sinks(segment_ids, num_sinks),
    )
    is_sink = _is_sink(segment_ids, num_sinks)
    keys = Keys(segment_ids, positions, positions, None, None, is_sink)
    return _fixed_span(queries, keys, back, ahead)


def slots(
    permutation: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    window: int,
    is_causal: bool,
    num_sinks: int,
) -> tuple[Plan, int, int]:
    """A window over permuted tokens, `permutation` `[B or 1, T]`; also the block and the chunk."""
    back, ahead = masks.window_sides(window)
    slot = permutations.inverse_permutation(permutation)
    segment, position, is_sink = (
        _in_slots(x, permutation)
        for x in (segment_ids, positions, _is_sink(segment_ids, num_sinks))
    )
    index = jnp.arange(permutation.shape[-1], dtype=jnp.int32)[None]
    queries = Queries(
        segment,
        index - back,
        index + ahead,
        position if is_causal else None,
        permutation,
        slot,
        _permuted_sinks(segment_ids, permutation, slot, num_sinks),
    )
    keys = Keys(segment, index, position, permutation, slot[..., None], is_sink)
    return _fixed_span(queries, keys, back, ahead)


def circle(
    permutation: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    window: int,
    is_causal: bool,
    num_sinks: int,
) -> tuple[Plan, int, int]:
    """A window that wraps around within each segment; also the block and the chunk.

    Every segment of m tokens gets copies of its last slots in front and of its first ones behind,
    at most m - 1 in all, so that each query's window is a run of lanes and holds a key once.
    """
    length = permutation.shape[-1]
    back, ahead = masks.window_sides(window)
    slot = permutations.inverse_permutation(permutation)
    segment, position, is_sink = (
        _in_slots(x, permutation)
        for x in (segment_ids, positions, _is_sink(segment_ids, num_sinks))
    )
    tokens = permutations.segment_length(segment)
    rank = permutations.segment_rank(segment)
    is_valid = segment > 0
    in_front = jnp.where(is_valid, jnp.minimum(back, tokens - 1), 0)
    behind = jnp.where(is_valid, jnp.minimum(ahead, tokens - 1 - in_front), 0)
    index = jnp.arange(length, dtype=jnp.int32)
    copies = jnp.cumsum(jnp.where(rank == 0, in_front + behind, 0), axis=-1)
    lane = (index + copies - behind).astype(jnp.int32)
    copy = jnp.where(
        rank < behind, lane + tokens, jnp.where(rank >= tokens - in_front, lane - tokens, -1)
    )
    # The slot in each lane. A lane without one keeps segment 0.
    lanes = 2 * length

    def fill(lane, copy):
        empty = jnp.full((lanes,), -1, jnp.int32)
        return (
            empty.at[lane].set(index).at[jnp.where(copy < 0, lanes, copy)].set(index, mode='drop')
        )

    slot_in = jax.vmap(fill)(lane, copy)
    is_filled = slot_in >= 0
    slot_in = jnp.maximum(slot_in, 0)

    def in_lanes(x):
        return permutations.take_rows(x, slot_in)

    low, high = lane - in_front, lane + behind
    block, chunk = sizes(length, lanes, min(window, length))
    queries = Queries(
        segment,
        low,
        high,
        position if is_causal else None,
        permutation,
        slot,
        _permuted_sinks(segment_ids, permutation, permutations.take_rows(lane, slot), num_sinks),
    )
    in_slots = jnp.stack([lane, copy], axis=-1)
    keys = Keys(
        jnp.where(is_filled, in_lanes(segment), 0),
        jnp.arange(lanes, dtype=jnp.int32)[None],
        in_lanes(position),
        in_lanes(permutation),
        permutations.take_rows(in_slots, slot),
        None if is_sink is None else in_lanes(is_sink),
    )
    start, stop = _block_ranges(low, high + 1, is_valid, block)
    return Plan(_pad_queries(queries, block), keys, start, stop), block, chunk


def chosen_blocks(
    chosen: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    number: jax.Array,
    *,
    block_size: int,
    parts: int,
    is_own: jax.Array,
    num_sinks: int,
) -> tuple[Plan, int, int]:
    """Queries in parts, one for each block of keys they chose, sorted by block (MoBA).

    Args:
      chosen: int32 `[B, T·parts]`, the number of the chosen block or -1.
      positions: `[B, T]`.
      segment_ids: `[B, T]`.
      number: `[B, T]`, the number of each token's block.
      block_size: keys per block.
      parts: parts of a token, standing together.
      is_own: `[parts]`, which of them hold the own block; they see the sinks.
      num_sinks: first tokens of a segment that are always visible.

    Returns:
      The plan, the parts per block and the keys per chunk.
    """
    length = segment_ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    # The first token of each block, by number.
    first = jax.vmap(lambda n: jnp.full((length,), _FAR, jnp.int32).at[n].min(index))(number)
    token = jnp.repeat(index, parts)[None]
    is_seeing = (chosen >= 0) & (permutations.take_rows(segment_ids, token) > 0)
    low = jnp.where(is_seeing, permutations.take_rows(first, jnp.maximum(chosen, 0)), _FAR)
    high = jnp.minimum(low + block_size - 1, token)
    order = jnp.argsort(low, axis=-1).astype(jnp.int32)
    low, high, is_seeing = (permutations.take_rows(x, order) for x in (low, high, is_seeing))
    token = permutations.take_rows(token, order)
    segment = jnp.where(is_seeing, permutations.take_rows(segment_ids, token), 0)
    latest = permutations.take_rows(positions, token)
    sinks = None
    if num_sinks:
        sinks = permutations.take_rows(_own_sinks(segment_ids, num_sinks), token)
        sinks = jnp.where(jnp.tile(is_own, length)[order][..., None], sinks, -1)
    block, chunk = sizes(chosen.shape[1], length, block_size)
    start, stop = _block_ranges(low, high + 1, is_seeing, block)
    lane = permutations.inverse_permutation(order)
    queries = Queries(segment, low, high, latest, order, lane, sinks)
    is_sink = _is_sink(segment_ids, num_sinks)
    keys = Keys(segment_ids, index[None], positions, None, None, is_sink)
    return Plan(_pad_queries(queries, block), keys, start, stop), block, chunk


def _block_ranges(start, stop, is_seeing, block):
    """The lanes `[B or 1, blocks]` that a block's queries need together; none: start > stop."""
    start = _pad_lanes(jnp.where(is_seeing, start, _FAR), block, _FAR)
    stop = _pad_lanes(jnp.where(is_seeing, stop, 0), block, 0)
    start, stop = (x.reshape(x.shape[0], -1, block) for x in (start, stop))
    return start.min(-1), stop.max(-1)


def _fixed_span(queries: Queries, keys: Keys, back: int, ahead: int) -> tuple[Plan, int, int]:
    """A plan in which every block meets the lanes from `back` before to `ahead` behind itself."""
    length = queries.segment.shape[-1]
    back, ahead = min(back, length - 1), min(ahead, length - 1)
    block, chunk = sizes(length, length, back + ahead + 1)
    index = jnp.arange(-(-length // block), dtype=jnp.int32)[None] * block
    stop = None
    if chunk < min(block + back + ahead, length):
        stop = jnp.minimum(index + block + ahead, length)
    start = jnp.maximum(index - back, 0)
    return Plan(_pad_queries(queries, block), keys, start, stop), block, chunk


def _in_slots(x, permutation):
    """An array `[B or 1, T]` by slot."""
    return None if x is None else permutations.take_rows(x, permutation)


def _is_sink(segment_ids, num_sinks):
    return permutations.segment_rank(segment_ids) < num_sinks if num_sinks else None


def _own_sinks(segment_ids, num_sinks):
    """The tokens `[B or 1, T, num_sinks]` that begin each token's segment, -1 for none."""
    if not num_sinks:
        return None
    number = jnp.arange(num_sinks, dtype=jnp.int32)
    is_there = number < permutations.segment_length(segment_ids)[..., None]
    is_there &= (segment_ids > 0)[..., None]
    return jnp.where(is_there, permutations.segment_start(segment_ids)[..., None] + number, -1)


def _permuted_sinks(segment_ids, permutation, lane, num_sinks):
    """The lanes of the sinks that the query in each slot sees; `lane` holds each token's."""
    if not num_sinks:
        return None
    tokens = permutations.take_rows(_own_sinks(segment_ids, num_sinks), permutation)
    flat = jnp.maximum(tokens, 0).reshape(tokens.shape[0], -1)
    lanes = permutations.take_rows(lane, flat)
    return jnp.where(tokens < 0, -1, lanes.reshape(-1, *tokens.shape[1:]))


def _pad_lanes(x, block, fill):
    """`[B or 1, T, ...]` to whole blocks."""
    missing = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=fill)


def _pad_queries(queries: Queries, block: int) -> Queries:
    padded = jax.tree.map(lambda x: _pad_lanes(x, block, 0), queries._replace(lane=None))
    if queries.sinks is not None:
        padded = padded._replace(sinks=_pad_lanes(queries.sinks, block, -1))
    return padded._replace(lane=queries.lane)


def _runs(query_segment, segment):
    """The first key of each query's segment and the number of its keys, 0 if there is none."""
    # Runs are contiguous but in any order of numbers: a stable sort keeps each one together.
    order = jnp.argsort(segment, axis=-1, stable=True).astype(jnp.int32)
    by_number = jnp.take_along_axis(segment, order, axis=-1)
    batch = max(query_segment.shape[0], segment.shape[0])
    query_segment, by_number = (
        jnp.broadcast_to(x, (batch, x.shape[1])) for x in (query_segment, by_number)
    )
    first = jax.vmap(jnp.searchsorted)(by_number, query_segment)
    last = jax.vmap(lambda a, v: jnp.searchsorted(a, v, side='right'))(by_number, query_segment)
    return permutations.take_rows(order, first), (last - first).astype(jnp.int32)


def _first_at_least(position, target, start, stop):
    """Binary search for the first key in [start, stop) whose position reaches `target`."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        is_before = permutations.take_rows(position, middle) < target
        is_open = low < high
        low = jnp.where(is_open & is_before, middle + 1, low)
        return low, jnp.where(is_open & ~is_before, middle, high)

    steps = position.shape[1].bit_length()
    shape = jnp.broadcast_shapes(start.shape, (*position.shape[:1], 1), target.shape)
    bounds = tuple(jnp.broadcast_to(x, shape) for x in (start, stop))
    return jax.lax.fori_loop(0, steps, halve, bounds)[0]
