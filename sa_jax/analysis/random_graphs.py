"""Random directed graphs to compare with: rewired rings, and graphs with given degrees."""

from __future__ import annotations

import numpy as np
from scipy import sparse

_ROUNDS = 1000


def from_edges(source: np.ndarray, target: np.ndarray, n: int) -> sparse.csr_array:
    """A bool `[n, n]` graph, columns sorted, every edge once however often it is given."""
    edges = (np.ones(len(source), bool), (source.astype(np.int32), target.astype(np.int32)))
    graph = sparse.coo_array(edges, shape=(n, n)).tocsr()
    graph.sort_indices()
    return graph


def degree_matched(graph: sparse.csr_array, rng: np.random.Generator) -> sparse.csr_array:
    """A random graph in which every node keeps its number of outgoing and of incoming edges.

    The directed configuration model: the targets of all edges are shuffled. Edges that then lead
    back to their source or stand twice are shuffled again with others until none is left, so that
    no degree changes.

    Args:
      graph: `[n, n]` without self-loops.
      rng: shuffles.

    Returns:
      bool `[n, n]`, columns sorted.

    Raises:
      ValueError: if the graph has self-loops, or is too dense for shuffles to succeed.
    """
    n = graph.shape[0]
    source = np.repeat(np.arange(n), np.diff(graph.indptr))
    if np.any(source == graph.indices):
        raise ValueError('the graph has self-loops; take them out with simple_graph first')
    target = rng.permutation(graph.indices)
    for _ in range(_ROUNDS):
        wrong = _conflicts(source, target, n)
        if not len(wrong):
            return from_edges(source, target, n)
        # Half as many good edges join in, or the wrong ones may have no place to go.
        others = rng.integers(len(source), size=len(wrong) // 2 + 1)
        pool = np.unique(np.concatenate([wrong, others]))
        target[pool] = rng.permutation(target[pool])
    raise ValueError(
        f'found no random graph with the degrees of this one ({n:,} nodes, {len(source):,} edges); '
        'nearly all possible edges exist, so lower the degree'
    )


def watts_strogatz(
    n: int, degree: int, rewired: float, rng: np.random.Generator
) -> sparse.csr_array:
    """A directed ring in which each node sees its nearest ones, edges rewired at random.

    Watts and Strogatz (1998), directed: every node has exactly `degree` outgoing edges, as many
    to either side (of an odd number one more ahead), and each edge gets another target with some
    probability, drawn uniformly from those that leave neither self-loops nor parallel edges.

    Args:
      n: nodes.
      degree: outgoing edges of each.
      rewired: the probability that an edge is rewired.
      rng: draws.

    Returns:
      bool `[n, n]`, columns sorted.

    Raises:
      ValueError: if n < 1, not 0 <= degree < n, or not 0 <= rewired <= 1.
    """
    if n < 1:
        raise ValueError(f'n={n}; expected at least 1')
    if not 0 <= degree < n:
        raise ValueError(f'degree={degree}; expected 0 to n - 1 = {n - 1}')
    if not 0 <= rewired <= 1:
        raise ValueError(f'rewired={rewired}; expected a probability')
    offsets = np.concatenate([-np.arange(1, degree // 2 + 1), np.arange(1, (degree + 1) // 2 + 1)])
    source = np.repeat(np.arange(n), degree)
    target = (source + np.tile(offsets, n)) % n
    wrong = np.flatnonzero(rng.random(len(source)) < rewired)
    while len(wrong):
        target[wrong] = rng.integers(n, size=len(wrong))
        # Of edges that now agree, one that was just drawn gives way.
        drawn = np.zeros(len(source), bool)
        drawn[wrong] = True
        wrong = _conflicts(source, target, n, drawn)
    return from_edges(source, target, n)


def _conflicts(
    source: np.ndarray, target: np.ndarray, n: int, is_later: np.ndarray | None = None
) -> np.ndarray:
    """Edges that are self-loops, or the same as another: all but one of those that agree.

    Args:
      source: of each edge.
      target: of each edge.
      n: nodes.
      is_later: bool, by edge; where edges agree, these are named before others.
    """
    key = source * n + target
    order = np.argsort(key if is_later is None else 2 * key + is_later)
    repeats = order[1:][key[order[1:]] == key[order[:-1]]]
    return np.union1d(np.flatnonzero(source == target), repeats)
