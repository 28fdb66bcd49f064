"""Graphs of attention patterns: who sees whom, in one layer or in a stack of layers.

Bidirectional masks. Under a causal mask edges only lead back, so that the graph has no cycle: every
strongly connected component is a single token and no mean path length exists. Its undirected view
is that of a bidirectional mask all the same: of the same window for SA, if it is odd, of 2w - 1 for
SWA's w.
"""

from __future__ import annotations

import functools

import jax
from scipy import sparse

from sa_jax.analysis.adjacency import layer_adjacency, layer_permutation
from sa_jax.analysis.graphs import simple_graph

KINDS = ('swa', 'sa', 'sa_swa')


def union_graph(kind: str, n: int, *, degree: int, layers: int, key: jax.Array) -> sparse.csr_array:
    """The union of the layers' visibility, each token sees `degree` others in it.

    A window of w slots shows w - 1 other tokens. SWA's is the same in all layers, SA draws another
    permutation in each, and SA + SWA has both, the sliding window once. The degree is shared among
    the windows that differ, as evenly as odd windows allow, and one is even if the degree is odd:
    at a given degree, more layers have smaller windows. Tokens near the ends see fewer, and windows
    that overlap show fewer: the graph's mean degree is a little lower.

    Args:
      kind: 'swa', 'sa' or 'sa_swa'.
      n: tokens.
      degree: others that a token sees in the union.
      layers: layers of the stack.
      key: the typed key of the stack's permutations.

    Returns:
      bool `[n, n]`, without self-loops.

    Raises:
      ValueError: an unknown kind, a count below 1, a degree beyond n - 1 or below two for each
        window that differs.
    """
    if kind not in KINDS:
        raise ValueError(f'kind={kind!r}; expected one of {", ".join(KINDS)}')
    for name, value in (('n', n), ('degree', degree), ('layers', layers)):
        if value < 1:
            raise ValueError(f'{name}={value}; expected at least 1')
    if degree > n - 1:
        raise ValueError(f'degree={degree}: a window of w={degree + 1} among n={n} tokens, w > n')
    windows = {'swa': 1, 'sa': layers, 'sa_swa': layers + 1}[kind]
    if windows > 1 and degree < 2 * windows:
        raise ValueError(
            f'degree={degree} among {windows} windows of {layers} layers of {kind!r}: each shows '
            'two other tokens at least; take fewer layers or a higher degree'
        )
    whole, rest = divmod(degree // 2, windows)
    sizes = [1 + 2 * (whole + (i < rest)) for i in range(windows)]
    sizes[-1] += degree % 2
    parts = []
    if kind != 'sa':
        parts.append(layer_adjacency('swa', n, window=sizes.pop(0), causal=False))
    for layer, window in enumerate(sizes):
        order = layer_permutation(key, layer, n)
        parts.append(layer_adjacency('sa', n, window=window, causal=False, permutation=order))
    union, _ = simple_graph(functools.reduce(lambda x, y: x + y, parts))
    return union
