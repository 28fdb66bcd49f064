"""What a checkpoint's files are: their sizes and SHA-256 sums, so that damage is found.

Those in its subfolders, one for each item. Orbax's notes beside them change once more when it names
the checkpoint, and nothing is read from them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sa_jax.training.files import write_atomically
from sa_jax.untrusted import brief, read_json

NAME = 'manifest.json'


def write_manifest(folder: Path) -> None:
    """Writes the sizes and sums of the files in a folder's subfolders into it."""
    files = {
        path.relative_to(folder).as_posix(): {'bytes': path.stat().st_size, 'sha256': _sum(path)}
        for path in sorted(folder.glob('*/**/*'))
        if path.is_file()
    }
    write_atomically(folder / NAME, json.dumps(files, indent=1) + '\n')


def find_damage(folder: Path) -> str | None:
    """Compares a folder with its manifest.

    Returns:
      What is wrong with the first file that differs; None if nothing is.
    """
    manifest = folder / NAME
    try:
        files = read_json(manifest)
        for name, expected in files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                return f'{NAME} names {name!r}, which is elsewhere'
            if not path.is_file():
                return f'{name} is missing'
            if path.stat().st_size != expected['bytes']:
                return f'{name} has {path.stat().st_size:,} bytes instead of {expected["bytes"]:,}'
            if _sum(path) != expected['sha256']:
                return f'{name} has other content than was written'
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        return f'{manifest} or what it names is unreadable: {brief(error)}'
    return None


def _sum(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()
