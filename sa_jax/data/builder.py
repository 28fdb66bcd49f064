"""The common part of the TFDS builders: documents with a text and an id, split by name."""

import abc
import hashlib
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow_datasets as tfds

from sa_jax.data import sources


class DocumentBuilder(tfds.core.GeneratorBasedBuilder, abc.ABC):
    """Writes documents as ArrayRecord, in the order of the source files.

    A record has a text, an id, and the sum of both and of its index: ArrayRecord finds most damage
    to a file, but may also take another record for the one that was asked for.

    A subclass finds its files and reads the documents of each. The records keep the order of the
    files: shuffling is the pipeline's task. The dataset's metadata hold per split the number of
    bytes of text and a hash of the documents, which identifies the content wherever it was built.

    TFDS writes into a temporary folder and renames it once it is complete, so that an interrupted
    build leaves nothing that could be taken for whole.

    Attributes:
      root: the folder of the source files.
      files: split -> source files, in order; never empty lists.
    """

    VERSION = tfds.core.Version('1.1.0')

    def __init__(
        self, *, root: pathlib.Path, files: Mapping[str, Sequence[pathlib.Path]], data_dir: str
    ):
        self.root = root
        self.files = files
        super().__init__(data_dir=data_dir, file_format='array_record')

    @classmethod
    @abc.abstractmethod
    def find(cls, path: str | None) -> tuple[pathlib.Path, Mapping[str, Sequence[pathlib.Path]]]:
        """Returns the root folder and the source files of each split.

        Args:
          path: the configured `data.path`, or None.
        """

    @abc.abstractmethod
    def read(self, path: pathlib.Path) -> Iterable[tuple[str, str]]:
        """Yields the documents of one source file as pairs of id and text."""

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    'text': tfds.features.Text(),
                    'id': tfds.features.Text(),
                    'crc32': tfds.features.Scalar(np.int64),
                }
            ),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # The files are local.
        return {split: self._generate_examples(split) for split in self.files}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        digest = hashlib.sha256()
        num_documents = text_bytes = 0
        for path in self.files[split]:
            for identifier, text in self.read(path):
                encoded = text.encode()
                digest.update(f'{identifier}\0{len(encoded)}\0'.encode() + encoded)
                text_bytes += len(encoded)
                crc32 = checksum(num_documents, identifier.encode(), encoded)
                yield num_documents, {'text': text, 'id': identifier, 'crc32': crc32}
                num_documents += 1
        if not num_documents:
            raise ValueError(
                f'Split {split!r} of {type(self).name!r} is empty: none of its '
                f'{len(self.files[split])} files under {self.root} holds any text.'
            )
        self.info.metadata[split] = {'sha256': digest.hexdigest(), 'text_bytes': text_bytes}


def checksum(index: int, identifier: bytes, text: bytes) -> int:
    """The sum of a document and its index in the split."""
    return zlib.crc32(text, zlib.crc32(f'{index} {len(identifier)} '.encode() + identifier))


def files_by_split(
    root: pathlib.Path, files: Sequence[pathlib.Path]
) -> dict[str, list[pathlib.Path]]:
    """Groups files by the split their folders or names begin with, in the order of `SPLITS`.

    Raises:
      ValueError: if a file names no split, or there is no file for training or validation.
    """
    groups = {split: [] for split in sources.SPLITS}
    for path in files:
        relative = path.relative_to(root)
        split = sources.split_of(relative)
        if split is None:
            raise ValueError(
                f"Cannot tell the split of '{relative}' in {root}: expected its name, or a folder "
                f'it lies in, to begin with one of {", ".join(sources.SPLITS)}.'
            )
        groups[split].append(path)
    for split in ('train', 'validation'):
        if not groups[split]:
            raise ValueError(
                f'Split {split!r} is empty: no file or folder in {root} has a name that begins '
                f'with {split!r}.'
            )
    return {split: paths for split, paths in groups.items() if paths}
