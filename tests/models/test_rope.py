"""Rotary embeddings against complex rotations, their scalings against Hugging Face's."""

import jax.numpy as jnp
import numpy as np

from sa_jax.models import rope


def _normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rope_is_a_complex_rotation_by_the_given_positions():
    head_dim, theta = 8, 100.0
    positions = np.array([[0, 1, 2, 70_001], [5, 6, 0, 1]])
    x = _normal(0, (2, 4, 3, head_dim))
    pairs = x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]
    frequencies = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
    turned = pairs * np.exp(1j * positions[..., None] * frequencies)[:, :, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    tables = rope.tables(jnp.array(positions), head_dim, theta)
    # Float32 represents an angle of 70,001 to 0.004 radians.
    np.testing.assert_allclose(rope.rotate(jnp.array(x), *tables), expected, atol=2e-2)
    near = positions < 1000
    actual = np.asarray(rope.rotate(jnp.array(x), *tables))
    np.testing.assert_allclose(actual[near], expected[near], atol=1e-5)


def test_rope_scores_depend_on_distance_only():
    q, k = jnp.array(_normal(0, (1, 1, 1, 8))), jnp.array(_normal(1, (1, 1, 1, 8)))

    def score(p, q_position):
        turn = lambda x, position: rope.rotate(x, *rope.tables(jnp.array([[position]]), 8, 1e4))  # noqa: E731
        return jnp.sum(turn(q, q_position) * turn(k, p))

    np.testing.assert_allclose(score(3, 10), score(103, 110), rtol=1e-4)
