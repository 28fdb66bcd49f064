"""The efficiency experiment on tiny lengths."""

import json

import pytest


@pytest.mark.slow
def test_efficiency(run_experiment, tmp_path):
    (tmp_path / 'tiny.flags').write_text('# Tokens.\n--lengths=32,64\n--rounds=2\n--window=9\n')
    flags = [f'--flagfile={tmp_path / "tiny.flags"}', f'--workdir={tmp_path / "out"}', '--peers=']
    flags += ['--kinds=full,stochastic,sa_swa', '--matmul_size=64', '--min_ms=0', '--heads=2']
    done = run_experiment('efficiency', *flags)
    assert done.returncode == 0, done.stderr
    assert '| SA + SWA, gated |' in done.stdout
    assert (tmp_path / 'out' / 'efficiency.md').read_text() in done.stdout
    assert (tmp_path / 'out' / 'efficiency.png').exists()
    result = json.loads((tmp_path / 'out' / 'result.json').read_text())
    assert result['config']['kv_heads'] == 2
    assert [len(x['cases']) for x in result['figures']['lengths']] == [6, 6]

    again = run_experiment('efficiency', *flags)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    other = run_experiment('efficiency', *flags, '--window=5')
    assert other.returncode == 1
    assert 'sweep.window: 9 -> 5' in other.stderr
    assert 'Traceback' not in other.stderr


def test_bad_flags_are_named(run_experiment, tmp_path):
    done = run_experiment('efficiency', f'--workdir={tmp_path}', '--modes=backward')
    assert done.returncode == 1
    assert "modes: 'backward'; expected forward, forward_backward" in done.stdout + done.stderr
    assert 'Traceback' not in done.stderr
