"""Clustering coefficients of directed sparse graphs, counted or sampled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import sparse

from sa_jax.analysis.graph_distances import Estimate

# Up to so many pairs of neighbours, over all nodes, clustering is counted rather than sampled.
_COUNTED_PAIRS = 20_000_000
_CHUNK = 1 << 20


class Clustering(NamedTuple):
    """Clustering coefficients of the undirected view of a graph.

    Attributes:
      transitivity: closed pairs of neighbours over all pairs of neighbours, two nodes being
        neighbours if an edge joins them in either direction.
      parallel: the same where two opposite edges count as two parallel ones: a pair of neighbours
        is then a pair of edges. graph-tool counts so when it is given a directed graph, and so do
        Lin et al.
      local: mean over the nodes of the share of a node's pairs of neighbours that are closed
        (Watts and Strogatz), 0 for nodes with fewer than two neighbours.
    """

    transitivity: Estimate
    parallel: Estimate
    local: Estimate


def undirected_view(graph: sparse.csr_array) -> sparse.csr_array:
    """The symmetric graph with an edge wherever one exists in either direction."""
    view = (graph + graph.T).tocsr()
    view.sort_indices()
    return view


def clustering(graph: sparse.csr_array, rng: np.random.Generator, *, wedges: int) -> Clustering:
    """Clustering coefficients: counted, or sampled from pairs of neighbours in a large graph.

    A sampled share has a binomial error. The local coefficient is the share of closed ones among
    pairs of neighbours of nodes that are drawn uniformly, the global one that among all pairs
    (Schank and Wagner 2005).

    Args:
      graph: `[n, n]` without self-loops.
      rng: draws pairs of neighbours.
      wedges: pairs of neighbours to draw.

    Raises:
      ValueError: if `wedges` is below 1.
    """
    parallel = parallel_clustering(graph, rng, wedges=wedges)
    view = undirected_view(graph)
    degree = np.diff(view.indptr).astype(np.int64)
    pairs = degree * (degree - 1)
    if _is_countable(graph):
        joined = view.astype(np.int64)
        closed = (joined @ joined).multiply(joined).sum(axis=1)
        local = np.divide(closed, pairs, out=np.zeros(len(degree)), where=pairs > 0)
        transitivity = _ratio(closed.sum(), pairs.sum())
        return Clustering(Estimate(transitivity, 0.0), parallel, Estimate(float(local.mean()), 0.0))
    has_pairs = degree >= 2
    local = _closed_share(view, [view], has_pairs, rng, wedges)
    share = float(has_pairs.mean())
    return Clustering(
        transitivity=_closed_share(view, [view], pairs, rng, wedges),
        parallel=parallel,
        local=Estimate(local.value * share, local.error * share),
    )


def parallel_clustering(
    graph: sparse.csr_array, rng: np.random.Generator, *, wedges: int
) -> Estimate:
    """`Clustering.parallel` alone; arguments and errors as of `clustering`."""
    if wedges < 1:
        raise ValueError(f'wedges={wedges}; expected at least 1')
    view = undirected_view(graph)
    backward = graph.T.tocsr()
    edges = np.diff(graph.indptr).astype(np.int64) + np.diff(backward.indptr)
    pairs = edges * (edges - 1)
    if not _is_countable(graph):
        return _closed_share(view, [graph, backward], pairs, rng, wedges)
    number = graph.astype(np.int64) + backward.astype(np.int64)
    closed = (number @ number).multiply(view).sum()
    return Estimate(_ratio(closed, pairs.sum()), 0.0)


def _is_countable(graph: sparse.csr_array) -> bool:
    edges = np.diff(graph.indptr) + np.bincount(graph.indices, minlength=graph.shape[0])
    return (edges.astype(np.int64) ** 2).sum() <= _COUNTED_PAIRS


def _closed_share(
    view: sparse.csr_array,
    neighbours: list[sparse.csr_array],
    weights: np.ndarray,
    rng: np.random.Generator,
    wedges: int,
) -> Estimate:
    """The share of closed ones among pairs of places in a node's list of neighbours.

    Args:
      view: the undirected view, where pairs are looked up.
      neighbours: graphs whose rows, joined, are the list.
      weights: by node, proportional to its probability of being drawn.
      rng: draws.
      wedges: pairs to draw.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    if cumulative[-1] == 0:
        return Estimate(0.0, 0.0)
    lengths = sum(np.diff(x.indptr).astype(np.int64) for x in neighbours)
    closed = 0
    for start in range(0, wedges, _CHUNK):
        draws = rng.random(min(_CHUNK, wedges - start)) * cumulative[-1]
        node = np.searchsorted(cumulative, draws, side='right')
        length = lengths[node]
        first = rng.integers(length)
        second = rng.integers(length - 1)
        second += second >= first
        ends = [_at_place(neighbours, node, place) for place in (first, second)]
        closed += int(np.asarray(view[ends[0], ends[1]]).sum())
    share = closed / wedges
    return Estimate(share, float(np.sqrt(share * (1 - share) / wedges)))


def _at_place(
    neighbours: list[sparse.csr_array], node: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """The neighbour at a place of each node's list, which runs through the graphs' rows."""
    found = np.empty(len(node), np.int64)
    for graph in neighbours:
        length = graph.indptr[node + 1] - graph.indptr[node]
        inside = (place >= 0) & (place < length)
        found[inside] = graph.indices[graph.indptr[node[inside]] + place[inside]]
        place = place - length
    return found


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
