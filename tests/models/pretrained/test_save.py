"""What is saved is loaded again, and is what other programs read."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from checkpoint_files import LLAMA, QWEN3_MOE, make_tensors, write_checkpoint
from flax import nnx
from safetensors.numpy import load_file

from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.models.pretrained import Pretrained, load_pretrained, save_pretrained
from sa_jax.tokenization.published import load_published
from sa_jax.tokenization.tokenizers import make_byte_level


def assert_same(found, expected):
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


def gated(**changes):
    return DecoderConfig(
        **{
            'vocab_size': 300,
            'hidden_size': 16,
            'num_layers': 3,
            'num_heads': 4,
            'num_kv_heads': 2,
            'head_dim': 8,
            'intermediate_size': 24,
            'attention': ('stochastic', 'sliding_window'),
            'attention_options': {
                'stochastic': {'window': 9, 'circular': True},
                'sliding_window': {'window': 5},
            },
            'layer_attention': {'-1': {'attention': ('full', 'full')}},
            'qk_norm': True,
        }
        | changes
    )


@pytest.fixture
def tokenizer(tmp_path):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*alphabet, '<|endoftext|>'])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    make_byte_level(tokenizer)
    tokenizer.add_special_tokens(['<|endoftext|>'])
    tokenizer.save(str(tmp_path / 'trained.json'))
    return load_published(tmp_path / 'trained.json')


@pytest.mark.parametrize('fields', [LLAMA, QWEN3_MOE])
def test_a_published_model_keeps_its_tensors(fields, tmp_path):
    tensors = make_tensors(fields)
    (tmp_path / 'given').mkdir()
    write_checkpoint(tmp_path / 'given', fields, tensors)
    given = load_pretrained(tmp_path / 'given', dtype='float32')
    save_pretrained(given, tmp_path / 'saved')
    saved = load_file(tmp_path / 'saved' / 'model.safetensors')
    assert saved.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(saved[name], x.astype(np.float32))
    again = load_pretrained(tmp_path / 'saved', dtype='float32')
    assert_same(again.model, given.model)
    assert again.context_length == given.context_length
    architectures = json.loads((tmp_path / 'saved' / 'config.json').read_text())['architectures']
    assert architectures == ['LlamaForCausalLM' if fields is LLAMA else 'SaJaxDecoder']


@pytest.mark.parametrize('gate', ['head', 'channel', 'none'])
def test_a_gated_decoder_comes_back(gate, tokenizer, tmp_path):
    model = Decoder(gated(gate=gate), rngs=nnx.Rngs(0))
    if gate != 'none':
        bias = model.layers.attention.path_gate_bias
        bias[...] = jax.random.normal(jax.random.key(0), bias.shape)
    save_pretrained(Pretrained(model, tokenizer, 64), tmp_path / 'a' / 'saved')
    found = load_pretrained(tmp_path / 'a' / 'saved', dtype='float32')
    assert_same(found.model, model)
    assert found.context_length == 64
    text = 'An otter, née heron.'
    assert found.tokenizer.encode(text) == tokenizer.encode(text)
    assert found.tokenizer.bos_id == tokenizer.bos_id
    assert found.tokenizer.adds_bos == tokenizer.adds_bos
    assert [x.name for x in (tmp_path / 'a').iterdir()] == ['saved']


def test_errors(tmp_path):
    model = Decoder(gated(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match='exists; choose a directory that does not'):
        save_pretrained(Pretrained(model, None, 64), tmp_path)
    save_pretrained(Pretrained(model, None, 64), tmp_path / 'saved')
    path = tmp_path / 'saved' / 'config.json'
    fields = json.loads(path.read_text())
    for changes, message in (
        ({'decoder': fields['decoder'] | {'gat': 'head'}}, "no field 'gat'"),
        ({'decoder': fields['decoder'] | {'num_layers': 1 << 40}}, 'num_layers'),
        ({'decoder': None}, 'expected'),
        ({'rope_theta': 2.0}, 'rope_theta'),
    ):
        path.write_text(json.dumps(fields | changes))
        with pytest.raises(ValueError, match=message):
            load_pretrained(tmp_path / 'saved')
