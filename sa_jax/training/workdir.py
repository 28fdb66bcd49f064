"""The folder of a run: whose it is, and that only one process writes to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from sa_jax.training.configuration import differences, to_json
from sa_jax.training.files import write_atomically
from sa_jax.untrusted import brief, damage_reported, read_json


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Keeps other trainers out of a workdir, for as long as the context or the process lives.

    Of several processes of one run the first holds the lock.

    Raises:
      ValueError: another process has it, or the folder can't be written.
    """
    if jax.process_index() != 0:
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / 'lock').open('a+')
    except OSError as error:
        raise ValueError(
            f'{workdir} cannot be written: {error.strerror}. Choose another --workdir.'
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or 'another process'
            raise ValueError(
                f'{workdir} is in use by {owner}: stop it, wait for it, or choose another '
                '--workdir.'
            ) from None
        file.truncate(0)
        file.write(f'process {os.getpid()} on {platform.node()}\n')
        file.flush()
        yield


def keep_compiled(workdir: Path) -> None:
    """Keeps compiled programs in `compiled`, so that a run that continues needn't wait for them.

    Where JAX's own variable JAX_COMPILATION_CACHE_DIR names a folder, they are kept there.
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update('jax_compilation_cache_dir', str((workdir / 'compiled').resolve()))


class DiskFullError(OSError):
    """There is no space left where a run is kept."""


@contextlib.contextmanager
def full_disk_reported(workdir: Path) -> Iterator[None]:
    """Turns the many errors that a full disk leads to into one.

    Raises:
      DiskFullError: the disk is full; what was complete before still is.
    """
    try:
        yield
    except Exception as error:
        full = os.strerror(errno.ENOSPC)
        # Orbax' and TensorStore's are ValueErrors with the system's words in them.
        if getattr(error, 'errno', None) != errno.ENOSPC and full not in str(error):
            raise
        raise DiskFullError(
            f'{workdir}: {full.lower()}. Every complete checkpoint is as it was: free some space '
            'and repeat the command, which continues from the last one.'
        ) from error


def check_workdir(workdir: Path, config: ConfigDict) -> None:
    """Checks that no other run lives in a workdir.

    Raises:
      ValueError: if the workdir's configuration is another run's; the message names the
        differing fields.
    """
    path = workdir / 'config.json'
    if not path.exists():
        return
    with damage_reported(path):
        changed = differences(read_json(path), to_json(config))
    if changed:
        raise ValueError(
            f'{workdir} holds a run with another configuration:\n  '
            + brief('\n  '.join(changed))
            + '\nGive the same configuration to continue it, or choose another --workdir.'
        )


def claim_workdir(workdir: Path, config: ConfigDict) -> None:
    """Writes a run's configuration to its workdir, unless another run lives there.

    Raises:
      ValueError: as `check_workdir`.
    """
    check_workdir(workdir, config)
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(workdir / 'config.json', json.dumps(to_json(config), indent=2) + '\n')
