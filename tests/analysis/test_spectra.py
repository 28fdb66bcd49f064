"""Spectra and mixing of uniform layers, against dense matrices and exact expectations."""

import itertools

import numpy as np
import pytest

from sa_jax.analysis import spectra


def permutations(length, count, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.permutation(length) for _ in range(count)]


def dense_product(layers, window):
    product = np.eye(len(layers[0]))
    for layer in layers:
        product = spectra.apply_layer(product, layer, window)
    return product


@pytest.mark.parametrize(('length', 'window'), [(9, 3), (24, 7), (25, 25), (26, 25), (64, 17)])
def test_a_layer_has_the_spectrum_of_a_sliding_window(length, window):
    (permutation,) = permutations(length, 1)
    layer = spectra.layer_matrix(permutation, window)
    np.testing.assert_allclose(layer, layer.T)
    np.testing.assert_allclose(layer.sum(0), 1)
    assert ((layer > 0).sum(0) == window).all()
    np.testing.assert_allclose(
        spectra.apply_layer(np.eye(length), permutation, window), layer, atol=1e-14
    )
    expected = np.sort(spectra.circulant_eigenvalues(length, window))
    np.testing.assert_allclose(np.linalg.eigvalsh(layer), expected, atol=1e-12)
    second = spectra.second_modulus(length, window)
    assert spectra.second_eigenvalue(permutation, window, 0) == pytest.approx(second, abs=1e-12)
    others = expected[:-1]
    assert (others**2).mean() == pytest.approx(spectra.mean_square(length, window))


def test_large_layers_are_never_dense():
    length, window = 700, 21
    layers = permutations(length, 3)
    assert length > spectra.DENSE_TOKENS
    found = spectra.second_eigenvalue(layers[0], window, 0)
    assert found == pytest.approx(spectra.second_modulus(length, window), rel=1e-8)
    expected = np.linalg.svd(dense_product(layers, window), compute_uv=False)[1]
    assert spectra.second_singular_value(layers, window, 0) == pytest.approx(expected, rel=1e-6)


def test_small_products():
    layers = permutations(50, 3)
    product = dense_product(layers, 5)
    assert not np.allclose(product, product.T)
    expected = np.linalg.svd(product, compute_uv=False)
    assert expected[0] == pytest.approx(1)
    assert spectra.second_singular_value(layers, 5, 0) == pytest.approx(expected[1])
    # Independent permutations lose the ring's slow modes.
    assert expected[1] < 0.6 < spectra.second_modulus(50, 5) ** 3


def test_layers_contract_by_the_mean_square_in_expectation():
    length, window = 6, 3
    x = np.array([1.0, 2, -4, 0.5, 1, -0.5])
    squares = [
        (spectra.apply_layer(x, np.array(permutation), window) ** 2).sum()
        for permutation in itertools.permutations(range(length))
    ]
    assert np.mean(squares) == pytest.approx(spectra.mean_square(length, window) * (x**2).sum())


def test_distances_of_stochastic_layers():
    length, window, depth = 400, 9, 5
    starts = np.array([0, 17, 399])
    layers = permutations(length, depth)
    found = spectra.distances(layers, window, starts)
    columns = dense_product(layers[:3], window)[:, starts]
    np.testing.assert_allclose(found[2], np.abs(columns - 1 / length).sum(0) / 2, atol=1e-12)

    bounds = spectra.stochastic_bounds(length, window, range(1, depth + 1))
    stacks = [permutations(length, depth, seed) for seed in range(1, 21)]
    many = np.concatenate([spectra.distances(x, window, starts) for x in stacks], axis=1)
    assert (many.min(1) >= bounds.lower - 1e-12).all()
    assert (many.mean(1) <= bounds.upper).all()
    # A normal distribution's mean modulus is √(2/π) of its root mean square: the bound is close.
    assert many[-1].mean() > 0.7 * bounds.upper[-1]


@pytest.mark.parametrize(('length', 'window'), [(40, 5), (41, 7)])
def test_distances_of_sliding_windows(length, window):
    identity = np.arange(length)
    expected = spectra.distances([identity] * 30, window, np.array([3]))[:, 0]
    found = spectra.sliding_distances(length, window, range(1, 31))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    depth = spectra.sliding_mixing_depth(length, window, 0.25)
    around = spectra.sliding_distances(length, window, [depth - 1, depth])
    assert around[0] > 0.25 >= around[1]


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match=r'window 8 is even.*choose 7 or 9'):
        spectra.check(16, 8)
    with pytest.raises(ValueError, match='window 17 of 16 tokens'):
        spectra.check(16, 17)
    with pytest.raises(ValueError, match='tokens=0; expected'):
        spectra.check(0, 3)
    with pytest.raises(ValueError, match='window=1; expected'):
        spectra.check(16, 1)
