"""A workdir belongs to one process."""

import os
import subprocess
import sys

import pytest

from sa_jax.training.workdir import locked


def test_a_second_trainer_is_refused_until_the_first_ends(tmp_path):
    with locked(tmp_path):
        words = f'is in use by process {os.getpid()} on .*: stop it, wait for it, or choose another'
        with pytest.raises(ValueError, match=words), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    program = (
        'import os, pathlib, signal; from sa_jax.training.workdir import locked; '
        f'manager = locked(pathlib.Path({str(tmp_path)!r})); manager.__enter__(); '
        'os.kill(os.getpid(), signal.SIGKILL)'
    )
    done = subprocess.run([sys.executable, '-c', program], check=False)
    assert done.returncode == -9
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'file').write_text('')
    with (
        pytest.raises(ValueError, match='file/run cannot be written: Not a directory'),
        locked(tmp_path / 'file' / 'run'),
    ):
        pass
