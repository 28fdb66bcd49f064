"""Visibility of one layer, sparse: for a single document of n tokens, no sinks.

Every pattern is a union of windows, in each of which a token sees the tokens in a run of slots:
this is how the definitions in `sa_jax.attention.masks` and `plans` say it, and from them come the
sides of a window, the cut into chunks and the permutations. Nothing here has n × n entries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from sa_jax.attention import inputs, masks
from sa_jax.attention import permutation as permutations

KINDS = ('swa', 'sa', 'sa_swa', 'partition')


class Runs(NamedTuple):
    """A window: the token in slot s sees those in slots first[s], …, stop[s] - 1.

    Both ends grow with s. Slots below 0 and from n on wrap around.
    """

    order: np.ndarray  # int32 [n], the token in each slot
    first: np.ndarray  # int64 [n]
    stop: np.ndarray  # int64 [n]
    is_filtered: bool  # of these tokens only those that aren't later than its own are seen


def layer_permutation(key: jax.Array, layer: int, n: int, *, path: int = 0) -> np.ndarray:
    """Draws a layer's permutation from the same keys as the decoder does.

    Args:
      key: the typed key that the decoder gets, one for the whole stack.
      layer: which layer.
      n: tokens.
      path: which of the layer's paths.

    Returns:
      int32 `[n]`, the token in each slot.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, layer), path)
    return np.asarray(permutations.draw_permutation(key, length=n))


def layer_runs(
    kind: str,
    n: int,
    *,
    window: int,
    causal: bool,
    circular: bool = False,
    permutation: np.ndarray | None = None,
) -> tuple[Runs, ...]:
    """The windows whose union a layer's tokens see.

    Args:
      kind: 'swa', 'sa', 'sa_swa' (what either shows), or 'partition' into random chunks.
      n: tokens.
      window: keys a window spans, the query's own included; of 'partition' the chunk's tokens.
      causal: whether later tokens stay unseen.
      circular: whether windows wrap around at the ends: SA's slots, and SWA's tokens as well if it
        isn't causal (a causal sliding window only ever looks back).
      permutation: `[n]`, the token in each slot, for every kind but 'swa'.

    Raises:
      ValueError: an unknown kind, a count below 1, a circular partition, a permutation that is
        missing, superfluous or none.
    """
    if kind not in KINDS:
        raise ValueError(f'kind={kind!r}; expected one of {", ".join(KINDS)}')
    inputs.check_count('n', n, 1)
    inputs.check_count('window', window, 1)
    if kind == 'partition' and circular:
        raise ValueError('circular=True; chunks of a partition do not wrap around')
    if kind == 'swa':
        if permutation is not None:
            raise ValueError("kind='swa' takes no permutation; leave it out")
        return (_sliding_window(n, window, causal, circular),)
    permutation = _checked(permutation, kind, n)
    if kind == 'partition':
        return (_chunks(permutation, window, causal),)
    back, ahead = masks.window_sides(window)
    stochastic = _window(permutation, back, ahead, circular, is_filtered=causal)
    if kind == 'sa':
        return (stochastic,)
    return stochastic, _sliding_window(n, window, causal, circular)


def layer_adjacency(
    kind: str,
    n: int,
    *,
    window: int,
    causal: bool,
    circular: bool = False,
    permutation: np.ndarray | None = None,
) -> sparse.csr_array:
    """Which tokens (columns) each token (row) sees in one layer, itself among them.

    Args:
      kind: see `layer_runs`, also for the other arguments and errors.
      n: tokens.
      window: keys a window spans.
      causal: whether later tokens stay unseen.
      circular: whether windows wrap around.
      permutation: `[n]`, for every kind but 'swa'.

    Returns:
      bool `[n, n]`, columns sorted, without stored zeros.
    """
    runs = layer_runs(
        kind, n, window=window, causal=causal, circular=circular, permutation=permutation
    )
    total, *others = (_to_csr(x) for x in runs)
    for other in others:
        total = total + other
    total.sort_indices()
    return total


def _checked(permutation: np.ndarray | None, kind: str, n: int) -> np.ndarray:
    if permutation is None:
        raise ValueError(f'kind={kind!r} needs a permutation: layer_permutation(key, layer, n)')
    permutation = np.asarray(permutation, np.int32)
    if permutation.shape != (n,) or not np.array_equal(np.sort(permutation), np.arange(n)):
        raise ValueError(
            f'got a permutation of shape {permutation.shape}; expected the numbers 0 to {n - 1} '
            'in some order'
        )
    return permutation


def _sliding_window(n: int, window: int, causal: bool, circular: bool) -> Runs:
    back, ahead = (window - 1, 0) if causal else masks.window_sides(window)
    order = np.arange(n, dtype=np.int32)
    return _window(order, back, ahead, circular and not causal, is_filtered=False)


def _window(order: np.ndarray, back: int, ahead: int, circular: bool, *, is_filtered: bool) -> Runs:
    n = len(order)
    slot = np.arange(n)
    if circular:
        # However wide the window is, it holds each token once.
        back = min(back, n - 1)
        ahead = min(ahead, n - 1 - back)
        return Runs(order, slot - back, slot + ahead + 1, is_filtered)
    first, stop = np.maximum(slot - back, 0), np.minimum(slot + ahead + 1, n)
    return Runs(order, first, stop, is_filtered)


def _chunks(permutation: np.ndarray, chunk_size: int, causal: bool) -> Runs:
    """Chunks whose tokens are sorted: a causal token sees its chunk up to its own slot."""
    n = len(permutation)
    order, _ = permutations.partition(jnp.asarray(permutation)[None], None, min(chunk_size, n))
    slot = np.arange(n)
    first = slot - slot % chunk_size
    stop = slot + 1 if causal else np.minimum(first + chunk_size, n)
    return Runs(np.asarray(order[0]), first, stop, is_filtered=False)


def _to_csr(runs: Runs) -> sparse.csr_array:
    n = len(runs.order)
    slot = np.empty(n, np.int64)
    slot[runs.order] = np.arange(n)
    first, count = runs.first[slot], (runs.stop - runs.first)[slot]
    ends = np.concatenate([[0], np.cumsum(count)])
    row = np.repeat(np.arange(n, dtype=np.int32), count)
    # The slot of entry e of row i is first[i] + e - ends[i].
    column = runs.order[(np.arange(ends[-1]) + np.repeat(first - ends[:-1], count)) % n]
    if runs.is_filtered:
        is_seen = column <= row
        column, row = column[is_seen], row[is_seen]
        ends = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
    seen = np.ones(len(column), bool)
    adjacency = sparse.csr_array((seen, column, ends), shape=(n, n))
    adjacency.sort_indices()
    return adjacency
