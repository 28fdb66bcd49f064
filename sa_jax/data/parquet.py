"""Reading the texts of parquet files, whose pages are looked at before they are decompressed."""

import mmap
import pathlib
from collections.abc import Iterator
from typing import Any

from sa_jax.extras import optional_import
from sa_jax.untrusted import MAX_LINE, brief, damage_reported

_ROWS = 16  # at a time: many may share a long text in the file, but not in memory
_MAX_RATIO = 100  # of a page's bytes decompressed to those in the file; of text about ten
_MAX_DEPTH = 16
# Types of Thrift.
_I32, _I64, _LIST, _STRUCT = 5, 6, 9, 12
# Encodings that are decoded into as much memory as they state, wherever they state it.
_REFUSED = {6: 'DELTA_LENGTH_BYTE_ARRAY', 7: 'DELTA_BYTE_ARRAY'}


def read_parquet(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields row number and column `text` of a parquet file, but for rows without text.

    Raises:
      ValueError: the file is damaged, has no such column, or has a page that becomes too large
        when it is decompressed.
    """
    pyarrow = optional_import('pyarrow', 'parquet files', 'corpora')
    parquet = optional_import('pyarrow.parquet', 'parquet files', 'corpora')
    try:
        schema = parquet.read_schema(path)
        if 'text' not in schema.names:
            raise ValueError(f"{path} has no column 'text'; it has {brief(schema.names)}.")
        kind = schema.field('text').type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"{path}: expected a column 'text' of strings, not {brief(kind)}.")
        with parquet.ParquetFile(path) as file:
            leaves = [file.schema.column(i).path for i in range(len(file.schema))]
            with damage_reported(path):
                _check_pages(path, leaves.index('text'))
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=['text']):
                for text in batch.column(0).to_pylist():
                    if text and text.strip():
                        yield row, text
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f'{path} is not a whole parquet file: {brief(error)}.') from error


def _check_pages(path: pathlib.Path, column: int) -> None:
    """Checks the sizes that the pages of the texts state: so much memory is taken for each.

    pyarrow's own view of chunks ends the process where their metadata are damaged.
    """
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], 'little')
        for group in _Thrift(data, footer).struct()[4, _LIST]:
            chunk = group[1, _LIST][column][3, _STRUCT]
            # Those who write no dictionary may say that it is at 0.
            starts = (chunk.get((11, _I64), 0), chunk[9, _I64])
            position = min((start for start in starts if start > 0), default=0)
            end = position + chunk[7, _I64]
            if not position <= end <= len(data):
                raise ValueError(f'{path} is damaged: its texts lie outside the file.')
            while position < end:
                page = _Thrift(data, position)
                header = page.struct()
                size, stored = header[2, _I32], header[3, _I32]
                if not (stored >= 0 <= size and page.position + stored <= end):
                    raise ValueError(f'{path} is damaged: the page at {position:,} is too long.')
                for kind, number in ((5, 2), (8, 4)):  # pages of data, versions 1 and 2
                    encoding = header.get((kind, _STRUCT), {}).get((number, _I32))
                    if encoding in _REFUSED:
                        raise ValueError(
                            f"{path}: column 'text' is encoded as {_REFUSED[encoding]}; only PLAIN "
                            'and dictionaries are read. Write the file anew with one of them.'
                        )
                if size > MAX_LINE + _MAX_RATIO * stored:
                    raise ValueError(
                        f'{path} is no text: the page at {position:,} of {stored:,} bytes becomes '
                        f'{size:,} when it is decompressed.'
                    )
                position = page.position + stored


class _Thrift:
    """Reads parquet's metadata from a position of a file onwards.

    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
    https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
    """

    def __init__(self, data: mmap.mmap, position: int):
        self._data = data
        self.position = position

    def struct(self, depth: int = 0) -> dict[tuple[int, int], Any]:
        """Returns the fields by number and type: readers skip those of another than expected."""
        fields, number = {}, 0
        while byte := self._byte():
            kind, step = byte & 15, byte >> 4
            number = number + step if step else self._integer()
            fields[number, kind] = kind == 1 if kind in (1, 2) else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise IndexError('nested too deeply')
        match kind:
            case 1 | 2 | 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._integer()
            case 7:  # a double, of which nothing is needed
                self.position += 7
                return self._byte()
            case 8:
                end = self._varint() + self.position
                start, self.position = self.position, end
                return self._data[start:end]
            case 9 | 10:
                byte = self._byte()
                size = self._varint() if byte >> 4 == 15 else byte >> 4
                return [self._value(byte & 15, depth + 1) for _ in range(size)]
            case 12:
                return self.struct(depth + 1)
        raise IndexError(f'unknown type {kind}')

    def _byte(self) -> int:
        self.position += 1
        return self._data[self.position - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) >= 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise IndexError('a number of more than 64 bits')
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
