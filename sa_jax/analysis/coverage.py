"""Receptive fields through a stack of layers, exactly, with a bit per query and token.

Of every query asked for, the tokens it sees through one layer, two, and so on are found by walking
down: a token is seen after a layer more if any token that sees it was seen before. Queries are the
bits of words, so that 32 of them move in one operation, and nothing has n × n entries: all n
queries are affordable while n is small, a random sample of them at any n.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sa_jax.analysis.adjacency import Runs

_BITS = 32
# Slots that a step of the filtered union looks at: enough for its loop's cost not to count.
_UNROLL = 16


def receptive_fields(layers: Iterable[Sequence[Runs]], queries: np.ndarray) -> Iterator[np.ndarray]:
    """Yields what the queries see through the first layer, the first two, and so on.

    Args:
      layers: `layer_runs` of each layer, the query's own first.
      queries: int `[Q]`, different tokens.

    Yields:
      uint32 `[ceil(Q / 32), n]`: bit q % 32 of word q // 32 says whether query q sees the token.
    """
    bits = None
    for layer in layers:
        if bits is None:
            bits = _own_tokens(queries, len(layer[0].order))
        bits = functools.reduce(np.bitwise_or, [_walk(bits, runs) for runs in layer])
        yield bits


def field_sizes(bits: np.ndarray, count: int) -> np.ndarray:
    """How many tokens each of the first `count` queries sees: int64 `[count]`."""
    return _count_bits(bits).reshape(-1)[:count]


class Share(NamedTuple):
    """How much of what queries might see they do see."""

    connected: float  # of all admissible pairs of a query and a token
    sampling_error: float  # its standard error, for the choice of queries; 0 if none is left out
    worst: float  # of the query that sees least
    tokens: float  # that a query sees on average


def share_seen(bits: np.ndarray, queries: np.ndarray, causal: bool) -> Share:
    """Counts the connected pairs among the admissible ones, the query with itself included."""
    n, count = bits.shape[1], len(queries)
    seen = field_sizes(bits, count)
    admissible = queries + 1 if causal else np.full(count, n)
    ratio = seen.sum() / admissible.sum()
    error = 0.0
    if count < n:
        # Of a ratio of two means, queries being drawn without replacement; one says nothing of it.
        residual = seen - ratio * admissible
        variance = (residual**2).sum() / (count - 1) if count > 1 else np.nan
        error = np.sqrt(variance * (1 - count / n) / count) / admissible.mean()
    return Share(float(ratio), float(error), float((seen / admissible).min()), float(seen.mean()))


def share_by_distance(bits: np.ndarray, queries: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """Of the pairs of a query and an earlier token, the share connected, by their distance.

    Args:
      bits: of `receptive_fields`.
      queries: `[Q]`.
      edges: ascending; bin b holds the distances edges[b], …, edges[b + 1] - 1.

    Returns:
      float64 `[bins]`, NaN for a bin without pairs.
    """
    ends = np.maximum(queries[:, None] + 1 - np.asarray(edges), 0)  # tokens before each distance
    connected = np.zeros(len(edges) - 1, np.int64)
    for word, end in zip(bits, np.split(ends, range(_BITS, len(ends), _BITS)), strict=True):
        before = np.zeros((len(word) + 1, len(end)), np.int32)
        np.cumsum(_unpack(word)[:, : len(end)], axis=0, out=before[1:])
        counts = np.take_along_axis(before, end.T, axis=0)  # [edges, queries]
        connected += (counts[:-1] - counts[1:]).sum(1)
    pairs = (ends[:, :-1] - ends[:, 1:]).sum(0)
    return np.where(pairs > 0, connected / np.maximum(pairs, 1), np.nan)


def _own_tokens(queries: np.ndarray, n: int) -> np.ndarray:
    bits = np.zeros((-(-len(queries) // _BITS), n), np.uint32)
    number = np.arange(len(queries))
    bits[number // _BITS, queries] = np.uint32(1) << (number % _BITS).astype(np.uint32)
    return bits


def _unpack(word: np.ndarray) -> np.ndarray:
    """The bits of uint32 `[n]` as uint8 `[n, 32]`, the lowest first."""
    as_bytes = word.astype('<u4').view(np.uint8).reshape(-1, 4)
    return np.unpackbits(as_bytes, axis=1, bitorder='little')


def _count_bits(bits: np.ndarray) -> np.ndarray:
    """How many of the words in each row of uint32 `[words, n]` have each bit: `[words, 32]`.

    Words are added three at a time into a word of sums and one of carries, which count double.
    """
    if bits.shape[1] < 3:
        return np.stack([_unpack(word).sum(0, dtype=np.int64) for word in bits])
    carries = []
    while bits.shape[1] >= 3:
        third = bits.shape[1] // 3
        a, b, c = (bits[:, k * third : (k + 1) * third] for k in range(3))
        either = a ^ b
        carries.append((a & b) | (c & either))
        bits = np.concatenate([either ^ c, bits[:, 3 * third :]], axis=1)
    return _count_bits(bits) + 2 * _count_bits(np.concatenate(carries, axis=1))


def _walk(bits: np.ndarray, runs: Runs) -> np.ndarray:
    """Bits of the tokens that are seen from those whose bits are set: a layer further down."""
    first, stop = _seen_by(runs)
    slots = bits[:, runs.order]
    if runs.is_filtered:
        seen = _union_of_later(slots, runs.order, first, stop)
    else:
        seen = _union(slots, first, stop)
    result = np.empty_like(bits)
    result[:, runs.order] = seen
    return result


def _seen_by(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """The run of slots that see each slot: since both ends of runs grow, it is a run as well."""
    n = len(runs.order)
    # Two more rounds of the circle; on a line these slots see none of the others.
    first, stop = (np.concatenate([ends - n, ends, ends + n]) for ends in (runs.first, runs.stop))
    slot = np.arange(n)
    return np.searchsorted(stop, slot, 'right') - n, np.searchsorted(first, slot, 'right') - n


def _union(slots: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The union of slots first, …, stop - 1 for each slot, in about log2 of their number steps.

    A run is the union of two that overlap and are as long as a power of two.
    """
    n = slots.shape[1]
    if first.min() < 0 or stop.max() > n:
        slots, first, stop = np.tile(slots, 3), first + n, stop + n
    count = stop - first
    result = np.empty((len(slots), n), slots.dtype)
    length = 1
    while True:
        is_last = (length <= count) & (count < 2 * length)
        at = np.flatnonzero(is_last)
        result[:, at] = slots[:, first[at]] | slots[:, stop[at] - length]
        if 2 * length > count.max():
            return result
        longer = slots.copy()
        longer[:, :-length] |= slots[:, length:]
        slots, length = longer, 2 * length


