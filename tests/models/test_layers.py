"""The functions of a layer against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', 1e-5), ('bfloat16', 2e-2)])
def test_backward_passes_are_those_of_the_formulas(dtype, tolerance):
    def norm(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * weight

    def hidden(x, gate, up):
        return jax.nn.silu(x @ gate) * (x @ up)

    def gradients(function, arguments):
        output, pull = jax.vjp(function, *arguments)
        return pull(jnp.asarray(_normal(9, output.shape)).astype(output.dtype))

    x, weight, gate, up = (
        jnp.asarray(_normal(i, shape)).astype(dtype)
        for i, shape in enumerate([(2, 3, 8), (8,), (8, 6), (8, 6)])
    )
    for own, plain, arguments in (
        (lambda x, weight: rms_norm(x, weight, 1e-3), norm, (x, weight)),
        (swiglu, hidden, (x, gate, up)),
    ):
        found = gradients(own, arguments)
        expected = gradients(plain, [y.astype('float32') for y in arguments])
        assert {a.dtype for a in found} == {jnp.dtype(dtype)}
        for a, b in zip(found, expected, strict=True):
            scale = float(jnp.abs(b).max())
            np.testing.assert_allclose(a.astype('float32'), b, atol=tolerance * scale)


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
