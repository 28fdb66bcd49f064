"""The binary from outside: killed, terminated, refused, described."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sa_jax.training.metrics import TIME_FIELDS, read_metrics

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / 'tests' / 'training' / 'tiny_config.py'
# One device, as a user has it.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'JAX_PLATFORMS': 'cpu'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('pretrain')
    draw = random.Random(0)
    words = ('state', 'union', 'people', 'congress', 'war', 'peace', 'treasury', 'year', 'law')
    for split, count in (('train', 12), ('validation', 4)):
        (folder / 'text' / split).mkdir(parents=True)
        for index in range(count):
            text = ' '.join(draw.choices(words, k=draw.randint(20, 120)))
            (folder / 'text' / split / f'{index}.txt').write_text(text)
    return folder


@pytest.fixture
def start(folder):
    """Starts the binary with the tiny configuration; ends it with the test."""
    processes = []

    def run(workdir, *arguments):
        command = [
            sys.executable, '-m', 'experiments.pretrain', f'--config={CONFIG}',
            f'--workdir={workdir}', f'--data_dir={folder / "data"}',
            f'--config.data.path={folder / "text"}', *arguments,
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=ENVIRONMENT | {'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled')},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


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
def test_sigkill_at_any_time_changes_nothing(start, folder, tmp_path):
    rhythm = ('--config.training.steps=60', '--config.training.checkpoint_every=3')
    status, output = outcome(start(tmp_path / 'whole', *rhythm))
    assert status == 0, output
    expected = records(tmp_path / 'whole')
    assert [record['step'] for record in expected] == list(range(1, 61))

    workdir = tmp_path / 'killed'
    checkpoints = workdir / 'checkpoints'
    draw = random.Random(1)

    def saving():
        return checkpoints.exists() and any('tmp' in path.name for path in checkpoints.iterdir())

    def progressed(steps):
        return len(read_metrics(workdir / 'metrics.jsonl')) >= steps

    interrupted_saves = 0
    for attempt in range(4):
        process = start(workdir, *rhythm)
        done = len(records(workdir))
        wait_for(lambda done=done: progressed(done // 3 * 3 + draw.randint(2, 5)), process)
        if attempt % 2:
            wait_for(saving, process)
        else:
            time.sleep(draw.uniform(0, 0.05))
        assert process.poll() is None
        process.kill()
        outcome(process)
        interrupted_saves += saving()
    assert interrupted_saves
    status, output = outcome(start(workdir, *rhythm))
    assert status == 0, output
    assert 'Continuing from' in output
    assert records(workdir) == expected
    assert (workdir / 'result.json').exists()


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_0(start, tmp_path):
    workdir, steps = tmp_path / 'run', '--config.training.steps=100000'
    process = start(workdir, steps, '--config.training.checkpoint_every=100000')
    wait_for(lambda: len(read_metrics(workdir / 'metrics.jsonl')) > 3, process)
    process.send_signal(signal.SIGTERM)
    status, output = outcome(process)
    assert status == 0, output
    assert 'the same command continues' in output
    (checkpoint,) = (workdir / 'checkpoints').iterdir()
    assert int(checkpoint.name) == records(workdir)[-1]['step']


@pytest.mark.slow
def test_end_of_a_run(start, tmp_path):
    workdir = tmp_path / 'run'
    status, output = outcome(start(workdir, '--config.training.steps=4'))
    assert status == 0, output
    for name in ('loss.png', 'gates.png', 'metrics.jsonl', 'result.json', 'checkpoints/4'):
        assert (workdir / name).exists()
        assert str(workdir / name) in output
    result = json.loads((workdir / 'result.json').read_text())
    assert {'config', 'command', 'versions', 'device', 'git_revision', 'seeds'} <= set(result)
    assert '--config.training.steps=4' in result['command']
    assert set(result['figures']['baselines']) == {'unigram', 'bigram'}
    assert result['figures']['held_out']['perplexity'] > 1
    assert 'bigram' in output
    assert 'paragraph' in output

    status, output = outcome(start(workdir, '--config.model.hidden_size=64'))
    assert status != 0
    assert 'model.hidden_size: 32 -> 64' in output


@pytest.mark.slow
def test_dry_run_describes_and_leaves_nothing(start, tmp_path):
    status, output = outcome(start(tmp_path / 'run', '--dry_run'))
    assert status == 0, output
    for part in ('Parameters:', 'attention/0_stochastic', 'Memory per device', 'state/params'):
        assert part in output
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_mistyped_override_names_the_nearest_field(start, tmp_path):
    status, output = outcome(start(tmp_path / 'run', '--config.training.stpes=3'))
    assert status != 0
    assert '--config.training.stpes=3 names no field' in output
    assert '"steps"' in output
    assert 'Traceback' not in output
