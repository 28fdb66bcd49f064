"""A mixture of experts against one loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.models import experts as experts_module
from sa_jax.models.experts import choose, mix, mixture
from sa_jax.models.layers import swiglu
from sa_jax.models.sharding import make_mesh

LAYER = 1


def _normal(seed, shape):
    return jnp.array(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _weights(experts, hidden=6, width=5):
    """The router of a layer, and the weights of two layers' experts."""
    into, out = (2, experts, hidden, width), (2, experts, width, hidden)
    return [_normal(i, shape) for i, shape in enumerate(((hidden, experts), into, into, out))]


def _loop(x, router, gate, up, down, num_chosen, normalize):
    """Token by token, in float64, in layer `LAYER`."""
    result = np.zeros(x.shape)
    router, gate, up, down = (np.asarray(w, np.float64) for w in (router, gate, up, down))
    gate, up, down = gate[LAYER], up[LAYER], down[LAYER]
    for t, token in enumerate(np.asarray(x, np.float64)):
        logits = token @ router
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        chosen = np.argsort(-probabilities, kind='stable')[:num_chosen]
        weights = probabilities[chosen]
        if normalize:
            weights /= weights.sum()
        for expert, weight in zip(chosen, weights, strict=True):
            z = token @ gate[expert]
            result[t] += weight * (z / (1 + np.exp(-z)) * (token @ up[expert]) @ down[expert])
    return result


@pytest.mark.parametrize('normalize', [False, True])
@pytest.mark.parametrize(
    ('tokens', 'experts', 'num_chosen'), [(1, 1, 1), (1, 9, 4), (3, 5, 5), (40, 9, 2), (37, 2, 1)]
)
def test_equals_a_loop_over_tokens(tokens, experts, num_chosen, normalize):
    x, weights = _normal(9, (1, tokens, 6)), _weights(experts)
    found = mixture(x, *weights, layer=LAYER, num_chosen=num_chosen, normalize=normalize)
    expected = _loop(x[0], *weights, num_chosen, normalize)
    np.testing.assert_allclose(found[0], expected, atol=1e-5 * np.abs(expected).max())


def test_all_tokens_may_choose_the_same_experts():
    router, *weights = _weights(8)
    router = jnp.zeros_like(router).at[:, 5].set(3).at[:, 2].set(1)
    x = jnp.abs(_normal(9, (1, 33, 6)))
    found = mixture(x, router, *weights, layer=LAYER, num_chosen=2, normalize=True)
    expected = _loop(x[0], router, *weights, 2, True)
    np.testing.assert_allclose(found[0], expected, atol=1e-5 * np.abs(expected).max())


def test_of_equal_experts_the_first_are_chosen():
    choice = choose(jnp.ones((2, 4)), jnp.ones((4, 9)), 3, normalize=True)
    np.testing.assert_array_equal(choice.experts, [[0, 1, 2]] * 2)
    np.testing.assert_allclose(choice.weights, 1 / 3, rtol=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_a_dense_sum():
    x, (router, *weights) = _normal(9, (12, 6)), _weights(4)

    def dense(x, router, gate, up, down):
        choice = choose(x, router, 2, normalize=True)
        gate, up, down = gate[LAYER], up[LAYER], down[LAYER]
        y = jax.nn.silu(jnp.einsum('md,edf->emf', x, gate)) * jnp.einsum('md,edf->emf', x, up)
        y = jnp.einsum('emf,efd->med', y, down)
        of_all = jnp.zeros((12, 4)).at[jnp.arange(12)[:, None], choice.experts].set(choice.weights)
        return jnp.sin(jnp.einsum('med,me->md', y, of_all)).sum()

    def sparse(x, router, *weights):
        choice = choose(x, router, 2, normalize=True)
        return jnp.sin(mix(x, choice, *weights, layer=LAYER, num_experts=4)).sum()

    arguments = (x, router, *weights)
    expected, found = (jax.grad(f, argnums=tuple(range(5)))(*arguments) for f in (dense, sparse))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.skipif(jax.device_count() < 8, reason='needs 8 devices')
@pytest.mark.parametrize('sizes', [(8, 1, 1), (1, 1, 8), (2, 2, 2)])
def test_experts_spread_over_a_mesh_give_the_same(sizes):
    mesh = make_mesh(*sizes)
    x, weights = _normal(9, (8, 7, 6)), _weights(8)
    options = {'layer': LAYER, 'num_chosen': 3, 'normalize': True}
    expected = mixture(x, *weights, **options)
    found = jax.jit(lambda *arrays: mixture(*arrays, mesh=mesh, **options))(x, *weights)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(('first', 'here'), [(0, 32), (8, 8)])
def test_cost_is_that_of_the_chosen_experts(monkeypatch, first, here):
    """Groups of blocks that run, of all experts and of a share of them."""
    tokens, experts, chosen, rows = 512, 32, 2, 32
    _, *weights = _weights(experts, hidden=16, width=8)
    x, router = _normal(9, (tokens, 16)), _normal(8, (16, experts))
    choice = choose(x, router, chosen, normalize=True)
    weights = [w[:, first : first + here] for w in weights]
    ran = []

    def counted(x, gate, up):
        jax.debug.callback(lambda: ran.append(1))
        return swiglu(x, gate, up)

    monkeypatch.setattr(experts_module, 'swiglu', counted)
    y = mix(x, choice, *weights, layer=LAYER, num_experts=experts, first=first)
    jax.block_until_ready(y)
    jax.effects_barrier()
    own = np.bincount(choice.experts.ravel(), minlength=experts)[first : first + here]
    blocks = int(np.ceil(own / rows).sum())
    # Whole groups of eight; all blocks there could be are twice as many, or eight times.
    assert blocks <= 8 * len(ran) < blocks + 8
