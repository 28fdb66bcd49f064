"""The decoding experiment on short sequences."""

import json

import numpy as np
import pytest


@pytest.mark.slow
def test_decoding(run_experiment, tmp_path):
    flags = ['--variants=full,sa', '--window=9', '--length=32', '--length=64', '--rounds=2']
    flags += ['--checked=32', '--counted=64', '--draws=200']
    done = run_experiment('decoding', f'--workdir={tmp_path}', *flags)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'decoding.md').read_text() in done.stdout
    assert (tmp_path / 'decoding.png').stat().st_size > 1000
    figures = json.loads((tmp_path / 'result.json').read_text())['figures']
    assert all(x['largest'] < 1e-4 < x['largest_logit'] for x in figures['logits'].values())
    # Per variant, the last tokens of both caches, and in the longer one that of the shorter.
    assert [(x['length'], x['t']) for x in figures['times']] == 2 * [(32, 31), (64, 31), (64, 63)]
    keys = figures['visible_keys']['sa']
    errors = np.subtract(keys['measured'], keys['expected']) / keys['standard_error']
    assert np.abs(errors).max() < 4
