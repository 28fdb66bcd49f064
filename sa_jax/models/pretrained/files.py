"""Tensors in safetensors files, read slice by slice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sa_jax.extras import optional_import
from sa_jax.untrusted import brief, read_json

_DTYPES = ('BF16', 'F16', 'F32', 'F64')
_LISTED = 20  # names in a message
_INDEX = 'model.safetensors.index.json'


def listed(names: Sequence[str]) -> str:
    """Names for a message, the first of them if they are many."""
    more = f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''
    return ', '.join(names[:_LISTED]) + more


class SafetensorsFiles:
    """The tensors of a directory, by name.

    Attributes:
      shapes: Of each tensor.
    """

    def __init__(self, directory: Path):
        """Opens the files and reads their headers.

        Args:
          directory: Holds `*.safetensors`, with or without an index.

        Raises:
          ValueError: A file is missing, damaged or outside of the directory, a tensor is in two
            files, or isn't of floating-point numbers.
        """
        safetensors = optional_import('safetensors', 'safetensors files', 'pretrained')
        self._files = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _paths(directory):
            try:
                file = safetensors.safe_open(path, framework='np')
                names = list(file.keys())
            except Exception as error:  # Of the library's own kind.
                raise ValueError(
                    f'{path} is no safetensors file, or is truncated: {brief(error)}. Download it '
                    'again.'
                ) from error
            for name in names:
                if name in self._files:
                    raise ValueError(f'{directory} has the tensor {name!r} in two files.')
                self._files[name] = file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
        self._check_types(directory)

    def _check_types(self, directory):
        types = {name: file.get_slice(name).get_dtype() for name, file in self._files.items()}
        wrong = [f'{name} {dtype}' for name, dtype in types.items() if dtype not in _DTYPES]
        if wrong:
            raise ValueError(
                f'{directory} has tensors of types that are not supported: '
                f'{listed(wrong)}; expected {", ".join(_DTYPES)}.'
            )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice of a tensor, in the file's type; nothing else is read."""
        return self._files[name].get_slice(name)[index]


def _paths(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.exists():
        found = sorted(directory.glob('*.safetensors'))
        if not found:
            raise ValueError(
                f'{directory} holds no *.safetensors. Weights in other formats (pickled *.bin, '
                '*.pth) are never read; download the safetensors, or a GGUF file.'
            )
        return found
    try:
        names = sorted(set(read_json(index)['weight_map'].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{index} is no index of safetensors files: {brief(repr(error))}.'
        ) from error
    if outside:
        raise ValueError(f'{index} names files outside of its directory: {listed(outside)}.')
    missing = [name for name in names if not os.path.exists(directory / name)]  # of any length
    if missing:
        raise ValueError(f'{directory} lacks {listed(missing)}, which {_INDEX} names.')
    return [directory / name for name in names]
