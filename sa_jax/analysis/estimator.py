"""Stochastic attention's output as an estimate of full attention: bias and variance over the draws.

Shapes: B examples, T tokens, N query heads, K key/value heads, H the width of a head, R draws of
the permutation in G groups. Errors are squared, summed over H, averaged over B and N, and kept by
query. docs/theory.md derives the laws that they are held against.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

from sa_jax.attention import inputs
from sa_jax.attention.functions import sliding_window_attention, stochastic_attention
from sa_jax.attention.permutation import draw_permutation
from sa_jax.attention.window import effective_window

GROUPS = 16
# Values whose standard error is a larger share of them have no place in a fit of logarithms.
_LARGEST_ERROR = 0.25
_QUERIES_AT_ONCE = 64


class Errors(NamedTuple):
    """Squared errors by query; row 0 from all draws, row g from all but those of group g.

    Attributes:
      bias_squared: `[1 + G, T]`, of the mean over infinitely many draws: the share of the noise in
        the squared mean over R draws is subtracted, so that values may be negative.
      variance: `[1 + G, T]`, of a single draw around that mean.
    """

    bias_squared: np.ndarray
    variance: np.ndarray


class Estimate(NamedTuple):
    """A number and its standard error over the draws."""

    value: float
    standard_error: float


class PowerLaw(NamedTuple):
    """A fit of value = factor · window^exponent.

    Attributes:
      exponent: of the window.
      half_width: of the exponent's 95 % confidence interval.
      factor: the value at a window of one key.
      points: how many windows were precise enough to take part.
    """

    exponent: float
    half_width: float
    factor: float
    points: int


def slots(window: int, is_causal: bool) -> int:
    """The slots with which stochastic attention sees as many keys as a sliding window of `window`.

    If causal, half of them are later tokens.
    """
    return 2 * window - 1 if is_causal else window


def inclusion(length: int, window: int, is_causal: bool) -> float:
    """The probability that a query's window holds a given other token."""
    width = slots(window, is_causal)
    mean = effective_window('stochastic', length, is_causal=False, window=width)
    return (mean - 1) / (length - 1)


def check_windows(length: int, windows: Iterable[int]) -> None:
    """Raises a ValueError unless there can be an estimate with each of the windows."""
    inputs.check_count('tokens', length, 2)
    for window in windows:
        if not 1 <= window <= length:
            raise ValueError(
                f'window {window} of {length} tokens; expected 1 to {length} keys: choose a '
                'smaller window or more tokens'
            )


def check_draws(draws: int) -> None:
    """Raises a ValueError unless the draws fall into groups of equal size, of two at least."""
    if draws < 2 * GROUPS or draws % GROUPS:
        raise ValueError(
            f'draws={draws}; expected a multiple of {GROUPS}, at least {2 * GROUPS}: standard '
            f'errors leave one of {GROUPS} groups of draws out'
        )


def in_units_of_spread(value: Array) -> Array:
    """Scales values so that their mean squared distance from their mean is 1.

    Attention is linear in them, so that errors are in units of what the paper calls B, the size of
    the values, in every head alike.

    Args:
      value: `[B, T, K, H]`.

    Raises:
      ValueError: a head's values are all the same.
    """
    centred = value - value.mean(1, keepdims=True)
    spread = (centred**2).sum(-1, keepdims=True).mean(1, keepdims=True)
    if not bool((spread > 0).all()):
        raise ValueError('all values of a head are the same: any attention to them gives them back')
    return value / jnp.sqrt(spread)


