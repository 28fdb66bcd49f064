"""The functions of a layer against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from sa_jax.models.layers import (
    join_paths,
    path_gates,
    rms_norm,
    swiglu,
)


def _normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rms_norm():
    x, weight = _normal(0, (2, 3, 8)), _normal(1, 8)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(rms_norm(jnp.array(x), jnp.array(weight), 1e-3), expected, rtol=1e-5)


def test_rms_norm_does_not_overflow_in_bfloat16():
    x = jnp.full((4,), 3e30, jnp.bfloat16) * jnp.array([1, -1, 1, 1], jnp.bfloat16)
    # The squares exceed float32's range only if they are not scaled; at 1e18 they must fit.
    y = rms_norm(x * jnp.bfloat16(1e-13), jnp.ones(4), 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), [1, -1, 1, 1], rtol=1e-2)


def test_swiglu():
    x, gate, up = _normal(0, (1, 2, 4)), _normal(1, (4, 6)), _normal(2, (4, 6))
    z = x @ gate
    np.testing.assert_allclose(
        swiglu(*map(jnp.array, (x, gate, up))), z / (1 + np.exp(-z)) * (x @ up), rtol=1e-5
    )


def test_gates_are_independent_and_scale_their_own_path():
    x, kernel, bias = _normal(0, (2, 3, 4)), _normal(1, (4, 2, 5, 1)), _normal(2, (2, 5, 1))
    gates = path_gates(*map(jnp.array, (x, kernel, bias)))
    expected = 1 / (1 + np.exp(-(np.einsum('btd,dpnh->btpnh', x, kernel) + bias)))
    np.testing.assert_allclose(gates, expected, rtol=1e-5)

    shares = path_gates(*map(jnp.array, (x, kernel, bias)), are_shares=True)
    odds = np.exp(np.einsum('btd,dpnh->btpnh', x, kernel) + bias)
    np.testing.assert_allclose(shares, odds / odds.sum(2, keepdims=True), rtol=1e-5)

    first, second = _normal(3, (2, 3, 5, 6)), _normal(4, (2, 3, 5, 6))
    joined = join_paths((jnp.array(first), jnp.array(second)), gates)
    np.testing.assert_allclose(
        joined, expected[:, :, 0] * first + expected[:, :, 1] * second, rtol=1e-4, atol=1e-6
    )


def test_gates_stay_float32_in_bfloat16():
    x, kernel, bias = (jnp.ones(s, jnp.bfloat16) for s in ((1, 1, 4), (4, 2, 1, 1), (2, 1, 1)))
    gates = path_gates(x, kernel, bias)
    assert gates.dtype == jnp.float32
    outputs = [jnp.ones((1, 1, 1, 8), jnp.bfloat16)] * 2
    assert join_paths(outputs, gates).dtype == jnp.bfloat16
    assert jax.eval_shape(join_paths, outputs, gates).shape == (1, 1, 1, 8)
