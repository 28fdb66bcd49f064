"""Experiments as a user starts them, and a model small enough for them."""

import json
import os
import random
import re
import signal
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
# The tests' own flags, less their eight devices.
ONE_DEVICE = re.sub('--xla_force_host_platform_device_count=[0-9]+', '', os.environ['XLA_FLAGS'])
TINY_CONFIG = ROOT / 'tests' / 'training' / 'tiny_config.py'
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
            env=os.environ | {'XLA_FLAGS': ONE_DEVICE},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope='session')
def texts(tmp_path_factory):
    """A folder with a small corpus in `text`, built datasets in `data`, and compiled programs."""
    folder = tmp_path_factory.mktemp('training')
    draw = random.Random(0)
    words = ('state', 'union', 'people', 'congress', 'war', 'peace', 'treasury', 'year', 'law')
    for split, count in (('train', 12), ('validation', 4)):
        (folder / 'text' / split).mkdir(parents=True)
        for index in range(count):
            text = ' '.join(draw.choices(words, k=draw.randint(20, 120)))
            (folder / 'text' / split / f'{index}.txt').write_text(text)
    return folder


@pytest.fixture
def start_training(texts):
    """Starts `experiments.pretrain` with the tiny configuration; ends it with the test.

    On one device, as a user has it; `processes` starts as many by `scripts/launch_local.sh`.
    """
    started = []
    environment = os.environ | {
        'XLA_FLAGS': ONE_DEVICE,
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(texts / 'compiled'),
        'PYTHON': sys.executable,
    }

    def start(workdir, *flags, processes=None):
        command = [
            sys.executable, '-m', 'experiments.pretrain', f'--config={TINY_CONFIG}',
            f'--workdir={workdir}', f'--data_dir={texts / "data"}',
            f'--config.data.path={texts / "text"}', *flags,
        ]  # fmt: skip
        if processes:
            command = ['scripts/launch_local.sh', str(processes), *command]
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
