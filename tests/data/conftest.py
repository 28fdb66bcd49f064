"""Corpora that live in memory, for tests that need no files."""

import pathlib

import pytest

from sa_jax.data import corpora
from sa_jax.data.builder import checksum


class _Records(list):
    """Stands for a TFDS data source, whose texts are bytes."""

    def __getitem__(self, index):
        identifier, text = str(index).encode(), super().__getitem__(index).encode()
        return {'text': text, 'id': identifier, 'crc32': checksum(index, identifier, text)}


@pytest.fixture(scope='session')
def make_corpus():
    def make(train, validation=('Held out.',), fingerprint='in-memory'):
        splits = {'train': list(train), 'validation': list(validation)}
        return corpora.Corpus(
            name='memory',
            fingerprint=fingerprint,
            directory=pathlib.Path('memory'),
            splits={
                split: corpora.Documents(
                    _Records(texts), description=split, directory=pathlib.Path('memory')
                )
                for split, texts in splits.items()
            },
            text_bytes={split: len(''.join(texts).encode()) for split, texts in splits.items()},
        )

    return make
