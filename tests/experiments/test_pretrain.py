"""The binary from outside: terminated, refused, described."""

import json
import signal
import time

import pytest

from sa_jax.training.metrics import TIME_FIELDS, read_metrics


def outcome(process):
    """Waits for a process; returns its exit status and output."""
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def records(workdir):
    return [
        {name: value for name, value in record.items() if name not in TIME_FIELDS}
        for record in read_metrics(workdir / 'metrics.jsonl')
    ]


def wait_for(condition, process):
    while not condition() and process.poll() is None:
        time.sleep(0.005)


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_0(start_training, tmp_path):
    workdir, steps = tmp_path / 'run', '--config.training.steps=100000'
    process = start_training(workdir, steps, '--config.training.checkpoint_every=100000')
    wait_for(lambda: len(read_metrics(workdir / 'metrics.jsonl')) > 3, process)
    process.send_signal(signal.SIGTERM)
    status, output = outcome(process)
    assert status == 0, output
    assert 'the same command continues' in output
    (checkpoint,) = (workdir / 'checkpoints').iterdir()
    assert int(checkpoint.name) == records(workdir)[-1]['step']


@pytest.mark.slow
def test_end_of_a_run(start_training, tmp_path):
    workdir = tmp_path / 'run'
    flags = '--config.training.steps=4', '--config.training.checkpoint_every=2'
    status, output = outcome(start_training(workdir, *flags))
    assert status == 0, output
    for name in ('loss.png', 'gates.png', 'metrics.jsonl', 'result.json', 'checkpoints/4'):
        assert (workdir / name).exists()
        assert str(workdir / name) in output
    result = json.loads((workdir / 'result.json').read_text())
    assert {'config', 'command', 'versions', 'device', 'git_revision', 'seeds'} <= set(result)
    assert '--config.training.steps=4' in result['command']
    assert set(result['figures']['baselines']) == {'unigram', 'bigram'}
    assert result['figures']['held_out']['perplexity'] > 1
    step = result['figures']['step_seconds']
    assert 0 < step['median'] <= step['most']
    assert 0 <= result['figures']['input_wait'] < 1
    assert result['figures']['save_seconds'] > 0
    assert 'bigram' in output
    assert 'paragraph' in output

    status, output = outcome(start_training(workdir, '--config.model.hidden_size=64'))
    assert status != 0
    assert 'model.hidden_size: 32 -> 64' in output


@pytest.mark.slow
def test_dry_run_describes_and_leaves_nothing(start_training, tmp_path):
    status, output = outcome(start_training(tmp_path / 'run', '--dry_run'))
    assert status == 0, output
    for part in ('Parameters:', 'attention/0_stochastic', 'Memory per device', 'state/params'):
        assert part in output
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_mistyped_override_names_the_nearest_field(start_training, tmp_path):
    status, output = outcome(start_training(tmp_path / 'run', '--config.training.stpes=3'))
    assert status != 0
    assert '--config.training.stpes=3 names no field' in output
    assert '"steps"' in output
    assert 'Traceback' not in output
