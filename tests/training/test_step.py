"""The pure training step on a toy model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sa_jax.training.step import TrainState, init_state, layer_norms, split_batch, train_step

VOCABULARY, WIDTH, LAYERS = 11, 4, 2


def init_params(key):
    embed, layers = jax.random.split(key)
    return {
        'embedding': jax.random.normal(embed, (VOCABULARY, WIDTH)),
        'layers': {'kernel': 0.5 * jax.random.normal(layers, (LAYERS, WIDTH, WIDTH))},
    }


def forward(params, batch, key):
    """A model whose logits depend on the row's permutation key, as an attention path's do."""
    x = params['embedding'][batch['inputs']]
    for kernel in params['layers']['kernel']:
        x = jnp.tanh(x @ kernel)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch['example_ids'])
    x = x + jax.vmap(lambda key: jax.random.normal(key, (1, WIDTH)))(keys)
    weights = batch['weights'] / jnp.maximum(batch['weights'].sum(), 1)
    gate = jnp.sum(jax.nn.sigmoid(x[..., 0]) * weights)
    return x @ params['embedding'].T, jnp.broadcast_to(gate, (LAYERS, 2))


@pytest.fixture
def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


@pytest.fixture
def state(optimizer):
    return init_state(jax.random.key(0), init_params, optimizer)


@pytest.fixture
def step(optimizer):
    def run(state, batch):
        return train_step(
            state, batch, forward=forward, optimizer=optimizer, schedule=lambda step: 0.1
        )

    return jax.jit(run)


@pytest.fixture
def batch():
    """Eight rows of very different numbers of tokens."""
    draw = np.random.default_rng(1)
    rows, length = 8, 6
    lengths = np.array([6, 6, 6, 6, 1, 1, 2, 0])
    return {
        'inputs': draw.integers(0, VOCABULARY, (rows, length)),
        'targets': draw.integers(0, VOCABULARY, (rows, length)),
        'weights': (np.arange(length) < lengths[:, None]).astype(np.float32),
        'example_ids': np.arange(rows),
    }


def test_accumulation_equals_one_big_batch(state, step, batch):
    whole_state, whole = step(state, split_batch(batch, 1))
    parts_state, parts = step(state, split_batch(batch, 4))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        (whole_state.params, whole_state.opt_state, whole),
        (parts_state.params, parts_state.opt_state, parts),
    )


def test_loss_is_the_mean_over_weighted_tokens(state, step, batch):
    _, metrics = step(state, split_batch(batch, 2))
    logits, _ = forward(state.params, batch, jax.random.fold_in(state.key, 0))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch['targets'])
    expected = (losses * batch['weights']).sum() / batch['weights'].sum()
    np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-6)
    assert metrics['tokens'] == batch['weights'].sum()


def test_key_is_folded_with_step_and_stays(state, step, batch):
    batch = split_batch(batch, 1)
    first_state, first = step(state, batch)
    _, other = step(state._replace(step=state.step + 1), batch)
    assert first['loss'] != other['loss']
    assert first_state.step == 1
    assert jnp.array_equal(jax.random.key_data(first_state.key), jax.random.key_data(state.key))


def test_permutations_may_stay_the_same(state, optimizer, batch):
    def loss(step):
        _, metrics = train_step(
            state._replace(step=state.step + step),
            split_batch(batch, 1),
            forward=forward,
            optimizer=optimizer,
            schedule=lambda step: 0.1,
            fresh_permutations=False,
        )
        return metrics['loss']

    assert loss(0) == loss(1)


def test_one_step_metrics_are_pinned(state, step, batch):
    """Did you mean to change what a step computes?"""
    _, metrics = step(state, split_batch(batch, 2))
    np.testing.assert_allclose(metrics['loss'], 4.171186, rtol=1e-5)
    np.testing.assert_allclose(metrics['grad_norm'], 1.0974694, rtol=1e-5)


def test_layer_norms_are_per_layer_where_stacked():
    norms = layer_norms({'layers': {'a': jnp.ones((2, 3, 3))}, 'b': jnp.full(4, 2.0)})
    np.testing.assert_allclose(norms['layers/a'], [3, 3])
    np.testing.assert_allclose(norms['b'], 4)


def test_state_is_one_pytree(state):
    assert isinstance(jax.tree.map(lambda x: x, state), TrainState)
