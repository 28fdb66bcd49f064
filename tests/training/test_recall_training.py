"""A decoder recalls what it reaches, and nothing else."""

import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from configs.pretrain import demo
from sa_jax.data.recall import Recall
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.training.recall import accuracy_by_distance, learn

RECALL = Recall(length=24, pairs=2, num_keys=2, num_values=2, num_noise=2)


def config(*attention, window=5, num_layers=2):
    return DecoderConfig(
        vocab_size=RECALL.vocab_size,
        hidden_size=16,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=16,
        attention=attention,
        attention_options={x: {'window': window} for x in attention if x != 'full'},
    )


def test_a_sliding_window_reaches_its_other_keys_once_a_layer():
    model = nnx.jit(Decoder(config('sliding_window'), rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, RECALL.vocab_size, (1, 24))
    before = model(tokens).logits[0, -1]
    differs = []
    for distance in range(1, 24):
        changed = tokens.copy()
        changed[0, -1 - distance] = (tokens[0, -1 - distance] + 1) % RECALL.vocab_size
        differs.append(bool((model(changed).logits[0, -1] != before).any()))
    assert differs == [True] * 8 + [False] * 15


@pytest.mark.slow
def test_learns_where_it_reaches_and_guesses_beyond():
    optimizer = ConfigDict(demo.get_config().optimizer.to_dict())
    optimizer.update({'learning_rate': 1e-2, 'warmup_steps': 20})
    losses = []
    model = learn(
        config('sliding_window', window=8),
        RECALL,
        optimizer,
        steps=300,
        rows=64,
        seed=0,
        on_step=losses.append,
    )
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.05
    edges = [1, 5, 15, 23]
    accuracy, count = accuracy_by_distance(model, RECALL, edges, batches=4, draws=1, seed=0)
    assert count.min() > 200
    assert accuracy[0] > 0.6
    # Seven tokens a layer: fifteen are out of reach, and guessing is right half of the time.
    error = 0.5 / np.sqrt(count[2])
    assert abs(accuracy[2] - 0.5) < 5 * error
