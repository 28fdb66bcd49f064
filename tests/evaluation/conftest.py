"""A tiny decoder of bytes with random parameters, under any attention pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.tokenization.tokenizers import ByteTokenizer

OPTIONS = {
    'full': {},
    'sliding_window': {'window': 6},
    'stochastic': {'window': 11},
    'moba': {'block_size': 4, 'top_k': 2},
}


@pytest.fixture(scope='session')
def make_model():
    config = DecoderConfig(
        vocab_size=260,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        attention=('full',),
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    generator = np.random.default_rng(0)

    def draw(path, leaf):
        centre = 'norm' in jax.tree_util.keystr(path)
        return jnp.array(centre + 0.5 * generator.normal(size=leaf.shape), leaf.dtype)

    model = nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, state))

    def make(attention='full', **changes):
        options = {attention: OPTIONS[attention] | {'implementation': 'reference'}}
        return model.with_config(attention=(attention,), attention_options=options, **changes)

    return make


@pytest.fixture
def with_bos():
    """Bytes, with a token before every text."""
    tokenizer = ByteTokenizer()
    tokenizer.adds_bos = True
    return tokenizer
