"""The header of a GGUF file: metadata, and where its tensors are.

A file may come from anywhere. Every length and count is held against the file and a fixed limit
before anything is allocated for it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from typing import Any

import numpy as np

_MAGIC = b'GGUF'
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Far more than published files have: vocabularies have 0.3 million entries.
_MAX_COUNT = 1 << 22
_MAX_STRING = 1 << 26  # bytes
_MAX_HEADER = 1 << 26  # bytes; in memory they become up to ten times as many
_MAX_RANK = 4

# By the number that stands for them in the file.
_NUMBERS = {
    0: np.dtype('<u1'),
    1: np.dtype('<i1'),
    2: np.dtype('<u2'),
    3: np.dtype('<i2'),
    4: np.dtype('<u4'),
    5: np.dtype('<i4'),
    6: np.dtype('<f4'),
    7: np.dtype('?'),
    10: np.dtype('<u8'),
    11: np.dtype('<i8'),
    12: np.dtype('<f8'),
}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What the header says of a tensor.

    Attributes:
      shape: As numpy has it, the contiguous axis last.
      kind: The number of its type.
      offset: Of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
      metadata: Numbers, strings, and lists of either, by key.
      tensors: By name.
      data: The whole file, mapped into memory and read-only, as bytes.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: np.memmap


def read_header(path: str | os.PathLike) -> Header:
    """Reads the header of a GGUF file; the tensors themselves stay on the disk.

    Raises:
      ValueError: It is no GGUF file, of an unsupported version or big-endian, ends within its
        header, or the header contradicts itself.
    """
    if os.path.getsize(path) < 24 or _first_bytes(path) != _MAGIC:
        raise ValueError(f'{path} is no GGUF file: it does not begin as one.')
    data = np.memmap(path, mode='r')
    reader = _Reader(path, data)
    version = reader.number('<I')
    if version not in _VERSIONS:
        if version & 0xFFFF == 0:
            raise ValueError(f'{path} is a big-endian GGUF file; only little-endian is supported.')
        raise ValueError(
            f'{path} is a GGUF file of version {version}; supported are {_VERSIONS}. Convert the '
            'model again with a current llama.cpp.'
        )
    tensor_count, key_count = reader.count('tensors'), reader.count('keys')
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in metadata:
            raise ValueError(f'{path} has the key {key!r} twice.')
        metadata[key] = reader.value(key)
    infos: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in infos:
            raise ValueError(f'{path} has the tensor {name!r} twice.')
        infos[name] = reader.tensor_info(name)
    alignment = metadata.get('general.alignment', _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f'{path} has general.alignment = {alignment!r}; expected a power of two.')
    start = -(-reader.position // alignment) * alignment
    tensors = {
        name: dataclasses.replace(info, offset=start + info.offset) for name, info in infos.items()
    }
    return Header(metadata, tensors, data)


def _first_bytes(path):
    with open(path, 'rb') as file:
        return file.read(len(_MAGIC))


class _Reader:
    """Reads from the position after the magic bytes onwards."""

    def __init__(self, path, data):
        self._path = path
        self._data = memoryview(data)
        self.position = len(_MAGIC)

    def _take(self, size):
        start, self.position = self.position, self.position + size
        if self.position > _MAX_HEADER:
            raise ValueError(
                f'{self._path} has a header of more than {_MAX_HEADER:,} bytes; expected metadata '
                'of a model.'
            )
        if self.position > len(self._data):
            raise ValueError(
                f'{self._path} is truncated or damaged: its header goes on beyond the end of the '
                'file. Download it again.'
            )
        return self._data[start : self.position]

    def number(self, form):
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def count(self, of):
        count = self.number('<Q')
        # Each takes eight bytes at least.
        if count > min(_MAX_COUNT, len(self._data) // 8):
            raise ValueError(f'{self._path} is damaged: it claims to hold {count} {of}.')
        return count

    def string(self):
        size = self.number('<Q')
        if size > _MAX_STRING:
            raise ValueError(f'{self._path} is damaged: it claims a name of {size} bytes.')
        try:
            return str(self._take(size), 'utf-8')
        except UnicodeDecodeError as error:
            raise ValueError(
                f'{self._path} is damaged: its header is no UTF-8: {error}.'
            ) from error

    def value(self, key):
        kind = self.number('<I')
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        if kind != _ARRAY:
            raise ValueError(f'{self._path} has the key {key!r} of an unknown type, {kind}.')
        kind, size = self.number('<I'), self.number('<Q')
        if size > _MAX_COUNT:
            raise ValueError(f'{self._path} is damaged: {key!r} claims to have {size} entries.')
        if kind == _STRING:
            return [self.string() for _ in range(size)]
        if kind in _NUMBERS:
            return self._numbers(kind, size)
        raise ValueError(f'{self._path} has the key {key!r} with entries of an unsupported type.')

    def _numbers(self, kind, size):
        dtype = _NUMBERS[kind]
        return np.frombuffer(self._take(size * dtype.itemsize), dtype).tolist()

    def tensor_info(self, name):
        rank = self.number('<I')
        if not 1 <= rank <= _MAX_RANK:
            raise ValueError(
                f'{self._path} is damaged: the tensor {name!r} has {rank} axes; expected 1 to '
                f'{_MAX_RANK}.'
            )
        shape = struct.unpack(f'<{rank}Q', self._take(8 * rank))[::-1]
        if not 0 < math.prod(shape) < 1 << 60:
            raise ValueError(f'{self._path} is damaged: the tensor {name!r} has the shape {shape}.')
        return TensorInfo(shape, self.number('<I'), self.number('<Q'))
