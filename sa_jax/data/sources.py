"""Reading source files: finding them, recognising their split, and their documents.

The readers of files with many documents yield pairs of position and text, skip documents without
text, and raise `ValueError` with the file's name, and the line's number, where a file is damaged.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from sa_jax.extras import optional_import
from sa_jax.untrusted import MAX_LINE

SPLITS = ('train', 'validation', 'test')

_ALIASES = {'val': 'validation', 'valid': 'validation', 'dev': 'validation'}
_SPLIT_NAME = re.compile(r'(train|validation|valid|val|dev|test)(?![a-z])', re.IGNORECASE)
_CHUNK_BYTES = 1 << 20
# A block of zstd's may become 2**15 times as large when it is decompressed, text ten times.
_ZSTD_BYTES = 1 << 8  # of the file at a time
_MAX_RATIO = 1_000


def find_files(root: pathlib.Path, suffixes: Sequence[str]) -> list[pathlib.Path]:
    """Returns the files below `root` whose names end in one of `suffixes`, sorted by path.

    Hidden files and folders are passed over.

    Raises:
      ValueError: if `root` does not exist or holds no such file.
    """
    if not root.exists():
        raise ValueError(f'data.path={str(root)!r} does not exist.')
    if root.is_file():
        raise ValueError(
            f'data.path={str(root)!r} is a file; expected the folder that holds the files.'
        )
    files = sorted(
        path
        for path in root.rglob('*')
        if path.name.endswith(tuple(suffixes))
        and path.is_file()
        and not any(part.startswith('.') for part in path.relative_to(root).parts)
    )
    if not files:
        raise ValueError(f'data.path={str(root)!r} holds no {" or ".join(suffixes)} file.')
    return files


def split_of(relative_path: pathlib.Path) -> str | None:
    """Returns the split that a file's folders or its own name begin with, the outermost first.

    `train/part-3.jsonl`, `data/train-00001.parquet` and `train.txt` are training files; `valid`,
    `val` and `dev` mean `validation`. None if nothing names a split.
    """
    for part in relative_path.parts:
        if match := _SPLIT_NAME.match(part):
            name = match[1].lower()
            return _ALIASES.get(name, name)
    return None


def fingerprint_files(root: pathlib.Path, files: Mapping[str, Sequence[pathlib.Path]]) -> str:
    """Hashes the list of files: split, path below `root`, size and time of modification.

    It names the cached dataset, so that a changed source is never answered with a stale copy.
    """
    digest = hashlib.sha256()
    for split, paths in files.items():
        for path in paths:
            stat = path.stat()
            entry = (split, path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns)
            digest.update(json.dumps(entry).encode())
    return digest.hexdigest()[:16]


def read_text(path: pathlib.Path) -> str:
    """Reads a UTF-8 file, with any kind of line end."""
    try:
        return path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not UTF-8 text: {error}.') from error


def read_jsonl(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields line number and field `text` of a .jsonl or .jsonl.zst file."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (RecursionError, ValueError) as error:
            raise ValueError(f'{path}:{number}: not a line of JSON: {error}.') from error
        text = record.get('text') if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number}: expected an object with a string field 'text'.")
        if text.strip():
            # JSON can spell halves of surrogate pairs, which UTF-8 cannot.
            yield number, text.encode(errors='replace').decode()


def _chunks(path: pathlib.Path) -> Iterator[bytes]:
    """Yields a file's bytes, decompressed if its name ends in .zst."""
    with path.open('rb') as file:
        if path.suffix != '.zst':
            yield from iter(lambda: file.read(_CHUNK_BYTES), b'')
            return
        zstandard = optional_import('zstandard', '.zst files', 'corpora')
        frame, size = zstandard.ZstdDecompressor().decompressobj(), 0
        try:
            for data in iter(lambda: file.read(_ZSTD_BYTES), b''):
                # One file may hold several frames, each with a decompressor of its own.
                while data:
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
                    chunk = frame.decompress(data)
                    size += len(chunk)
                    if size > _MAX_RATIO * file.tell() + MAX_LINE:
                        raise ValueError(
                            f'{path} is no text: it becomes more than {_MAX_RATIO:,} times as '
                            'large when it is decompressed.'
                        )
                    yield chunk
                    data = frame.unused_data
        except zstandard.ZstdError as error:
            raise ValueError(f'{path} is not a zstd file: {error}.') from error
        if not frame.eof:
            raise ValueError(f'{path} is truncated: its last zstd frame has no end.')


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    rest = bytearray()
    for chunk in _chunks(path):
        first, *others = chunk.split(b'\n')
        rest += first
        if len(rest) > MAX_LINE:
            raise ValueError(f'{path} has a line of more than {MAX_LINE:,} bytes.')
        if others:
            yield bytes(rest)
            *lines, last = others
            yield from lines
            rest = bytearray(last)
    if rest:
        yield bytes(rest)
