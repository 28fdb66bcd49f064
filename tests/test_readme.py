"""The README's examples run as they stand."""

import re
from pathlib import Path

import jax
from flax import nnx

from sa_jax import models
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.tokenization.tokenizers import ByteTokenizer

EXAMPLES = re.findall(
    r'```python\n(.*?)```', (Path(__file__).parents[1] / 'README.md').read_text(), re.DOTALL
)


def test_attention():
    names = {}
    exec(EXAMPLES[0], names)
    assert names['far'].shape == names['near'].shape == (2, 1000, 8, 64)


def test_decoding():
    config = DecoderConfig(
        vocab_size=16,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        attention=('stochastic',),
        attention_options={'stochastic': {'window': 5}},
    )
    names = {
        'model': Decoder(config, rngs=nnx.Rngs(0)),
        'prompt': jax.numpy.ones((2, 3), int),
        'key': jax.random.key(0),
    }
    exec(EXAMPLES[1], names)
    assert names['logits'].shape == (2, 16)
    assert names['cache'].count == 4


def test_published_models(monkeypatch):
    config = DecoderConfig(
        vocab_size=257,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=8,
        attention=('full',),
    )
    loaded = models.Pretrained(Decoder(config, rngs=nnx.Rngs(0)), ByteTokenizer(), 64)
    monkeypatch.setattr(models, 'load_pretrained', lambda source: loaded)
    names = {}
    (_, _, example) = EXAMPLES
    exec(example, names)
    assert isinstance(names['text'], str)
    assert names['sparse_model'].config.attention == ('stochastic',)
