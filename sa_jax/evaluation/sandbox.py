"""Running programs that a model wrote.

Each runs in a process of its own, in an empty folder and with a minimal environment, without
network, without further processes, and with limits on time, memory and the size of a file: enough
for what models write by mistake. It reads and writes other files as its user may, and may fill the
disk, so hostile programs belong into a virtual machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from sa_jax.evaluation import confinement

_SECONDS = 10.0
_MEMORY_BYTES = 1 << 30

Outcome = Literal['passed', 'failed', 'timed out']


def run_programs(
    programs: Sequence[str],
    *,
    confirm_run_unsafe_code: bool,
    seconds: float = _SECONDS,
    memory_bytes: int = _MEMORY_BYTES,
) -> list[Outcome]:
    """Runs Python programs, several at a time.

    Args:
      programs: Their sources.
      confirm_run_unsafe_code: That they may be run on this machine.
      seconds: The time that each may take.
      memory_bytes: The address space of each.

    Returns:
      For each program whether it ran to its end ('passed'), stopped before ('failed': an error, an
      early exit, a limit, a signal), or took too long.

    Raises:
      ValueError: Running them isn't confirmed.
      RuntimeError: Programs can't be confined here.
    """
    check_can_run(confirm_run_unsafe_code)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda program: _run(program, seconds, memory_bytes), programs))


def check_can_run(confirm_run_unsafe_code: bool) -> None:
    """Finds out whether programs may be run, before hours are spent on writing them.

    Raises:
      ValueError: Running them isn't confirmed.
      RuntimeError: Programs can't be confined here.
    """
    if not confirm_run_unsafe_code:
        raise ValueError(
            'This task runs programs that the model writes. They are confined (no network, no '
            'further processes, limits on time and memory) but can read and write the files of '
            'this user and fill the disk; set confirm_run_unsafe_code to run them, or leave the '
            'task out.'
        )
    if sys.platform != 'linux':
        raise RuntimeError(
            f'Programs can only be confined on Linux, and this is {sys.platform}; leave the task '
            'out, or run it in a Linux container.'
        )
    if _run('pass', _SECONDS, _MEMORY_BYTES) != 'passed':
        raise RuntimeError(
            f'A program that does nothing fails under {sys.executable}; leave the task out.'
        )


def _run(program: str, seconds: float, memory_bytes: int) -> Outcome:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        # Exit codes can be had in other ways than by reaching the end.
        finished, word = folder / 'finished', secrets.token_hex()
        source = f'{program}\n\nopen({str(finished)!r}, "w").write({word!r})\n'
        path = folder / 'program.py'
        path.write_text(source, encoding='utf-8', errors='surrogatepass')
        limits = [str(math.ceil(seconds)), str(memory_bytes)]
        process = subprocess.Popen(
            [sys.executable, '-I', confinement.__file__, *limits, str(path)],
            cwd=folder,
            env={'PATH': os.defpath, 'HOME': name, 'TMPDIR': name, 'OPENBLAS_NUM_THREADS': '1'},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            # Only the confinement itself writes to it.
            complaint = process.communicate(timeout=seconds)[1].decode()
        except subprocess.TimeoutExpired:
            return 'timed out'
        finally:
            _end(process)
        if complaint:
            raise RuntimeError(complaint.strip())
        # SIGXCPU comes when the CPU time is used up.
        if process.returncode == -signal.SIGXCPU:
            return 'timed out'
        return 'passed' if _read(finished) == word else 'failed'


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text(encoding='utf-8') if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None
