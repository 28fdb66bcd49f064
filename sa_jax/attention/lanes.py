"""Lanes: where tokens stand in attention's blocks, and how rows are read and written there.

A query sees the keys whose lane lies in one interval and, where the lanes don't tell, whose token
lies in another. Since segments are contiguous and positions increase within them, an interval of
tokens says both "in my segment" and "not later than I".
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sa_jax.attention.permutation import take_rows

# Logits computed at a time: enough to keep the cores busy, few enough to stay in the cache.
LOGITS_PER_STEP = 2**21
# Blocks at a time at most: the backward has code for each of their stairs.
_BLOCKS_PER_STEP = 16


class Interval(NamedTuple):
    """The numbers first, …, first + count - 1 for each query; int32 `[B or 1, Q]` both."""

    first: jax.Array
    count: jax.Array  # at least 0

    def holds(self, number: jax.Array) -> jax.Array:
        """Which of `number` `[B or 1, S]` lie in each query's: `[B or 1, Q, S]`."""
        # Numbers before the first wrap around to large ones: one comparison instead of two.
        distance = (number[:, None, :] - self.first[..., None]).astype(jnp.uint32)
        return distance < self.count[..., None].astype(jnp.uint32)


class Queries(NamedTuple):
    """Query lanes; every array is `[B or 1, Q]`, Q a multiple of the block."""

    lanes: Interval  # of the keys seen
    tokens: Interval | None  # of the keys seen; None: the lanes say it all
    is_valid: jax.Array | None  # False where no valid token stands; None: everywhere one does
    row: jax.Array | None  # the token in each lane; None for the tokens' own order
    sinks: jax.Array | None  # `[B or 1, Q, num_sinks]`, lanes of first keys seen beside, or -1


class Keys(NamedTuple):
    """Key lanes; every array is `[B or 1, L]`."""

    row: jax.Array | None  # the token in each lane; None for the tokens' own order
    lanes: jax.Array | None  # `[B or 1, S, copies]`, the lanes of each token or -1
    is_valid: jax.Array | None  # False where no valid token stands; None: everywhere one does


class Plan(NamedTuple):
    """Which lanes each block of queries meets."""

    queries: Queries
    keys: Keys
    start: jax.Array  # `[B or 1, blocks]`, the first lane
    stop: jax.Array | None  # one behind the last; None: a single chunk holds them all


