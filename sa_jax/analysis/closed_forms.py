"""Coverage by formula: docs/theory.md derives what stands here.

Windows of stochastic attention and chunks of a partition are given by `counts`, for each slot the
number of slots in its window, itself included and causality left aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import special

from sa_jax.attention import masks

# Points between which the log of a miss probability is interpolated: it bends little in between.
_TABLE = 2048


def sliding_window_reach(window: int, layers: int) -> int:
    """Tokens that reach a token through `layers` sliding windows, where nothing cuts them off."""
    return layers * (window - 1) + 1


def sliding_window_share(
    n: int, window: int, layers: int, *, causal: bool, circular: bool = False
) -> float:
    """Of the admissible pairs the share that so many sliding windows connect: exact."""
    if circular and not causal:
        return min(sliding_window_reach(window, layers), n) / n
    back, ahead = (window - 1, 0) if causal else masks.window_sides(window)
    pairs = n + sum(_within(n, layers * side) for side in (back, ahead))
    return pairs / (n * (n + 1) / 2 if causal else n * n)


def sliding_window_layers(
    n: int, window: int, share: float, *, causal: bool, circular: bool = False
) -> int | None:
    """The least number of layers that connects such a share of the pairs; None: none does."""
    if window < 2:
        return None if share > sliding_window_share(n, 1, 1, causal=causal) else 1
    low, high = 1, n + 1
    while low < high:
        middle = (low + high) // 2
        reached = sliding_window_share(n, window, middle, causal=causal, circular=circular)
        low, high = (low, middle) if reached >= share else (middle + 1, high)
    return low if low <= n else None


def link_probability(counts: np.ndarray) -> float:
    """That a token sees a certain other one through one layer of random slots."""
    n = len(counts)
    return float((counts.mean() - 1) / (n - 1)) if n > 1 else 0.0


def miss_probability(counts: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """That none of `seen` tokens in random slots is in a slot's window, averaged over slots.

    Of the C(n, s) sets of slots that s tokens may have, C(n - v, s) avoid a window of v. Both are
    continued to s that aren't whole by the gamma function.

    Args:
      counts: `[n]`.
      seen: float `[S]`, from 0 to n.

    Returns:
      `[S]`.
    """
    n = len(counts)
    values, slots = np.unique(counts, return_counts=True)
    free = n - values[:, None].astype(float)
    fits = np.minimum(seen, free)
    log = (
        special.gammaln(free + 1)
        - special.gammaln(free - fits + 1)
        - special.gammaln(n + 1.0)
        + special.gammaln(n - fits + 1)
    )
    return np.average(np.where(seen <= free, np.exp(log), 0.0), axis=0, weights=slots)


def bidirectional_share(counts: np.ndarray) -> Iterator[float]:
    """Yields the share of pairs connected after 1, 2, … layers, each with its own permutation.

    Exact for two layers. Given the number of tokens seen, what a layer more is expected to show is
    exact as well; the number is then replaced by its expectation, which makes the rest too high, if
    by little.
    """
    n = len(counts)
    seen, slots = np.unique(counts, return_counts=True)  # by the query's slot in the first layer
    seen = seen.astype(float)
    while True:
        yield float(np.average(seen, weights=slots) / n)
        seen = n * (1 - miss_probability(counts, seen))


def causal_share_by_distance(counts: np.ndarray) -> Iterator[np.ndarray]:
    """Yields, after 1, 2, … layers, the share of pairs connected at distance 0, …, n - 1.

    Exact for one layer and for neighbours; else somewhat too high, since the number of tokens seen
    between the two is replaced by its expectation and taken as independent of the pair's fate.
    """
    n = len(counts)
    grid = np.unique(np.concatenate([[0.0], np.geomspace(1, n, _TABLE)]))
    log_miss = np.log(np.maximum(miss_probability(counts, grid), np.finfo(float).tiny))
    share = np.zeros(n)
    share[0] = 1.0
    while True:
        between = np.concatenate([[0.0], np.cumsum(share)[:-1]])  # seen, nearer than the token
        missed = np.exp(np.interp(between, grid, log_miss)) * n / (n - between)
        missed[0] = 0.0
        share = 1 - (1 - share) * np.minimum(missed, 1.0)
        yield share


def causal_share(share_by_distance: np.ndarray) -> float:
    """Of all admissible pairs the share connected: n - d of them are d apart."""
    n = len(share_by_distance)
    pairs = np.arange(n, 0, -1)
    return float((pairs * share_by_distance).sum() / pairs.sum())


def stochastic_share(counts: np.ndarray, causal: bool) -> Iterator[float]:
    """Yields the share of admissible pairs connected after 1, 2, … layers."""
    if causal:
        return map(causal_share, causal_share_by_distance(counts))
    return bidirectional_share(counts)


def stochastic_layers(
    counts: np.ndarray, shares: tuple[float, ...], *, causal: bool, most: int = 1000
) -> tuple[int | None, ...]:
    """The number of layers that is expected to connect each share of the pairs.

    A share of 1 is counted as reached once less than half an unconnected pair is expected.
    Causally, pairs of neighbours decide it.

    Returns:
      Layers for each share; None if more than `most` would be needed, but for a causal share of 1.
    """
    n = len(counts)
    half_a_pair = 1 - 0.5 / n**2
    wanted = {x: half_a_pair if x == 1 else x for x in shares if not (causal and x == 1)}
    found: dict[float, int | None] = dict.fromkeys(shares)
    if causal and 1 in found:
        found[1] = _layers_to_join_neighbours(n, link_probability(counts))
    previous = 0.0
    for layer, share in enumerate(stochastic_share(counts, causal), start=1):
        for x, least in wanted.items():
            if found[x] is None and share >= least:
                found[x] = layer
        is_stuck = share <= previous and share < 1
        if layer == most or is_stuck or all(found[x] is not None for x in wanted):
            return tuple(found[x] for x in shares)
        previous = share
    raise AssertionError('the shares never end')


def _within(n: int, distance: int) -> int:
    """Ordered pairs of n tokens of which the second is 1, …, `distance` tokens further on."""
    distance = min(distance, n - 1)
    return distance * n - distance * (distance + 1) // 2


def _layers_to_join_neighbours(n: int, probability: float) -> int | None:
    """Layers after which half a pair of neighbours is expected to be unconnected."""
    if n == 1 or probability == 1:
        return 1
    if probability == 0:
        return None
    return max(1, math.ceil(math.log(2 * (n - 1)) / -math.log1p(-probability)))
