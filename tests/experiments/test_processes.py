"""One run on several processes: equal losses, checkpoints for any number of them, and no hang."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sa_jax.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {'PYTHON': sys.executable}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('processes')
    draw = random.Random(0)
    for split, count in (('train', 12), ('validation', 4)):
        (folder / 'text' / split).mkdir(parents=True)
        for index in range(count):
            text = ' '.join(draw.choices(('state', 'union', 'war', 'law'), k=draw.randint(30, 90)))
            (folder / 'text' / split / f'{index}.txt').write_text(text)
    return folder


@pytest.fixture
def start(folder):
    """Starts a run of 16 steps on some processes; ends it with the test."""
    started = []

    def run(processes, workdir, *flags):
        command = [
            'scripts/launch_local.sh', str(processes), sys.executable, '-m', 'experiments.pretrain',
            '--config=tests/training/tiny_config.py', f'--workdir={workdir}',
            f'--data_dir={folder / "data"}', f'--config.data.path={folder / "text"}',
            '--config.training.steps=16', *flags,
        ]  # fmt: skip
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_steps(workdir, steps, process):
    while len(read_metrics(workdir / 'metrics.jsonl')) < steps and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None


def losses(workdir):
    return [record['loss'] for record in read_metrics(workdir / 'metrics.jsonl')]


def test_any_number_of_processes_continues_a_run(start, tmp_path):
    alone, shared = tmp_path / 'alone', tmp_path / 'shared'
    output, _ = (process := start(1, alone)).communicate(timeout=300)
    assert process.returncode == 0, output

    # Four copies of the model, then two shards of it, then one process.
    for processes, steps, *mesh in ((4, 3), (2, 9, '--config.mesh.fsdp=2')):
        process = start(processes, shared, *mesh)
        wait_for_steps(shared, steps, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert 'the same command continues' in output
        assert len(losses(shared)) < 16
    output, _ = (process := start(1, shared)).communicate(timeout=300)
    assert process.returncode == 0, output
    assert 'Continuing from' in output
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-5)
    whole, parts = (read_metrics(x / 'metrics.jsonl') for x in (alone, shared))
    assert [set(x) for x in parts] == [set(x) for x in whole]
    assert json.loads((shared / 'result.json').read_text())['device']['processes'] == 1


def test_a_killed_process_ends_the_others(start, tmp_path):
    process = start(2, tmp_path, '--config.training.steps=100000')
    wait_for_steps(tmp_path, 6, process)
    done = subprocess.run(
        ['pgrep', '-s', str(process.pid), '-f', 'process=1'],
        capture_output=True,
        text=True,
        check=True,
    )
    os.kill(int(done.stdout.split()[0]), signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=300)
    assert time.monotonic() - killed < 60
    assert process.returncode != 0
    assert 'Process 1 ended with exit code 137' in output
    assert 'Process 0 ended with exit code' in output
