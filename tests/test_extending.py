"""The package of docs/extending.md, installed as it stands there, conforms and trains."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / 'docs' / 'extending.md').read_text()
BLOCKS = re.findall(r'^```(\w+)\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)

# The paths' sizes stay those of the page.
TINY = """
    --config.model.vocab_size=257 --config.model.hidden_size=16 --config.model.num_layers=2
    --config.model.num_heads=2 --config.model.num_kv_heads=2 --config.model.head_dim=8
    --config.model.intermediate_size=16 --config.data.corpus=text --config.data.path=text
    --config.data.sequence_length=96 --config.data.virtual_shards=1
    --config.data.tokenizer.kind=bytes --config.training.steps=1 --config.training.batch_size=2
    --config.optimizer.warmup_steps=0 --config.evaluation.permutation_draws=1 --data_dir=data
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('extending')


@pytest.fixture(scope='module')
def run(folder):
    """Returns a function that runs Python where the page's package is installed."""
    env = os.environ | {
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': '',
        # Compiles in half the time.
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
        'PYTHONPATH': os.pathsep.join([str(folder / 'site'), str(ROOT)]),
    }

    def run(*arguments):
        result = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    package = folder / 'dilated_attention'
    package.mkdir()
    for language, name in (('toml', 'pyproject.toml'), ('python', 'dilated_attention.py')):
        assert f'`dilated_attention/{name}`' in PAGE
        (package / name).write_text(next(code for found, code in BLOCKS if found == language))
    pip = '-m pip install --quiet --no-index --no-deps --no-build-isolation --target site'
    run(*pip.split(), './dilated_attention')
    return run


@pytest.mark.slow
def test_package_conforms(run):
    _, check = (code for language, code in BLOCKS if language == 'python')
    assert 'agreement_with_the_reference' in run('-c', check)


@pytest.mark.slow
def test_keys_are_counted(run):
    code = """
import jax.numpy as jnp, sa_jax
kind = sa_jax.get_attention('dilated')
query = jnp.zeros((1, 50, 1, 1))
for is_causal in (True, False):
    context = sa_jax.AttentionContext(is_causal=is_causal)
    mask = kind.mask(query, query, context, window=4, stride=3)
    assert kind.visible_keys(50, is_causal=is_causal, window=4, stride=3) == mask.sum() / 50
"""
    run('-c', code)


@pytest.mark.slow
def test_page_trains_a_step(run, folder):
    for split in ('train', 'validation'):
        (folder / 'text' / split).mkdir(parents=True)
        (folder / 'text' / split / '1.txt').write_text('The state of the union is strong. ' * 30)
    (command,) = (code for language, code in BLOCKS if language == 'bash')
    python, *arguments = shlex.split(command.replace('\\\n', ''))
    assert python == 'python'
    run(*(x.replace('configs/', f'{ROOT}/configs/') for x in arguments), *TINY.split())
    (record,) = map(json.loads, (folder / 'runs/dilated/metrics.jsonl').read_text().splitlines())
    assert list(record['gates']) == ['0_dilated', '1_sliding_window']
    assert 0 < record['loss'] < 10
    assert record['grad_norm'] > 0
