"""What a run gains by more context, as a user measures it."""

import json

import pytest

pytestmark = pytest.mark.slow


def test_measures_a_run(run_experiment, texts, tmp_path):
    shared = [f'--data_dir={texts / "data"}', f'--workdir={tmp_path / "run"}']
    done = run_experiment(
        'pretrain',
        *shared,
        '--config=tests/training/tiny_config.py',
        f'--config.data.path={texts / "text"}',
        '--config.training.steps=2',
        '--config.optimizer.warmup_steps=0',
    )
    assert done.returncode == 0, done.stderr
    found = tmp_path / 'context'

    def measure(runs, *flags):
        flags = (f'--runs={runs}', f'--workdir={found}', shared[0], '--draws=2', *flags)
        return run_experiment('context', *flags)

    done = measure(tmp_path / 'run', '--scored=16')
    assert done.returncode == 0, done.stderr
    figures = json.loads((found / 'result.json').read_text())['figures']
    assert figures['contexts'] == [16, 32, 64]
    assert figures['tokens'] > 0
    (run,) = figures['runs']
    assert run['step'] == 2
    assert len(run['perplexity']) == 3
    assert '| 64 |' in (found / 'context.md').read_text()
    assert (found / 'context.png').exists()

    done = measure(tmp_path / 'run', '--scored=64')
    assert done.returncode != 0
    assert 'expected 1 to 63' in done.stderr
    done = measure(tmp_path)
    assert 'is no workdir of a run' in done.stderr
    assert 'Traceback' not in done.stderr
