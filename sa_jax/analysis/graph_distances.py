"""Shortest paths in large sparse graphs, from sampled sources."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

# Beyond so many hops, whole sweeps over all edges cost more than a search from each source.
_MAX_SWEEPS = 64


class Estimate(NamedTuple):
    """A figure and its standard error, 0 where it is exact."""

    value: float
    error: float

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of a normal error."""
        return self.value - 1.96 * self.error, self.value + 1.96 * self.error


def mean_shortest_path(
    graph: sparse.csr_array, rng: np.random.Generator, *, sources: int
) -> Estimate | None:
    """Mean hops over all ordered pairs of different nodes.

    The mean distance from a node to all others is averaged over nodes drawn without replacement,
    which gives the standard error; with as many sources as nodes the figure is exact.

    Args:
      graph: `[n, n]`, strongly connected, without self-loops.
      rng: draws the sources.
      sources: how many, at most; at least 2.

    Returns:
      None if there is no pair.

    Raises:
      ValueError: if some node can't be reached, or `sources` is below 2.
    """
    n = graph.shape[0]
    if sources < 2:
        raise ValueError(f'sources={sources}; expected at least 2, for an error of the mean')
    if n < 2:
        return None
    count = min(sources, n)
    chosen = rng.choice(n, count, replace=False)
    means = total_distances(graph, chosen) / (n - 1)
    if count == n:
        return Estimate(float(means.mean()), 0.0)
    error = means.std(ddof=1) / np.sqrt(count) * np.sqrt(1 - count / n)
    return Estimate(float(means.mean()), float(error))


def total_distances(graph: sparse.csr_array, sources: np.ndarray) -> np.ndarray:
    """Hops from each source to all nodes, summed over the nodes: int64 `[len(sources)]`.

    Args:
      graph: `[n, n]`, strongly connected.
      sources: nodes.

    Raises:
      ValueError: if some node can't be reached.
    """
    # As SciPy wants them, or it copies the graph for every search.
    weighted = graph.astype(np.float64)
    first = _hops_by_level(weighted, sources[0])
    if len(first) > _MAX_SWEEPS:
        others = [_total(_hops_by_level(weighted, x)) for x in sources[1:]]
        return np.array([_total(first), *others])
    backward = graph.T.tocsr()
    batches = [sources[i : i + 64] for i in range(0, len(sources), 64)]
    return np.concatenate([_sweep(backward, x) for x in batches])


def _total(nodes_by_level: np.ndarray) -> int:
    return int(nodes_by_level @ np.arange(len(nodes_by_level)))


def _hops_by_level(graph: sparse.csr_array, source: int) -> np.ndarray:
    """How many nodes are 0, 1, 2, … hops from the source: breadth-first search with a queue."""
    order, predecessor = csgraph.breadth_first_order(graph, source)
    if len(order) < graph.shape[0]:
        raise _disconnected(source)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # By place in the queue: nodes of a level stand together, and so do their predecessors.
    predecessor = place[predecessor[order[1:]]]
    bounds = [0, 1]
    while bounds[-1] < len(order):
        bounds.append(1 + int(np.searchsorted(predecessor, bounds[-1])))
    return np.diff(bounds)


def _sweep(backward: sparse.csr_array, sources: np.ndarray) -> np.ndarray:
    """Sums of hops from at most 64 sources at once, each a bit of every node's word.

    A sweep over all edges extends all searches by a hop: a node is reached by what reached any of
    its predecessors.

    Args:
      backward: the transposed graph; row i has the predecessors of node i.
      sources: nodes.
    """
    n = backward.shape[0]
    reached = np.zeros(n, np.uint64)
    reached[sources] = np.uint64(1) << np.arange(len(sources), dtype=np.uint64)
    totals = np.zeros(len(sources), np.int64)
    starts = backward.indptr[:-1]
    if np.any(np.diff(backward.indptr) == 0):
        raise _disconnected(sources[0])
    missing = n - _bits(reached, len(sources))
    while missing.any():
        # Whoever isn't reached yet is at least one hop further away.
        totals += missing
        reached |= np.bitwise_or.reduceat(reached[backward.indices], starts)
        still_missing = n - _bits(reached, len(sources))
        if np.any((still_missing == missing) & (missing > 0)):
            raise _disconnected(sources[0])
        missing = still_missing
    return totals


def _bits(words: np.ndarray, count: int) -> np.ndarray:
    """In how many words each of the first `count` bits is set."""
    bits = np.unpackbits(words.astype('<u8', copy=False).view(np.uint8), bitorder='little')
    return bits.reshape(-1, 64).sum(0, dtype=np.int64)[:count]


def _disconnected(source: int) -> ValueError:
    return ValueError(
        f'not every node can be reached from node {source}; take the largest strongly connected '
        'component first'
    )