def stochastic_errors(
    query: Array,
    key: Array,
    value: Array,
    target: Array,
    *,
    window: int,
    is_causal: bool,
    permutation_key: Array,
    draws: int,
) -> Errors:
    """Bias and variance of stochastic attention around full attention, over permutations.

    Memory is that of G outputs, however many draws.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`.
      value: `[B, T, K, H]`.
      target: `[B, T, N, H]`, the output of full attention.
      window: the keys that a query sees on average, see `slots`.
      is_causal: whether later keys stay unseen.
      permutation_key: a typed key; each draw folds its number in.
      draws: permutations R, each shared by examples and heads.

    Raises:
      ValueError: the window doesn't fit the tokens, or the draws don't fall into groups.
    """
    check_windows(query.shape[1], (window,))
    check_draws(draws)
    keys = jax.vmap(functools.partial(jax.random.fold_in, permutation_key))(jnp.arange(draws))
    permutations = draw_permutation(keys, length=query.shape[1])
    width = slots(window, is_causal)
    # Without a group, the sums of errors are those over all draws less the group's.
    groups, squares = zip(
        *(
            jax.device_get(_sums(query, key, value, target, group, width, is_causal))
            for group in permutations.reshape(GROUPS, -1, query.shape[1])
        ),
        strict=True,
    )
    total = np.sum(groups, axis=0, dtype=np.float64)
    totals = np.array([_size(total), *(_size(total - group) for group in groups)])
    squares = np.array(squares, np.float64)
    squares = np.concatenate([squares.sum(0)[None], squares.sum(0) - squares])
    counts = np.array([draws] + [draws - draws // GROUPS] * GROUPS)[:, None]
    # Two draws are independent: products of their errors have the squared bias for their mean.
    pairs = totals - squares
    return Errors(
        bias_squared=pairs / (counts * (counts - 1)),
        variance=(squares - totals / counts) / (counts - 1),
    )


def sliding_errors(
    query: Array, key: Array, value: Array, target: Array, *, window: int, is_causal: bool
) -> np.ndarray:
    """The squared errors `[T]` of sliding-window attention, which draws nothing: all is bias."""
    check_windows(query.shape[1], (window,))
    return np.asarray(_sliding(query, key, value, target, window, is_causal), np.float64)


def estimate(by_query: np.ndarray, queries: slice) -> Estimate:
    """The mean over some of the queries, and its standard error by the jackknife over groups.

    Args:
      by_query: `[1 + G, T]`, a field of `Errors`.
      queries: which ones.
    """
    value, *without = by_query[:, queries].mean(-1)
    spread = np.sum((np.array(without) - np.mean(without)) ** 2)
    return Estimate(float(value), float(np.sqrt(spread * (GROUPS - 1) / GROUPS)))


def fit_power_law(windows: Sequence[int], estimates: Sequence[Estimate]) -> PowerLaw | None:
    """Fits a line through logarithms, all windows weighing alike.

    The interval is the wider one of two: from the residuals, which hold departures from the law as
    well, and from the standard errors of the values.

    Args:
      windows: ascending.
      estimates: one for each; those whose standard error exceeds a quarter of them are left out.

    Returns:
      The fit, or None with fewer than three windows left.
    """
    kept = [
        (np.log(window), np.log(x.value), x.standard_error / x.value)
        for window, x in zip(windows, estimates, strict=True)
        if x.value > 0 and x.standard_error <= _LARGEST_ERROR * x.value
    ]
    if len(kept) < 3:
        return None
    x, y, relative = np.array(kept).T
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    exponent = weights @ y
    intercept = y.mean() - exponent * x.mean()
    freedom = len(kept) - 2
    from_residuals = ((y - intercept - exponent * x) ** 2).sum() / freedom * (weights @ weights)
    error = np.sqrt(max(from_residuals, weights**2 @ relative**2))
    half_width = stats.t.ppf(0.975, freedom) * error
    return PowerLaw(float(exponent), float(half_width), float(np.exp(intercept)), len(kept))


class FirstOrder(NamedTuple):
    """What the first-order formulas need to know of the weights p of full attention, `[B, T, N]`.

    With o the output and i the query itself: a = p_i·(v_i - o), c = Σ p_j²·(v_j - o) over j ≠ i.

    Attributes:
      own: p_i.
      squares: Σ p_j², one over the effective number of keys.
      spread: Σ p_j²·‖v_j - o‖² over j ≠ i.
      aa: ‖a‖².
      ac: a·c.
      cc: ‖c‖².
    """

    own: Array
    squares: Array
    spread: Array
    aa: Array
    ac: Array
    cc: Array

    def errors(self, length: int, window: int, is_causal: bool) -> tuple[np.ndarray, np.ndarray]:
        """The expected squared bias and the variance, `[T]` each.

        Good where a window holds many of the keys that matter, π ≫ Σ p_j².
        """
        seen = inclusion(length, window, is_causal)
        total = seen + (1 - seen) * self.own
        share = seen / total
        bias = ((1 - seen) / total) ** 2 * (self.aa - 2 * share * self.ac + share**2 * self.cc)
        variance = seen * (1 - seen) / total**2 * self.spread
        bias, variance = (np.asarray(x, np.float64).mean((0, 2)) for x in (bias, variance))
        return bias, variance


@functools.partial(jax.jit, static_argnames='is_causal')
def first_order(query: Array, key: Array, value: Array, *, is_causal: bool) -> FirstOrder:
    """Sums over the weights of full attention, a few queries at a time; shapes as above."""
    batch, length, heads, dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, dim)
    values = jnp.einsum('btkh->bkth', value)
    sizes = (values**2).sum(-1)[:, :, None]

    def of_query(i):
        logits = jnp.einsum('bkgh,btkh->bkgt', grouped[:, i], key) * dim**-0.5
        if is_causal:
            logits = jnp.where(jnp.arange(length) <= i, logits, -jnp.inf)
        p = jax.nn.softmax(logits, axis=-1)
        p2 = p**2
        output = jnp.einsum('bkgt,bkth->bkgh', p, values)
        squares, own = p2.sum(-1), p[..., i]
        second = jnp.einsum('bkgt,bkth->bkgh', p2, values)
        difference = values[:, :, None, i] - output
        a = own[..., None] * difference
        c = second - squares[..., None] * output - own[..., None] * a
        spread = (p2 * sizes).sum(-1) - 2 * (output * second).sum(-1)
        spread += squares * (output**2).sum(-1) - (a**2).sum(-1)
        sums = FirstOrder(own, squares, spread, (a * a).sum(-1), (a * c).sum(-1), (c * c).sum(-1))
        return jax.tree.map(lambda x: x.reshape(batch, heads), sums)

    sums = jax.lax.map(of_query, jnp.arange(length), batch_size=_QUERIES_AT_ONCE)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), sums)


@functools.partial(jax.jit, static_argnames=('width', 'is_causal'))
def _sums(query, key, value, target, permutations, width, is_causal):
    """The sum `[B, T, N, H]` of the errors e of some draws, and the sum `[T]` of ‖e‖²."""

    def add(sums, permutation):
        output = stochastic_attention(
            query, key, value, window=width, permutation=permutation, is_causal=is_causal
        )
        error = output - target
        return (sums[0] + error, sums[1] + _size(error)), None

    nothing = jnp.zeros_like(target), jnp.zeros(target.shape[1], target.dtype)
    return jax.lax.scan(add, nothing, permutations)[0]


@functools.partial(jax.jit, static_argnames=('window', 'is_causal'))
def _sliding(query, key, value, target, window, is_causal):
    output = sliding_window_attention(query, key, value, window=window, is_causal=is_causal)
    return _size(output - target)


def _size(error):
    """Squared sizes `[T]` of `[B, T, N, H]`, averaged over examples and heads."""
    return (error**2).sum(-1).mean((0, 2))
