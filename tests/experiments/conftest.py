"""Experiments as a user starts them, and a model small enough for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from sa_jax.models.pretrained.hf_config import decoder_config
from sa_jax.models.pretrained.tensors import sources
from sa_jax.tokenization.tokenizers import make_byte_level

ROOT = Path(__file__).parents[2]
FIELDS = {
    'architectures': ['LlamaForCausalLM'],
    'vocab_size': 257,
    'hidden_size': 8,
    'num_hidden_layers': 3,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'intermediate_size': 8,
    'max_position_embeddings': 64,
    'rms_norm_eps': 1e-5,
    'rope_theta': 1e4,
    'tie_word_embeddings': True,
    'hidden_act': 'silu',
}


@pytest.fixture(scope='session')
def run_experiment():
    """Runs `python -m experiments.NAME FLAGS…` on a single device; returns what it printed."""

    def run(name, *flags):
        return subprocess.run(
            [sys.executable, '-m', f'experiments.{name}', *flags],
            cwd=ROOT,
            env=os.environ | {'XLA_FLAGS': ''},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope='session')
def byte_model(tmp_path_factory):
    """The folder of a checkpoint of bytes, in Hugging Face's format."""
    folder = tmp_path_factory.mktemp('models') / 'tiny'
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(FIELDS))
    generator = np.random.default_rng(0)
    config = decoder_config(FIELDS, compute_dtype='float32')
    tensors = {
        name: generator.normal(size=source.shape).astype(np.float32)
        for source in sources(config).values()
        for name in source.names(config)
    }
    save_file(tensors, folder / 'model.safetensors')
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*alphabet, '<|endoftext|>'])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    make_byte_level(tokenizer)
    tokenizer.add_special_tokens(['<|endoftext|>'])
    tokenizer.save(str(folder / 'tokenizer.json'))
    return folder
