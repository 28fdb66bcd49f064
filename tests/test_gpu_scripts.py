"""The scripts for a machine with a GPU, with a stand-in for the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / 'scripts'
INTERPRETER = """#!/usr/bin/env bash
case "$*" in
  *"import sys, jax"*) echo 'some warning'; echo 'NVIDIA Test'; exit {no_gpu} ;;
  *"import torch"*) exit 0 ;;
esac
echo "$2 $3" >> {calls}
case "$*" in
  *kernel_check*) echo '3 of 56 cases are wrong.'; exit 1 ;;
  *experiments.compare*--report_only) echo 'a table' ;;
  *experiments.compare*) trap 'kill $!; exit' TERM; sleep {training} & wait ;;
  *launches*) [[ $(grep -c tune_kernel {calls}) -ge 3 ]] || kill -ABRT $$ ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    def run(script, *, no_gpu=0, training=0, **environment):
        python = tmp_path / 'python'
        python.write_text(
            INTERPRETER.format(
                no_gpu=no_gpu,
                training=training,
                calls=tmp_path / 'calls',
            )
        )
        python.chmod(0o755)
        return subprocess.run(
            [SCRIPTS / script, str(tmp_path / 'out')],
            env=os.environ | {'PYTHON': str(python)} | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_failed_part_keeps_no_other_from_running(start, tmp_path):
    done = start('gpu_check.sh')
    assert done.returncode == 1
    calls = [line.split('/')[-1] for line in (tmp_path / 'calls').read_text().splitlines()]
    sweeps = ['speed_64', 'speed_128', 'flex_64', 'flex_128']
    # What crashes is begun again.
    assert calls == ['numbers', *sweeps, 'launches', 'launches', 'launches']
    summary = (tmp_path / 'out' / 'summary.txt').read_text()
    assert 'Checked on NVIDIA Test:' in summary
    assert 'numbers: failed with exit code 1, see' in summary
    assert 'speed_64: done, ' in summary
    assert 'launches: done, ' in summary
    assert summary in done.stdout
    assert '3 of 56 cases are wrong.' in (tmp_path / 'out' / 'numbers.log').read_text()


@pytest.mark.parametrize('script', ['gpu_check.sh', 'gpu_table1.sh'])
def test_without_a_gpu_nothing_runs(start, tmp_path, script):
    done = start(script, no_gpu=1)
    assert done.returncode == 1
    assert done.stderr.startswith('No GPU for JAX here, nothing is ')
    assert done.stderr.endswith(': NVIDIA Test\n')
    assert not (tmp_path / 'out').exists()


def test_this_machines_interpreter_is_asked(tmp_path):
    environment = os.environ | {'PYTHON': sys.executable, 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(
        [SCRIPTS / 'gpu_check.sh', str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, '')
    assert done.stderr.strip() == 'No GPU for JAX here, nothing is checked: cpu'


def test_variants_are_trained_while_the_time_lasts(start, tmp_path):
    done = start('gpu_table1.sh')
    assert done.returncode == 0
    assert done.stdout.splitlines()[:2] == ['On NVIDIA Test:', 'a table']
    assert done.stdout.splitlines()[-1].startswith('Done in ')

    done = start('gpu_table1.sh', training=60, SECONDS_IN_ALL='32')
    assert done.returncode == 0
    assert 'The time is up; repeat the command to continue.' in done.stdout
