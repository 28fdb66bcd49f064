"""Corpora: documents by split, built once as ArrayRecord and read at random."""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

import tensorflow_datasets as tfds
from absl import logging

from sa_jax.data import plain_text, slimpajama, sotu, sources
from sa_jax.data.builder import checksum

_BUILDERS = {
    builder.name: builder for builder in (sotu.Sotu, slimpajama.SlimPajama, plain_text.PlainText)
}


class Documents:
    """Random access to the documents of a split.

    An item is `{'text': str, 'id': str}`. The `repr` depends on the content alone, never on where
    it is stored, so that a saved iterator recognises its source.
    """

    def __init__(self, records: Any, *, description: str, directory: pathlib.Path):
        self._records = records
        self._description = description
        self._directory = directory

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: SupportsIndex) -> dict[str, str]:
        index = index.__index__()
        if not 0 <= index < len(self):  # Also what ends a plain for loop.
            raise IndexError(f'Document {index} of {len(self)} in {self}.')
        try:
            record = self._records[index]
        except (IndexError, RuntimeError, ValueError) as error:
            raise _damaged(self._directory, error) from error
        if record['crc32'] != checksum(index, record['id'], record['text']):
            raise _damaged(self._directory, f'document {index} is not what was written')
        return {'text': record['text'].decode(), 'id': record['id'].decode()}

    def __repr__(self) -> str:
        return f'Documents({self._description})'


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus, split into documents for training, validation and perhaps testing.

    Attributes:
      name: the kind of corpus, as in the configuration.
      fingerprint: a hash of all documents, the same wherever the corpus is built.
      directory: the folder of the ArrayRecord files.
      splits: split -> documents.
      text_bytes: split -> number of bytes of its text in UTF-8.
    """

    name: str
    fingerprint: str
    directory: pathlib.Path
    splits: Mapping[str, Documents]
    text_bytes: Mapping[str, int]

    def documents(self, split: str) -> Documents:
        """Returns the documents of a split.

        Raises:
          ValueError: if the corpus has no such split.
        """
        if split not in self.splits:
            raise ValueError(
                f'Corpus {self.name!r} has no split {split!r}; it has {", ".join(self.splits)}.'
            )
        return self.splits[split]


def load_corpus(config: Mapping[str, Any], data_dir: str | pathlib.Path) -> Corpus:
    """Returns a corpus, building it first if its source files are new or have changed.

    Args:
      config: the section `data` of a configuration: `corpus`, one of 'sotu', 'slimpajama' and
        'text', and `path`, the folder of the source files (none for 'sotu').
      data_dir: where built corpora are kept.

    Raises:
      ValueError: if the kind is unknown, source files are missing or damaged, a split is empty, or
        the built dataset is damaged.
    """
    name = config['corpus']
    if name not in _BUILDERS:
        raise ValueError(did_you_mean('data.corpus', name, _BUILDERS))
    builder_class = _BUILDERS[name]
    root, files = builder_class.find(config.get('path'))
    fingerprint = sources.fingerprint_files(root, files)
    directory = pathlib.Path(data_dir).expanduser().absolute() / f'{name}-{fingerprint}'

    def create_builder():
        try:
            return builder_class(root=root, files=files, data_dir=str(directory))
        except Exception as error:  # Whatever TFDS makes of damaged metadata.
            raise _damaged(directory, error) from error

    _build(create_builder())
    # Opened afresh, as by a later run: another process may have been the one to build it.
    return _open(create_builder(), directory)


def did_you_mean(field: str, value: Any, known: Iterable[str]) -> str:
    """Returns the message for an unknown name: the known ones, and the nearest."""
    known = list(known)
    nearest = difflib.get_close_matches(str(value), known, n=1)
    hint = f' Did you mean {nearest[0]!r}?' if nearest else ''
    return f'Unknown {field}={value!r}; expected one of {", ".join(known)}.{hint}'


def _build(builder: tfds.core.DatasetBuilder) -> None:
    """Builds the dataset unless its folder is there.

    TFDS writes into a temporary folder and renames it at the end.
    """
    if builder.data_path.exists():
        return
    logging.info('Building the corpus %s in %s.', builder.name, builder.data_path)
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        # TFDS prints of downloads, of which there are none.
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    except OSError:
        # The renaming fails if another process was quicker: then its dataset is the one to use.
        if not builder.data_path.exists():
            raise


def _open(builder: tfds.core.DatasetBuilder, directory: pathlib.Path) -> Corpus:
    digest = hashlib.sha256()
    splits, text_bytes = {}, {}
    try:
        for split, info in builder.info.splits.items():
            metadata = builder.info.metadata[split]
            records = builder.as_data_source(split=split)
            description = f'{builder.name}, {split}, {metadata["sha256"][:16]}'
            documents = Documents(records, description=description, directory=directory)
            # A file's index is at its end: one record of each tells that all of them are whole.
            for start in itertools.accumulate([0, *info.shard_lengths[:-1]]):
                documents[start]
            splits[split] = documents
            text_bytes[split] = metadata['text_bytes']
            digest.update(f'{split} {metadata["sha256"]}\n'.encode())
    except (KeyError, OSError, RuntimeError, TypeError) as error:
        raise _damaged(directory, error) from error
    if not splits:
        raise _damaged(directory, 'it has no split')
    return Corpus(
        name=builder.name,
        fingerprint=digest.hexdigest()[:16],
        directory=directory,
        splits=splits,
        text_bytes=text_bytes,
    )


def _damaged(directory: pathlib.Path, reason: Exception | str) -> ValueError:
    return ValueError(
        f'The built dataset in {directory} is damaged ({reason}). Delete that folder; the next run '
        'builds it again.'
    )
