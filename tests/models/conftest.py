"""A tiny decoder whose parameters are all far from their special initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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
        config = make_config(*args, **changes)
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
        # NumPy's numbers need no compilation.
        generator = np.random.default_rng(0)

        def draw(path, leaf):
            centre = 'norm' in jax.tree_util.keystr(path)
            return jnp.array(centre + 0.3 * generator.normal(size=leaf.shape), leaf.dtype)

        return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, state))

    return make


@functools.partial(jax.jit, static_argnames=('graph', 'mesh'))
def _forward(graph, state, tokens, inputs, mesh):
    return nnx.merge(graph, state)(tokens, mesh=mesh, **inputs)


@pytest.fixture
def run():
    """Calls a model under jit, compiled once per architecture and shapes."""

    def run(model, tokens, *, mesh=None, **inputs):
        return _forward(*nnx.split(model), tokens, inputs, mesh)

    return run


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(2), (4, 13), 0, 32)