def _union_of_later(
    slots: np.ndarray, token: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """The union of those slots first, …, stop - 1 whose token isn't earlier than the slot's own."""
    first, stop = (ends - np.arange(len(token)) for ends in (first, stop))
    sides = first.min(), stop.max()
    first, stop, *sides = (np.asarray(x, np.int32) for x in (first, stop, *sides))
    return np.asarray(_scan_later(slots, token, first, stop, *sides))


@jax.jit
def _scan_later(slots, token, first, stop, lowest, highest):
    """Looks at each slot's neighbours lowest, …, highest - 1 slots on, which may wrap around."""
    words, n = slots.shape
    around = 3 + -(-_UNROLL // n)
    slots, tokens = jnp.tile(slots, (1, around)), jnp.tile(token, around)

    def look(step, seen):
        offset = lowest + step * _UNROLL
        near = lax.dynamic_slice(slots, (0, n + offset), (words, n + _UNROLL))
        near_tokens = lax.dynamic_slice(tokens, (n + offset,), (n + _UNROLL,))
        for k in range(_UNROLL):
            is_seen = (first <= offset + k) & (offset + k < stop)
            is_seen &= near_tokens[k : k + n] >= token
            seen |= jnp.where(is_seen, near[:, k : k + n], jnp.uint32(0))
        return seen

    steps = -(-(highest - lowest) // _UNROLL)
    return lax.fori_loop(0, steps, look, jnp.zeros((words, n), jnp.uint32))
