"""The mixing experiment on short sequences, and on a tiny model of bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from sa_jax.analysis.mixing import Settings
from sa_jax.models.pretrained.hf_config import decoder_config
from sa_jax.models.pretrained.tensors import sources
from sa_jax.tokenization.tokenizers import make_byte_level

ROOT = Path(__file__).parents[2]
SMALL = ['--tokens=48', '--windows=4,8,16', '--draws=32', '--depth=3', '--spectral_draws=2']
SMALL += ['--spectral_tokens=40,300', '--spectral_window=5']
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


def write_checkpoint(folder):
    """A checkpoint of bytes, in Hugging Face's format."""
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


def call(*flags):
    return subprocess.run(
        [sys.executable, '-m', 'experiments.mixing', *flags],
        cwd=ROOT,
        env=os.environ | {'XLA_FLAGS': ''},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_experiment(tmp_path):
    write_checkpoint(tmp_path / 'tiny')
    text = tmp_path / 'tale.txt'
    text.write_text('A heron came by and sat with the otter; the otter had seen one before. ' * 2)
    out = tmp_path / 'out'
    model = [f'--model={tmp_path / "tiny"}', f'--text={text}', '--layers=0,2', '--texts=2']
    done = call(f'--workdir={out}', *SMALL, *model)
    assert done.returncode == 0, done.stderr
    assert (out / 'mixing.md').read_text() in done.stdout
    for name in ('estimator_random', 'estimator_layer_0', 'estimator_layer_2', 'spectra'):
        for suffix in ('png', 'svg'):
            assert (out / f'{name}.{suffix}').stat().st_size > 1000
    result = json.loads((out / 'result.json').read_text())
    assert (result['config']['model'], result['config']['text']) == ('tiny', 'tale.txt')
    cases = {
        (x['source'], x['weights'], x['mask'], x['queries']): x for x in result['figures']['errors']
    }
    assert len(cases) == 3 * 2 * 3
    # Zero queries see all keys alike, whatever the model; its own queries don't.
    assert cases['layer 2', 'uniform', 'bidirectional', 'all']['effective_keys'] == pytest.approx(
        48
    )
    assert cases['layer 2', 'softmax', 'bidirectional', 'all']['effective_keys'] < 40
    points = cases['random', 'uniform', 'bidirectional', 'all']['points']
    assert [x['slots'] for x in points] == [4, 8, 16]
    assert points[0]['variance']['value'] > 3 * points[2]['variance']['value']
    small, large = result['figures']['spectra']
    for x in (small, large):
        assert x['stochastic_eigenvalues'] == pytest.approx([x['sliding_eigenvalue']] * 2)
        assert x['stochastic_singular'][2] < 0.7 * x['sliding_singular'][2]
    # More tokens, more layers.
    assert large['distance'][2] > small['distance'][2]


@pytest.mark.slow
def test_bad_flags_are_named(tmp_path):
    def refused(message, *flags):
        done = call(f'--workdir={tmp_path}', *flags)
        assert done.returncode != 0
        assert 'Traceback' not in done.stderr
        assert message in done.stdout + done.stderr

    refused('--windows=4,a; expected whole numbers', '--windows=4,a')
    refused('give --model as well', '--layers=0')
    refused('neither a directory, nor a GGUF file', '--model=absent')


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'tokens': 0}, 'tokens=0; expected'),
        ({'tokens': 128}, 'window 256 of 128 tokens'),
        ({'windows': (0, 4, 8)}, 'window 0 of 2048 tokens'),
        ({'windows': (8, 16)}, 'windows=8,16; expected at least 3, ascending'),
        ({'windows': (8, 8, 16)}, 'ascending'),
        ({'draws': 100}, 'draws=100; expected a multiple of 16'),
        ({'spectral_window': 32}, 'window 32 is even'),
        ({'spectral_tokens': (31,)}, 'window 33 of 31 tokens'),
        ({'spectral_tokens': ()}, 'spectral_tokens=; expected at least 1'),
        ({'spectral_draws': 1}, 'spectral_draws=1; expected at least 2'),
        ({'depth': 0}, 'depth=0; expected at least 1'),
        ({'texts': -1}, 'texts=-1; expected at least 1'),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**changes)
