"""Which lanes each pattern needs: the way from visibility relations to blocks.

Every plan comes with its block of queries and its chunk of keys, in lanes.
"""

import jax
import jax.numpy as jnp

from sa_jax.attention import inputs, masks
from sa_jax.attention import permutation as permutations
from sa_jax.attention.lanes import Interval, Keys, Plan, Queries, Sizes

_FAR = inputs.FARTHEST
_SMALLEST_BLOCK, _LARGEST_BLOCK, _LONGEST_CHUNK = 64, 256, 1024
_SMALLEST_STAIR = 128


def choose_sizes(queries: int, keys: int, reach: int) -> Sizes:
    """Lanes per block of queries and per chunk of keys, for `reach` keys a query.

    A block of B queries under a window of w keys computes B + w - 1 keys a query: small blocks
    waste less, large ones run faster. These were the fastest measured on the CPU.
    """
    block = _SMALLEST_BLOCK
    while block < min(reach // 2, _LARGEST_BLOCK):
        block *= 2
    block = min(block, queries)
    span = min(block + reach - 1, keys)
    return Sizes(block, span if span <= _LONGEST_CHUNK else _LONGEST_CHUNK // 2)


# Positions and segment ids, `[B or 1, T]`; None: the index, and a single segment of valid tokens.
Tokens = tuple[jax.Array | None, jax.Array | None]


def everything(segment_ids: jax.Array | None, length: int, is_causal: bool) -> tuple[Plan, Sizes]:
    """Full attention over tokens in their own order."""
    seen = _own_segment(segment_ids, length, is_causal, 0)
    is_valid = _is_valid(segment_ids)
    queries = Queries(seen, None, is_valid, None, None)
    return _own_ranges(queries, Keys(None, None, is_valid), choose_sizes(length, length, length))


def elsewhere(
    query_tokens: Tokens,
    key_tokens: Tokens,
    window: int | None,
    is_causal: bool,
    num_sinks: int,
) -> tuple[Plan, Sizes]:
    """Full (window None) and sliding-window attention to keys with tokens of their own."""
    query_positions, query_segment = query_tokens
    positions, segment = key_tokens
    first, run_length = _runs(query_segment, segment)
    low, high = _window_positions(query_positions, window, is_causal)
    start = _first_at_least(positions, low, first, first + run_length)
    stop = _first_at_least(positions, high + 1, first, first + run_length)
    sinks = None
    if num_sinks:
        is_there = (query_segment > 0)[..., None]
        is_there &= jnp.arange(num_sinks) < run_length[..., None]
        sinks = first[..., None] + jnp.arange(num_sinks)
        last = _first_at_least(positions, query_positions + 1, first, first + run_length)
        is_there &= (sinks < last[..., None]) | (not is_causal)
        sinks = jnp.where(is_there, sinks, -1)
        start = jnp.maximum(start, first + num_sinks)
    count = jnp.where(query_segment > 0, jnp.maximum(stop - start, 0), 0)
    seen = Interval(start, count)
    reach = segment.shape[-1] if window is None else window
    queries = Queries(seen, None, _is_valid(query_segment), None, sinks)
    keys = Keys(None, None, _is_valid(segment))
    return _own_ranges(
        queries, keys, choose_sizes(query_segment.shape[-1], segment.shape[-1], reach)
    )


def band(
    tokens: Tokens, length: int, window: int, is_causal: bool, num_sinks: int
) -> tuple[Plan, Sizes]:
    """A sliding window over tokens in their own order."""
    positions, segment_ids = tokens
    back, ahead = (window - 1, 0) if is_causal else masks.window_sides(window)
    own = _own_segment(segment_ids, length, False, num_sinks)
    low, high = own.first, own.first + own.count
    if positions is None:
        index = jnp.arange(length, dtype=jnp.int32)[None]
        low, high = jnp.maximum(low, index - back), jnp.minimum(high, index + ahead + 1)
    else:
        # Positions may leave gaps, never less than one apart: as tokens the window is no wider.
        low, high = (
            _first_at_least(positions, x, low, high)
            for x in (positions - back, positions + ahead + 1)
        )
    seen = Interval(low, jnp.maximum(high - low, 0))
    is_valid = _is_valid(segment_ids)
    sinks = _own_sinks(segment_ids, length, is_causal, num_sinks)
    queries = Queries(seen, None, is_valid, None, sinks)
    return _fixed_span(queries, Keys(None, None, is_valid), back, ahead)


def slots(
    permutation: jax.Array,
    segment_ids: jax.Array | None,
    window: int,
    is_causal: bool,
    num_sinks: int,
) -> tuple[Plan, Sizes]:
    """A window over permuted tokens, `permutation` `[B or 1, T]`."""
    back, ahead = masks.window_sides(window)
    length = permutation.shape[-1]
    slot = permutations.inverse_permutation(permutation)
    index = jnp.arange(length, dtype=jnp.int32)[None]
    seen = Interval(index - back, jnp.full_like(index, back + ahead + 1))
    own = _own_segment(segment_ids, length, is_causal, num_sinks)
    own, is_valid = _in_lanes((own, _is_valid(segment_ids)), permutation)
    sinks = _permuted_sinks(segment_ids, permutation, slot, is_causal, num_sinks)
    queries = Queries(seen, own, is_valid, permutation, sinks)
    keys = Keys(permutation, slot[..., None], is_valid)
    return _fixed_span(queries, keys, back, ahead)


def distant_slots(
    permutation: jax.Array, tokens: Tokens, window: int, local_window: int, num_sinks: int
) -> tuple[Plan, Sizes]:
    """Of a causal window over permuted tokens those before a sliding window of the query's."""
    _, segment_ids = tokens
    length = permutation.shape[-1]
    near = band(tokens, length, local_window, True, num_sinks)[0].queries.lanes
    own = _own_segment(segment_ids, length, True, num_sinks)
    stop = jnp.minimum(own.first + own.count, near.first[:, :length])
    distant = Interval(own.first, jnp.maximum(stop - own.first, 0))
    back, ahead = masks.window_sides(window)
    slot = permutations.inverse_permutation(permutation)
    index = jnp.arange(length, dtype=jnp.int32)[None]
    first, stop = jnp.maximum(index - back, 0), jnp.minimum(index + ahead + 1, length)
    seen = Interval(first, stop - first)
    distant, is_valid = _in_lanes((distant, _is_valid(segment_ids)), permutation)
    queries = Queries(seen, distant, is_valid, permutation, None)
    keys = Keys(permutation, slot[..., None], is_valid)
    # Some queries see none of these: no single chunk would do.
    return _own_ranges(queries, keys, choose_sizes(length, length, back + ahead + 1))


def circle(
    permutation: jax.Array,
    segment_ids: jax.Array | None,
    window: int,
    is_causal: bool,
    num_sinks: int,
) -> tuple[Plan, Sizes]:
    """A window that wraps around within each segment's slots.

    Every segment of m tokens gets copies of its last slots in front and of its first ones behind,
    at most m - 1 in all, so that each query's window is a run of lanes and holds a key once.
    """
    length = permutation.shape[-1]
    back, ahead = masks.window_sides(window)
    slot = permutations.inverse_permutation(permutation)
    ids = jnp.ones((1, length), jnp.int32) if segment_ids is None else segment_ids
    own = _own_segment(segment_ids, length, is_causal, num_sinks)
    own, is_valid, segment = _in_lanes((own, _is_valid(segment_ids), ids), permutation)
    tokens = permutations.segment_length(segment)
    rank = permutations.segment_rank(segment)
    in_front = jnp.where(segment > 0, jnp.minimum(back, tokens - 1), 0)
    behind = jnp.where(segment > 0, jnp.minimum(ahead, tokens - 1 - in_front), 0)
    index = jnp.arange(length, dtype=jnp.int32)
    copies = jnp.cumsum(jnp.where(rank == 0, in_front + behind, 0), axis=-1)
    lane = (index + copies - behind).astype(jnp.int32)
    copy = jnp.where(
        rank < behind,
        lane + tokens,
        jnp.where(rank >= tokens - in_front, lane - tokens, -1),
    )
    # The slot in each lane; a lane without one, behind all others, is in nobody's window.
    lanes = 2 * length

    def fill(lane, copy):
        empty = jnp.zeros((lanes,), jnp.int32)
        return (
            empty.at[lane].set(index).at[jnp.where(copy < 0, lanes, copy)].set(index, mode='drop')
        )

    slot_in = jax.vmap(fill)(lane, copy)
    count = jnp.where(segment > 0, in_front + 1 + behind, 0)
    seen = Interval(lane - in_front, count)
    lane_of_token = permutations.take_rows(lane, slot)
    sinks = _permuted_sinks(segment_ids, permutation, lane_of_token, is_causal, num_sinks)
    queries = Queries(seen, own, is_valid, permutation, sinks)
    lanes_of_token = permutations.take_rows(jnp.stack([lane, copy], axis=-1), slot)
    row, is_valid = _in_lanes((permutation, is_valid), slot_in)
    keys = Keys(row, lanes_of_token, is_valid)
    return _own_ranges(queries, keys, choose_sizes(length, lanes, min(window, length)))


def chunks(
    permutation: jax.Array,
    segment_ids: jax.Array | None,
    chunk_size: int,
    is_causal: bool,
    num_sinks: int,
) -> tuple[Plan, Sizes]:
    """Chunks of permuted tokens, each sorted by position (stochastic partition)."""
    length = permutation.shape[-1]
    chunk_size = min(chunk_size, length)
    order, number = permutations.partition(permutation, segment_ids, chunk_size)
    slot = permutations.inverse_permutation(order)
    first = permutations.segment_start(number)
    stop = jnp.arange(length, dtype=jnp.int32)[None] + 1
    if not is_causal:
        stop = first + permutations.segment_length(number)
    is_valid = _in_lanes(_is_valid(segment_ids), order)
    seen = Interval(first, stop - first if is_valid is None else (stop - first) * is_valid)
    own = None
    if num_sinks:
        own = _in_lanes(_own_segment(segment_ids, length, is_causal, num_sinks), order)
    sinks = _permuted_sinks(segment_ids, order, slot, is_causal, num_sinks)
    queries = Queries(seen, own, is_valid, order, sinks)
    keys = Keys(order, slot[..., None], is_valid)
    if segment_ids is None and chunk_size <= _LONGEST_CHUNK // 2:
        # Without segments every chunk but the last is full: each block of queries is a few of them.
        block = min(chunk_size * max(1, _LARGEST_BLOCK // chunk_size), length)
        # Chunks are sorted: causally, nobody sees a lane behind its own.
        stairs = max(1, block // _SMALLEST_STAIR) if is_causal else 1
        # Key lanes that fill up the last block read token 0 and are in nobody's interval.
        keys = keys._replace(row=_pad_lanes(order, block, 0))
        plan = Plan(_pad_queries(queries, block), keys, _block_starts(length, block), None)
        return plan, Sizes(block, block, stairs)
    return _fixed_span(queries, keys, chunk_size - 1, 0 if is_causal else chunk_size - 1)


def chosen_blocks(
    chosen: jax.Array,
    segment_ids: jax.Array,
    number: jax.Array,
    *,
    block_size: int,
    parts: int,
    is_own: jax.Array,
    num_sinks: int,
) -> tuple[Plan, Sizes]:
    """Queries in parts, one for each block of keys they chose, sorted by block (MoBA).

    Args:
      chosen: int32 `[B, T·parts]`, the number of the chosen block or -1.
      segment_ids: `[B, T]`.
      number: `[B, T]`, the number of each token's block.
      block_size: keys per block.
      parts: parts of a token, standing together.
      is_own: `[parts]`, which of them hold the own block; they see the sinks.
      num_sinks: first tokens of a segment that are always visible.

    Returns:
      The plan, and its sizes in parts and keys.
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
    sinks = None
    if num_sinks:
        # The own block holds its token's sinks, others at most what lies behind them.
        low = jnp.maximum(
            low,
            permutations.take_rows(permutations.segment_start(segment_ids), token) + num_sinks,
        )
        sinks = permutations.take_rows(_own_sinks(segment_ids, length, True, num_sinks), token)
        sinks = jnp.where(jnp.tile(is_own, length)[order][..., None], sinks, -1)
    seen = Interval(low, jnp.where(is_seeing, jnp.maximum(high + 1 - low, 0), 0))
    queries = Queries(seen, None, is_seeing, order, sinks)
    keys = Keys(None, None, _is_valid(segment_ids))
    return _own_ranges(queries, keys, choose_sizes(chosen.shape[1], length, block_size))


def _own_segment(segment_ids, length, is_causal, num_sinks) -> Interval:
    """The tokens of each token's segment behind its sinks; if causal, none later than itself."""
    index = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids is None:
        first, stop = jnp.zeros_like(index), jnp.full_like(index, length)
    else:
        first = permutations.segment_start(segment_ids)
        stop = jnp.where(segment_ids > 0, first + permutations.segment_length(segment_ids), 0)
    if is_causal:
        stop = jnp.minimum(stop, index + 1)
    first = first + num_sinks
    return Interval(first, jnp.maximum(stop - first, 0))


def _is_valid(segment_ids):
    return None if segment_ids is None else segment_ids > 0


def _window_positions(positions, window, is_causal):
    """The first and the last position that queries see."""
    if window is None:
        low = jnp.full_like(positions, -_FAR)
        return low, positions if is_causal else jnp.full_like(positions, _FAR)
    back, ahead = (window - 1, 0) if is_causal else masks.window_sides(window)
    return positions - back, positions + ahead


def _block_ranges(seen: Interval, block):
    """The lanes `[B or 1, blocks]` that a block's queries need together; none: start > stop."""
    is_seeing = seen.count > 0
    start = _pad_lanes(jnp.where(is_seeing, seen.first, _FAR), block, _FAR)
    stop = _pad_lanes(jnp.where(is_seeing, seen.first + seen.count, 0), block, 0)
    start, stop = (x.reshape(x.shape[0], -1, block) for x in (start, stop))
    return start.min(-1), stop.max(-1)


def _own_ranges(queries: Queries, keys: Keys, sizes: Sizes) -> tuple[Plan, Sizes]:
    """A plan in which every block meets the lanes that its queries need."""
    ranges = _block_ranges(queries.lanes, sizes.block)
    return Plan(_pad_queries(queries, sizes.block), keys, *ranges), sizes


def _fixed_span(queries: Queries, keys: Keys, back: int, ahead: int) -> tuple[Plan, Sizes]:
    """A plan in which every block meets the lanes from `back` before to `ahead` behind itself."""
    length = queries.lanes.first.shape[-1]
    back, ahead = min(back, length - 1), min(ahead, length - 1)
    sizes = choose_sizes(length, length, back + ahead + 1)
    index = _block_starts(length, sizes.block)
    stop = None
    if sizes.chunk < min(sizes.block + back + ahead, length):
        stop = jnp.minimum(index + sizes.block + ahead, length)
    start = jnp.maximum(index - back, 0)
    return Plan(_pad_queries(queries, sizes.block), keys, start, stop), sizes


def _block_starts(length, block):
    return jnp.arange(-(-length // block), dtype=jnp.int32)[None] * block


def _in_lanes(tree, row):
    """Arrays `[B or 1, T]` by lane."""
    return jax.tree.map(lambda x: permutations.take_rows(x, row), tree)


def _own_sinks(segment_ids, length, is_causal, num_sinks):
    """The first tokens `[B or 1, T, num_sinks]` that each token sees, -1 for none."""
    if not num_sinks:
        return None
    own = _own_segment(segment_ids, length, is_causal, 0)
    number = jnp.arange(num_sinks, dtype=jnp.int32)
    return jnp.where(number < own.count[..., None], own.first[..., None] + number, -1)


def _permuted_sinks(segment_ids, permutation, lane, is_causal, num_sinks):
    """The lanes of the sinks that the query in each slot sees; `lane` holds each token's."""
    if not num_sinks:
        return None
    sinks = _own_sinks(segment_ids, permutation.shape[-1], is_causal, num_sinks)
    tokens = permutations.take_rows(sinks, permutation)
    flat = jnp.maximum(tokens, 0).reshape(tokens.shape[0], -1)
    lanes = permutations.take_rows(lane, flat)
    return jnp.where(tokens < 0, -1, lanes.reshape(-1, *tokens.shape[1:]))


def _pad_lanes(x, block, fill):
    """`[B or 1, T, ...]` to whole blocks."""
    missing = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=fill)


def _pad_queries(queries: Queries, block: int) -> Queries:
    length = queries.lanes.first.shape[-1]
    if queries.row is not None and length % block:
        # Lanes behind the last token read its row and write none.
        is_valid = queries.is_valid
        queries = queries._replace(
            is_valid=jnp.ones((1, length), bool) if is_valid is None else is_valid
        )
    padded = jax.tree.map(lambda x: _pad_lanes(x, block, 0), queries)
    if queries.row is not None:
        padded = padded._replace(row=_pad_lanes(queries.row, block, length))
    if queries.sinks is not None:
        padded = padded._replace(sinks=_pad_lanes(queries.sinks, block, -1))
    return padded


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
