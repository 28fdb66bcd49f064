"""Bias and variance against exact values: closed forms for uniform weights, all permutations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sa_jax.analysis import estimator
from sa_jax.attention import masks
from sa_jax.attention.functions import full_attention, stochastic_attention

EVERY = slice(None)


def gaussian(tokens, heads=2, kv_heads=2, dim=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(1, tokens, n, dim) for n in (heads, kv_heads, kv_heads)]
    query, key, value = map(jax.random.normal, keys, shapes)
    return query, key, estimator.in_units_of_spread(value)


def measure(inputs, window, is_causal, draws):
    target = full_attention(*inputs, is_causal=is_causal)
    return estimator.stochastic_errors(
        *inputs,
        target,
        window=window,
        is_causal=is_causal,
        permutation_key=jax.random.key(1),
        draws=draws,
    )


def exact_uniform(value, window, is_causal):
    """Squared bias and variance by query, from the distribution of how many keys it sees.

    Of N admissible keys a query sees itself and a random subset of the others; how many is
    hypergeometric, given the slots in its window.
    """
    length = value.shape[1]
    back, ahead = masks.window_sides(estimator.slots(window, is_causal))
    slot = np.arange(length)
    sizes = np.minimum(slot, back) + np.minimum(length - 1 - slot, ahead) + 1
    bias, variance = [], []
    for i in range(length):
        admissible = i + 1 if is_causal else length
        others = np.arange(sizes.max())
        chance = stats.hypergeom(length - 1, admissible - 1, sizes[:, None] - 1).pmf(others)
        chance, seen = chance.mean(0), others + 1
        inverse = chance @ (1 / seen)
        values = np.asarray(value, float)[0, :admissible]
        rest = np.delete(values, i, axis=0)
        away = ((values[i] - rest.mean(0)) ** 2).sum(-1).mean() if admissible > 1 else 0
        spread = rest.var(0, ddof=1).sum(-1).mean() if admissible > 2 else 0
        bias.append((inverse - 1 / admissible) ** 2 * away)
        within = chance @ ((seen - 1) / seen**2 * (admissible - seen) / max(1, admissible - 1))
        variance.append(within * spread + (chance @ (1 / seen**2) - inverse**2) * away)
    return np.array(bias), np.array(variance)


@pytest.mark.parametrize('is_causal', [False, True])
def test_uniform_weights_give_the_closed_forms(is_causal):
    query, key, value = gaussian(40)
    window = 7
    found = measure((0 * query, key, value), window, is_causal, 2048)
    bias, variance = exact_uniform(value, window, is_causal)
    for queries in (EVERY, slice(20, None)):
        for by_query, expected in ((found.bias_squared, bias), (found.variance, variance)):
            mean, error = estimator.estimate(by_query, queries)
            assert error < 0.04 * mean
            assert abs(mean - expected[queries].mean()) < 4 * error


def test_softmax_weights_against_all_permutations():
    query, key, value = gaussian(5, heads=4, seed=3)
    inputs = 3 * query, key, value  # far from uniform
    target = full_attention(*inputs)
    every = jnp.array(list(itertools.permutations(range(5))))

    def error(permutation):
        return stochastic_attention(*inputs, window=3, permutation=permutation) - target

    errors = np.asarray(jax.lax.map(error, every), float)
    bias = (errors.mean(0) ** 2).sum(-1).mean((0, 2))
    variance = errors.var(0).sum(-1).mean((0, 2))
    found = measure(inputs, 2, True, 4096)
    for by_query, expected in ((found.bias_squared, bias), (found.variance, variance)):
        mean, standard_error = estimator.estimate(by_query, EVERY)
        assert 0 < standard_error < 0.05 * mean
        assert abs(mean - expected.mean()) < 4 * standard_error
        np.testing.assert_allclose(by_query[0], expected, rtol=0.25, atol=1e-3)


@pytest.mark.parametrize('is_causal', [False, True])
def test_first_order_formulas(is_causal):
    query, key, value = gaussian(256, heads=4, seed=5)
    # Windows hold many effective keys, and few of them reach an end of the line of slots.
    inputs = 0.5 * query, key, value
    later = slice(192, None)
    found = measure(inputs, 32, is_causal, 128)
    bias, variance = estimator.first_order(*inputs, is_causal=is_causal).errors(256, 32, is_causal)
    mean, error = estimator.estimate(found.bias_squared, later)
    assert abs(bias[later].mean() - mean) < 0.1 * mean + 3 * error
    mean, error = estimator.estimate(found.variance, later)
    assert abs(variance[later].mean() - mean) < 0.08 * mean


def test_effective_keys_of_uniform_weights_are_all():
    query, key, value = gaussian(70)
    found = estimator.first_order(0 * query, key, value, is_causal=True)
    np.testing.assert_allclose(1 / found.squares[0, :, 0], np.arange(1, 71), rtol=1e-5)


def test_nothing_is_left_of_a_window_that_sees_all():
    found = measure(gaussian(8), 8, True, 32)
    assert abs(estimator.estimate(found.bias_squared, EVERY).value) < 1e-12
    assert estimator.estimate(found.variance, EVERY).value < 1e-12


def test_a_sliding_window_errs_as_a_random_sample_of_independent_values():
    inputs = gaussian(128, heads=4, kv_heads=4)
    inputs = 0 * inputs[0], *inputs[1:]
    target = full_attention(*inputs, is_causal=False)
    sliding = estimator.sliding_errors(*inputs, target, window=8, is_causal=False)
    expected = np.add(*exact_uniform(inputs[2], 8, False))
    assert sliding.mean() == pytest.approx(expected.mean(), rel=0.05)


def test_power_laws():
    windows = [8, 16, 32, 64]
    exact = [estimator.Estimate(3 * w**-1.5, 0.0) for w in windows]
    fit = estimator.fit_power_law(windows, exact)
    assert fit.exponent == pytest.approx(-1.5)
    assert fit.factor == pytest.approx(3)
    assert fit.half_width == pytest.approx(0, abs=1e-9)
    # Without residuals the interval is that of the values' own errors.
    noisy = [estimator.Estimate(x, 0.1 * x) for x, _ in exact]
    error = 0.1 / np.sqrt(((np.log(windows) - np.log(windows).mean()) ** 2).sum())
    expected = stats.t.ppf(0.975, 2) * error
    assert estimator.fit_power_law(windows, noisy).half_width == pytest.approx(expected)
    noisy[3] = estimator.Estimate(1.0, 0.3)
    assert estimator.fit_power_law(windows, noisy).points == 3
    noisy[2] = estimator.Estimate(-0.1, 0.01)
    assert estimator.fit_power_law(windows, noisy) is None


def test_intervals_hold_the_exponent():
    generator = np.random.default_rng(0)
    windows = np.array([8, 16, 32, 64, 128])
    held = 0
    for _ in range(400):
        noise = generator.normal(1, 0.05, 5)
        values = [estimator.Estimate(x, 0.05 * x) for x in noise / windows]
        fit = estimator.fit_power_law(windows, values)
        held += abs(fit.exponent + 1) < fit.half_width
    assert held / 400 > 0.94


def test_bad_inputs_are_named():
    inputs = gaussian(8)
    with pytest.raises(ValueError, match='window 9 of 8 tokens; expected 1 to 8'):
        measure(inputs, 9, True, 32)
    with pytest.raises(ValueError, match='draws=40; expected a multiple of 16'):
        measure(inputs, 4, True, 40)
    with pytest.raises(ValueError, match='tokens=1; expected'):
        estimator.check_windows(1, [1])
    with pytest.raises(ValueError, match='all values of a head are the same'):
        estimator.in_units_of_spread(jnp.ones((1, 8, 2, 4)))
