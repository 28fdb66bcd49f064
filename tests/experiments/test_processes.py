"""One run on several processes: equal losses, checkpoints for any number of them, and no hang."""

import json
import os
import signal
import subprocess
import time

import pytest

from sa_jax.training.metrics import TIME_FIELDS, read_metrics
from sa_jax.training.workdir import locked

pytestmark = pytest.mark.slow
STEPS = '--config.training.steps=16'


def wait_for_steps(workdir, steps, process):
    while len(read_metrics(workdir / 'metrics.jsonl')) < steps and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None


def losses(workdir):
    return [record['loss'] for record in read_metrics(workdir / 'metrics.jsonl')]


def test_any_number_of_processes_continues_a_run(start_training, tmp_path):
    alone, shared = tmp_path / 'alone', tmp_path / 'shared'
    output, _ = (process := start_training(alone, STEPS, processes=1)).communicate(timeout=300)
    assert process.returncode == 0, output

    # Four copies of the model, then two shards of it, then one process.
    for processes, steps, *mesh in ((4, 3), (2, 9, '--config.mesh.fsdp=2')):
        process = start_training(shared, STEPS, *mesh, processes=processes)
        wait_for_steps(shared, steps, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert 'the same command continues' in output
        assert len(losses(shared)) < 16
    output, _ = (process := start_training(shared, STEPS, processes=1)).communicate(timeout=300)
    assert process.returncode == 0, output
    assert 'Continuing from' in output
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-5)
    whole, parts = (read_metrics(x / 'metrics.jsonl') for x in (alone, shared))
    fields = [[set(x) - set(TIME_FIELDS) for x in y] for y in (parts, whole)]
    assert fields[0] == fields[1]
    assert json.loads((shared / 'result.json').read_text())['device']['processes'] == 1


def test_a_killed_process_ends_the_others(start_training, tmp_path):
    process = start_training(tmp_path, '--config.training.steps=100000', processes=2)
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


def test_what_one_process_refuses_ends_all(start_training, tmp_path):
    began = time.monotonic()
    with locked(tmp_path):
        output, _ = (process := start_training(tmp_path, processes=2)).communicate(timeout=300)
    assert process.returncode != 0
    assert 'is in use by process' in output
    output, _ = (
        process := start_training(tmp_path, '--config.mesh.tensor=2', processes=2)
    ).communicate(timeout=300)
    assert process.returncode != 0
    assert "'tensor': 2, 'sequence': 1} splits a row, or shares it, between 2 processes" in output
    assert time.monotonic() - began < 120
