"""Schedules, clipping and the weight-decay mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.training.optimizer import (
    decay_mask,
    learning_rate_schedule,
    make_optimizer,
    parameter_name,
)


def section(**changes):
    fields = {
        'learning_rate': 0.8,
        'schedule': 'cosine',
        'warmup_steps': 4,
        'final_fraction': 0.25,
        'beta1': 0.9,
        'beta2': 0.95,
        'eps': 1e-8,
        'weight_decay': 0.5,
        'clip_norm': 1.0,
    }
    return ConfigDict(fields | changes)


def test_cosine_schedule_values():
    rates = learning_rate_schedule(section(), steps=20)(jnp.arange(21))
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 0.8], rtol=1e-6)
    np.testing.assert_allclose(rates[12], (0.8 + 0.2) / 2, rtol=1e-6)
    np.testing.assert_allclose(rates[20], 0.2, rtol=1e-6)
    assert np.all(np.diff(rates[4:]) < 0)


def test_wsd_schedule_values():
    rates = learning_rate_schedule(section(schedule='wsd'), steps=20)(jnp.arange(21))
    np.testing.assert_allclose(rates[3:17], 0.8, rtol=1e-6)
    np.testing.assert_allclose(rates[16:], [0.8, 0.65, 0.5, 0.35, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'schedule': 'linear'}, "'linear'; expected one of cosine, wsd"),
        ({'warmup_steps': 20}, 'fewer than training.steps = 20'),
        ({'final_fraction': 2.0}, 'between 0 and 1'),
        ({'learning_rate': 0.0}, 'positive'),
    ],
)
def test_schedule_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        learning_rate_schedule(section(**changes), steps=20)


def test_weight_decay_spares_norms_gates_and_biases():
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=8,
        qk_norm=True,
        tie_embeddings=False,
        attention_options={'stochastic': {'window': 4}, 'sliding_window': {'window': 4}},
    )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    mask = decay_mask(nnx.to_pure_dict(nnx.state(model)))
    leaves, _ = jax.tree_util.tree_flatten_with_path(mask)
    assert {parameter_name(path) for path, decays in leaves if decays} == {
        'embedding',
        'unembedding',
        'layers/attention/query',
        'layers/attention/key',
        'layers/attention/value',
        'layers/attention/output',
        'layers/feed_forward/gate',
        'layers/feed_forward/up',
        'layers/feed_forward/down',
    }


def test_clipping_precedes_adam():
    params = {'kernel': jnp.ones(3)}
    optimizer = make_optimizer(section(weight_decay=0.0, eps=1.0), steps=20)
    update, _ = optimizer.update({'kernel': jnp.full(3, 100.0)}, optimizer.init(params), params)
    clipped = 1 / np.sqrt(3)  # of global norm 1
    np.testing.assert_allclose(update['kernel'], -0.2 * clipped / (clipped + 1), rtol=1e-5)


def test_decay_pulls_matrices_only():
    params = {'kernel': jnp.ones(2), 'final_norm': jnp.ones(2)}
    optimizer = make_optimizer(section(), steps=20)
    zeros = jax.tree.map(jnp.zeros_like, params)
    update, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(update['kernel'], -0.2 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(update['final_norm'], 0)
