"""A tiny decoder whose parameters are all far from their special initial values."""

import jax
import pytest
from flax import nnx

from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder

OPTIONS = {
    'full': {},
    'sliding_window': {'window': 4},
    'stochastic': {'window': 7},
    'moba': {'block_size': 4, 'top_k': 2},
}


@pytest.fixture
def make_config():
    def make(
        attention=('stochastic', 'sliding_window'), implementation='reference', **changes
    ) -> DecoderConfig:
        # The dense attention compiles in a fraction of the time.
        options = {
            name: OPTIONS.get(name, {}) | {'implementation': implementation} for name in attention
        }
        sizes = {
            'vocab_size': 32,
            'hidden_size': 16,
            'num_layers': 2,
            'num_heads': 4,
            'num_kv_heads': 2,
            'head_dim': 8,
            'intermediate_size': 24,
            'attention_options': options,
        }
        return DecoderConfig(attention=attention, **(sizes | changes))

    return make


@pytest.fixture
def make_model(make_config):
    def make(*args, **changes) -> Decoder:
        model = Decoder(make_config(*args, **changes), rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        leaves = [
            leaf + 0.3 * jax.random.normal(key, leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        return nnx.merge(graph, jax.tree.unflatten(structure, leaves))

    return make


@pytest.fixture
def run():
    """Calls a model under jit."""

    def run(model, tokens, *, mesh=None, **inputs):
        graph, state = nnx.split(model)

        @jax.jit
        def forward(state, tokens, inputs):
            return nnx.merge(graph, state)(tokens, mesh=mesh, **inputs)

        return forward(state, tokens, inputs)

    return run


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(2), (4, 13), 0, 32)
