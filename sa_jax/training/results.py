"""Result files: what was run, with what, on what, and what came out."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import jax

from sa_jax.training.files import write_atomically

_PACKAGES = (
    'jax',
    'jaxlib',
    'flax',
    'optax',
    'orbax-checkpoint',
    'grain',
    'numpy',
    'scipy',
    'tokenizers',
    'torch',
    'transformers',
    'tokamax',
)
# Of the environment, what changes speed.
_TUNING_VARIABLES = ('GLIBC_TUNABLES', 'OMP_NUM_THREADS', 'OMP_WAIT_POLICY', 'XLA_FLAGS')


def write_result(path: Path, *, config: dict, figures: dict, seeds: dict) -> None:
    """Writes a result file.

    Args:
      path: the JSON file.
      config: the configuration, JSON.
      figures: what was measured, each with its spread where it has one.
      seeds: the seeds that decide the figures, by what they seed.
    """
    result = {
        'config': config,
        'command': shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        'finished': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        'versions': versions(),
        'device': describe_device(),
        'git_revision': git_revision(),
        'seeds': seeds,
        'figures': figures,
    }
    write_atomically(path, json.dumps(result, indent=2) + '\n')


def git_revision() -> str | None:
    """Returns the revision of the code, marked if the tree has changes; None outside of git."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        folder = Path(__file__).parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def describe_device() -> dict[str, str | int | dict[str, str]]:
    """Returns the kind, platform and number of devices, the host and its tuning variables."""
    device = jax.devices()[0]
    return {
        'kind': device.device_kind,
        'platform': device.platform,
        'count': jax.device_count(),
        'processes': jax.process_count(),
        'host': f'{platform.machine()}, {os.cpu_count()} CPUs',
        'environment': {x: os.environ[x] for x in _TUNING_VARIABLES if os.environ.get(x)},
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide a result, if installed."""
    found = {'python': platform.python_version()}
    for package in (*_PACKAGES, 'sa_jax'):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