class Sizes(NamedTuple):
    """Lanes that are computed together."""

    block: int  # of queries
    chunk: int  # of keys
    # Parts of a block whose chunk is the block's own lanes, of which no query sees those behind its
    # part. Needs queries written by row.
    stairs: int = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed at trace time: sizes, and what becomes of the logits."""

    sizes: Sizes
    scale: float
    logits_soft_cap: float | None

    @property
    def stairs(self) -> list['Stair']:
        """The parts of each block; usually one, the whole block with its whole chunk."""
        block, chunk, count = self.sizes
        bounds = [block * i // count for i in range(count + 1)]
        return [Stair(a, b - a, chunk - (block - b)) for a, b in itertools.pairwise(bounds)]


class Stair(NamedTuple):
    """Query lanes of a block and the key lanes of its chunk that are read for them."""

    first: int  # query lane, within the block
    queries: int
    keys: int  # from the chunk's first on


class LaneReader:
    """Reads and writes tokens by lane, for one plan."""

    def __init__(self, settings: Settings, plan: Plan, query: jax.Array):
        self.settings, self.plan = settings, plan
        self.batch, length, heads, _ = query.shape
        # A single chunk of keys, in which every valid query sees itself.
        self.is_simple = plan.stop is None and plan.queries.sinks is None
        blocks, together = plan.start.shape[-1], 1
        if self.is_simple:
            logits = self.batch * heads * settings.sizes.block * settings.sizes.chunk
            most = min(_BLOCKS_PER_STEP, LOGITS_PER_STEP // logits)
            together = largest_divisor(blocks, most)
        self.steps = jnp.arange(blocks).reshape(-1, together)
        # Rows read and written by index need no padding.
        is_own = plan.queries.row is None
        self.length = blocks * settings.sizes.block if is_own else length

    def pad(self, x: jax.Array) -> jax.Array:
        """`[B, T, ...]` to whole blocks."""
        missing = self.length - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))

    def nothing(self, shape, dtype) -> jax.Array:
        """Where rows of `shape` will be written."""
        return jnp.zeros((self.batch, self.length, *shape), dtype)

    def for_blocks(self, block, indices):
        """`block(index)` of several blocks at once, with a leading axis for them."""
        if len(indices) > 1:
            return jax.vmap(block)(indices)
        return jax.tree.map(lambda x: x[None], block(indices[0]))

    def write(self, totals, blocks, row, first):
        """Puts the rows `[blocks, B, block, ...]` of blocks from `first` on where they belong."""
        together = functools.partial(jax.tree.map, _join_blocks)
        blocks, row = together(blocks), together(row)

        def put(total, rows):
            if row is None:
                start = first * self.settings.sizes.block
                return lax.dynamic_update_slice_in_dim(total, rows, start, axis=1)
            return _put_rows(total, rows, row)

        return jax.tree.map(put, totals, blocks)

    def queries(self, index, stair, tree):
        """A stair's rows of each array, zeroed where there is no valid token, and its lanes."""
        start, size = index * self.settings.sizes.block + stair.first, stair.queries
        queries = _slice(self.plan.queries, start, size)

        def read(x):
            rows = _slice(x, start, size) if queries.row is None else _take_runs(x, queries.row)
            return rows if queries.is_valid is None else zero_unless(rows, queries.is_valid)

        return jax.tree.map(read, tree), queries

    def for_chunks(self, index, chunk, carry):
        """Runs `chunk(number, carry)` over the block's chunks of keys."""
        if self.plan.stop is None:
            return chunk(0, carry)
        run = self.plan.stop[:, index].max() - self.plan.start[:, index].min()
        return lax.fori_loop(0, -(-run // self.settings.sizes.chunk), chunk, carry)

    def keys(self, index, stair, number, queries, key, value):
        """A chunk's k, v `[B, K, S, H]`, mask `[B or 1, Q, S]` and first lane, S = stair.keys."""
        size = stair.keys
        row = self.plan.keys.row
        count = key.shape[1] if row is None else row.shape[-1]
        wanted = self.plan.start[:, index].min() + number * size
        first = jnp.clip(wanted, 0, count - size)
        keys = _slice(self.plan.keys._replace(lanes=None), first, size)
        lane = first + jnp.arange(size)[None]
        mask = queries.lanes.holds(lane)
        if queries.tokens is not None:
            mask &= queries.tokens.holds(keys.row)
        if self.plan.stop is not None:
            # The last chunk is moved back to end within bounds: lanes already met stay out.
            mask &= lane >= wanted
        if row is None:
            k, v = _slice((key, value), first, size)
        else:
            k, v = (_take_runs(x, keys.row) for x in (key, value))
        if keys.is_valid is not None:
            k, v = (zero_unless(x, keys.is_valid) for x in (k, v))
        k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))
        return k, v, mask, first

    def sinks(self, queries, key, value):
        """Each query's first tokens: k, v `[B, K, block, c, H]`, mask `[.., block, c]`, lanes."""
        lanes = queries.sinks
        flat = jnp.maximum(lanes, 0).reshape(lanes.shape[0], -1)
        row = self.plan.keys.row
        row = flat if row is None else take_rows(row, flat)
        mask = lanes >= 0
        shape = (key.shape[0], *lanes.shape[1:], *key.shape[2:])
        k, v = (zero_unless(take_rows(x, row).reshape(shape), mask) for x in (key, value))
        k, v = (jnp.moveaxis(x, 3, 1) for x in (k, v))
        return k, v, mask, flat

    def keys_to_tokens(self, x):
        """Sums each token's lanes: `[B, L, ...]` to `[B, S, ...]`."""
        lanes = self.plan.keys.lanes
        if lanes is None:
            return x
        copies = (lanes[..., c] for c in range(lanes.shape[-1]))
        return sum(zero_unless(take_rows(x, jnp.maximum(lane, 0)), lane >= 0) for lane in copies)


def _slice(tree, start, size):
    """Lanes [start, start + size) of every array `[B, L, ...]`."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1), tree)


def _take_runs(x, rows):
    """`take_rows`, by rows without inner axes: so the CPU copies each as a single run."""
    flat = take_rows(x.reshape(*x.shape[:2], -1), rows)
    return flat.reshape(*flat.shape[:2], *x.shape[2:])


def zero_unless(x, is_valid):
    """Zeros rows that hold no token: NaN there must reach nothing."""
    return jnp.where(is_valid.reshape(*is_valid.shape, *(1,) * (x.ndim - is_valid.ndim)), x, 0)


def largest_divisor(number, most):
    """The largest divisor of `number` up to `most`, at least 1."""
    return next(d for d in range(max(1, min(number, most)), 0, -1) if number % d == 0)


def _join_blocks(x):
    """`[blocks, B, block, ...]` as `[B, blocks · block, ...]`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _put_rows(total, rows, lanes):
    """Writes to rows `[B or 1, n]` of `[B, T, ...]`; those behind the last are dropped."""
    if lanes.shape[0] == 1:
        return total.at[:, lanes[0]].set(rows, unique_indices=True, mode='drop')
    put = jax.vmap(lambda x, at, new: x.at[at].set(new, unique_indices=True, mode='drop'))
    return put(total, lanes, rows)
