"""Files from elsewhere: read within bounds, with one kind of error for whatever is in them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What reading content of another form than expected leads to.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MAX_LINE = 1 << 26  # bytes; no document comes near
_MAX_JSON = 1 << 25  # bytes; the largest published index has a quarter of it
_MAX_MESSAGE = 4_000  # characters


@contextlib.contextmanager
def damage_reported(path: str | os.PathLike, *kinds: type[Exception]) -> Iterator[None]:
    """Turns the errors of a damaged file into a `ValueError` that names it and isn't too long.

    Args:
      path: of the file or folder.
      kinds: further errors that mean damage here.

    Raises:
      ValueError: the file is damaged.
    """
    try:
        yield
    except BaseException as error:
        # Libraries in Rust panic with something that is no Exception.
        panics = type(error).__name__ == 'PanicException'
        overflows = isinstance(error, OSError) and error.errno == errno.EOVERFLOW  # of a time
        if not (panics or overflows or isinstance(error, (*_DAMAGE, *kinds))):
            raise
        text = str(error)
        is_clear = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
        if is_clear and str(path) in text and len(text) < _MAX_MESSAGE:
            raise
        if not is_clear:
            text = (
                f'it is damaged or of another kind than expected ({type(error).__name__}: {text})'
            )
        raise ValueError(f'{path}: {brief(text)}') from error


def brief(text: object) -> str:
    """A text for a message: content of files in it may be long."""
    text = str(text)
    cut = len(text) - _MAX_MESSAGE
    return text if cut <= 0 else f'{text[:_MAX_MESSAGE]} … and {cut:,} more characters'


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
      ValueError: it is too large, no JSON, nested too deeply, or holds something else.
      FileNotFoundError: there is none.
    """
    with path.open('rb') as file:
        data = file.read(_MAX_JSON + 1)
    if len(data) > _MAX_JSON:
        raise ValueError(f'{path} is larger than the {_MAX_JSON:,} bytes that are read of JSON.')
    try:
        value = json.loads(data.decode('utf-8'))
    except (RecursionError, ValueError) as error:
        raise ValueError(f'{path} is no JSON, or is damaged: {error}.') from error
    if not isinstance(value, dict):
        raise ValueError(f'{path} holds {type(value).__name__}; expected an object of fields.')
    return value
