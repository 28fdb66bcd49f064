"""Reading the texts of parquet files, whose pages are looked at before they are decompressed."""

import mmap
import pathlib
from collections.abc import Iterator
from typing import Any

from sa_jax.extras import optional_import
from sa_jax.untrusted import MAX_LINE, brief

_ROWS = 16  # at a time: many may share a long text in the file, but not in memory
_MAX_RATIO = 100  # of a page's bytes decompressed to those in the file; of text about ten
_MAX_DEPTH = 8


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
            _check_pages(path, file.metadata)
            row = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=['text']):
                for text in batch.column(0).to_pylist():
                    if text and text.strip():
                        yield row, text
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f'{path} is not a whole parquet file: {brief(error)}.') from error


def _check_pages(path: pathlib.Path, metadata: Any) -> None:
    """Checks the sizes that the pages of the texts state: so much memory is taken for each."""
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    column = paths.index('text')
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for group in range(metadata.num_row_groups):
            chunk = metadata.row_group(group).column(column)
            if any(encoding.startswith('DELTA') for encoding in chunk.encodings):
                raise ValueError(
                    f"{path}: column 'text' is encoded as {', '.join(chunk.encodings)}; only PLAIN "
                    'and dictionaries are read. Write the file anew with one of them.'
                )
            # Those who write no dictionary may say that it is at 0.
            starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
            position = min((start for start in starts if start), default=0)
            end = position + chunk.total_compressed_size
            if not 0 <= position <= end <= len(data):
                raise ValueError(f'{path} is damaged: row group {group} lies outside the file.')
            while position < end:
                header = position
                try:
                    fields, position = _read_struct(data, position)
                    size, stored = fields[2], fields[3]
                except (IndexError, KeyError, TypeError) as error:
                    raise ValueError(f'{path} is damaged: no page begins at {header:,}.') from error
                position += stored
                if not (stored >= 0 <= size and position <= end):
                    raise ValueError(f'{path} is damaged: the page at {header:,} is too long.')
                if size > MAX_LINE + _MAX_RATIO * stored:
                    raise ValueError(
                        f'{path} is no text: the page at {header:,} of {stored:,} bytes becomes '
                        f'{size:,} when it is decompressed.'
                    )


def _read_struct(data: mmap.mmap, position: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Reads a struct in Thrift's compact protocol; returns its whole numbers and its end.

    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """
    if depth > _MAX_DEPTH:
        raise IndexError
    fields, number = {}, 0
    while byte := data[position]:
        position += 1
        kind, step = byte & 15, byte >> 4
        if step:
            number += step
        else:
            number, position = _read_integer(data, position)
        match kind:
            case 1 | 2:  # true or false
                pass
            case 3:  # a byte
                position += 1
            case 4 | 5 | 6:
                fields[number], position = _read_integer(data, position)
            case 7:  # a double
                position += 8
            case 8:
                length, position = _read_varint(data, position)
                position += length
            case 12:
                _, position = _read_struct(data, position, depth + 1)
            case _:  # headers of pages have no lists
                raise IndexError
    return fields, position + 1


def _read_varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise IndexError


def _read_integer(data: mmap.mmap, position: int) -> tuple[int, int]:
    value, position = _read_varint(data, position)
    return (value >> 1) ^ -(value & 1), position
