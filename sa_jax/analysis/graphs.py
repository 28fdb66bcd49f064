"""Statistics of directed sparse graphs, as connectomics defines them.

The definitions are those of Lin et al., "Network statistics of the whole-brain connectome of
Drosophila", Nature 634 (2024), read off the authors' published notebooks: connection probability,
reciprocity, components and the mean shortest path are those of the directed graph; clustering and
small-worldness those of an undirected view, see `clustering.Clustering` and `small_worldness`.

A graph is a bool `scipy.sparse.csr_array` `[n, n]`, with an edge i -> j where (i, j) is stored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from sa_jax.analysis.clustering import (
    Clustering,
    clustering,
    parallel_clustering,
    undirected_view,
)
from sa_jax.analysis.graph_distances import Estimate, mean_shortest_path
from sa_jax.analysis.random_graphs import degree_matched

_EULER_GAMMA = 0.5772156649015329


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What `statistics` returns; None where a figure isn't defined.

    Attributes:
      nodes: n.
      edges: directed edges m, self-loops left out.
      connection_probability: m / (n (n - 1)).
      degree: mean, standard deviation, median and largest of the outgoing, the incoming and the
        total number of edges of a node, by name; also the number of nodes by total degree in bins
        of powers of two.
      clustering: see `Clustering`.
      reciprocity: share of the edges whose opposite exists.
      strong_nodes: nodes of the largest strongly connected component.
      weak_nodes: nodes of the largest weakly connected component.
      path_length: mean hops over the ordered pairs of the largest strongly connected component.
      undirected_path_length: the same of the undirected view's largest component.
      small_worldness: (C / p) / (L / L_ER) of the undirected view with Lin et al.'s C and ER's L
        (see `small_worldness`).
      matched: clustering with parallel edges, reciprocity and path length of a random graph with
        the same degrees (see `degree_matched`).
      matched_small_worldness: (C / C_matched) / (L / L_matched), C with parallel edges, L directed.
    """

    nodes: int
    edges: int
    connection_probability: float
    degree: dict[str, Any]
    clustering: Clustering
    reciprocity: float
    strong_nodes: int
    weak_nodes: int
    path_length: Estimate | None
    undirected_path_length: Estimate | None
    small_worldness: Estimate | None
    matched: dict[str, Any]
    matched_small_worldness: Estimate | None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON; an estimate is an object with value and error."""
        return {x.name: _to_json(getattr(self, x.name)) for x in dataclasses.fields(self)}


def statistics(
    graph: sparse.csr_array, rng: np.random.Generator, *, sources: int, wedges: int
) -> Statistics:
    """All statistics of a directed graph.

    Args:
      graph: `[n, n]` without self-loops.
      rng: draws sources, pairs of neighbours and the random graph.
      sources: nodes from which paths are searched.
      wedges: pairs of neighbours that are looked at where there are too many to count.

    Raises:
      ValueError: no nodes or edges, self-loops, or a graph so dense that no random one matches.
    """
    n, m = graph.shape[0], graph.nnz
    if not m:
        raise ValueError(f'the graph has {n} nodes and no edges; there is nothing to describe')
    if graph.diagonal().any():
        raise ValueError('the graph has self-loops; take them out with simple_graph first')
    view = undirected_view(graph)
    coefficients = clustering(graph, rng, wedges=wedges)
    strong = largest_component(graph, 'strong')
    path_length = mean_shortest_path(strong, rng, sources=sources)
    weak = largest_component(view, 'weak')
    undirected = mean_shortest_path(weak, rng, sources=sources)
    random = degree_matched(graph, rng)
    matched = {
        'clustering': parallel_clustering(random, rng, wedges=wedges),
        'reciprocity': reciprocity(random),
        'path_length': mean_shortest_path(
            largest_component(random, 'strong'), rng, sources=sources
        ),
    }
    return Statistics(
        nodes=n,
        edges=m,
        connection_probability=m / (n * (n - 1)),
        degree=_degrees(graph),
        clustering=coefficients,
        reciprocity=reciprocity(graph),
        strong_nodes=strong.shape[0],
        weak_nodes=weak.shape[0],
        path_length=path_length,
        undirected_path_length=undirected,
        small_worldness=small_worldness(n, view.nnz // 2, coefficients.parallel, undirected),
        matched=matched,
        matched_small_worldness=_quotient(
            [coefficients.parallel, matched['path_length']],
            [matched['clustering'], path_length],
        ),
    )


def simple_graph(graph: sparse.sparray) -> tuple[sparse.csr_array, int]:
    """The graph as bool, without self-loops and stored zeros, and how many self-loops it had."""
    coo = graph.tocoo()
    exists = coo.data != 0
    is_loop = exists & (coo.row == coo.col)
    keep = exists & ~is_loop
    edges = (np.ones(keep.sum(), bool), (coo.row[keep], coo.col[keep]))
    simple = sparse.coo_array(edges, shape=graph.shape).tocsr()
    simple.sort_indices()
    return simple, int(is_loop.sum())


def reciprocity(graph: sparse.csr_array) -> float:
    """The share of the edges whose opposite exists."""
    return graph.multiply(graph.T.tocsr()).nnz / graph.nnz


def largest_component(graph: sparse.csr_array, connection: str) -> sparse.csr_array:
    """The subgraph of the largest connected component.

    Args:
      graph: `[n, n]`.
      connection: 'strong' (each node reaches each other) or 'weak' (of the undirected view).
    """
    count, label = csgraph.connected_components(graph, connection=connection)
    if count == 1:
        return graph
    nodes = np.flatnonzero(label == np.bincount(label).argmax())
    return graph[nodes][:, nodes]


def small_worldness(
    n: int, undirected_edges: int, clustering: Estimate, path_length: Estimate | None
) -> Estimate | None:
    """Lin et al.'s small-worldness: (C / C_ER) / (L / L_ER), all of the undirected view.

    The random graph is Erdős and Rényi's with as many nodes and edges: C_ER = p, the share of the
    pairs of nodes that are joined, and L_ER = (ln n - γ) / ln k + 1/2 with k the mean number of
    neighbours (Fronczak et al. 2004).

    Args:
      n: nodes, those without edges too.
      undirected_edges: joined pairs of nodes.
      clustering: `Clustering.parallel`, as the authors count it.
      path_length: of the undirected view's largest component.

    Returns:
      None if k <= 1, where the formula doesn't hold, or without a path length.
    """
    neighbours = 2 * undirected_edges / n
    if path_length is None or neighbours <= 1:
        return None
    random_path = (np.log(n) - _EULER_GAMMA) / np.log(neighbours) + 0.5
    random_clustering = neighbours / (n - 1)
    random = [Estimate(float(x), 0.0) for x in (random_path, random_clustering)]
    return _quotient([clustering, random[0]], [random[1], path_length])


def _degrees(graph: sparse.csr_array) -> dict[str, Any]:
    outgoing = np.diff(graph.indptr)
    incoming = np.bincount(graph.indices, minlength=graph.shape[0])
    degrees = {'outgoing': outgoing, 'incoming': incoming, 'total': outgoing + incoming}
    summary = {
        name: {
            'mean': float(x.mean()),
            'std': float(x.std()),
            'median': float(np.median(x)),
            'largest': int(x.max()),
        }
        for name, x in degrees.items()
    }
    # Of a degree: 0 -> bin 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3, …
    bins = np.bincount(np.ceil(np.log2(degrees['total'] + 1)).astype(int))
    least = [0, *(2 ** np.arange(len(bins) - 1)).tolist()]
    histogram = dict(zip(map(str, least), bins.tolist(), strict=True))
    return summary | {'nodes_by_least_total': histogram}


def _quotient(above: list[Estimate | None], below: list[Estimate | None]) -> Estimate | None:
    """Product over product, with the relative errors added in squares; None if undefined."""
    if any(x is None for x in [*above, *below]) or any(x.value == 0 for x in below):
        return None
    value = np.prod([x.value for x in above]) / np.prod([x.value for x in below])
    relative = sum((x.error / x.value) ** 2 for x in [*above, *below] if x.value)
    return Estimate(float(value), float(abs(value) * np.sqrt(relative)))


def _to_json(value: Any) -> Any:
    if isinstance(value, Estimate):
        return {'value': value.value, 'error': value.error}
    if isinstance(value, Clustering):
        return {name: _to_json(x) for name, x in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _to_json(x) for name, x in value.items()}
    return value
