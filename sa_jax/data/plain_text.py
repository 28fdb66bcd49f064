"""The user's own plain-text files."""

import hashlib
import pathlib
from collections.abc import Iterator

from sa_jax.data import builder, sources

# Longer files are cut into documents of about this many characters: a single large file can then
# be shared out among the virtual shards, and is tokenized piecewise.
DOCUMENT_CHARACTERS = 1 << 16
# Of files whose names say no split, the share that is held out for each of validation and test.
HELD_OUT = 0.05


class PlainText(builder.DocumentBuilder):
    """The .txt and .md files below `data.path`, UTF-8, each a document.

    A file longer than `DOCUMENT_CHARACTERS` becomes several documents, cut at the ends of
    paragraphs where there are any.

    Splits are told by the names of files or folders: `train.txt` and `validation.txt`, or `train/`,
    `validation/` and `test/`. If no name tells a split, whole files are held out: 5 % of them, at
    least one, for each of validation and test, chosen by a hash of their names.
    """

    name = 'text'

    @classmethod
    def find(cls, path):
        """Returns the files below `path`, which must be given."""
        if not path:
            raise ValueError('data.corpus=text needs data.path, a folder with .txt or .md files.')
        root = pathlib.Path(path).expanduser()
        files = sources.find_files(root, ('.txt', '.md'))
        if any(sources.split_of(file.relative_to(root)) for file in files):
            return root, builder.files_by_split(root, files)
        return root, _hold_out(root, files)

    def read(self, path):
        """Yields a file, in pieces if it is long."""
        name = path.relative_to(self.root).as_posix()
        for number, document in enumerate(cut(sources.read_text(path), DOCUMENT_CHARACTERS)):
            if document.strip():
                yield (name if number == 0 else f'{name}#{number}'), document


def cut(text: str, size: int) -> Iterator[str]:
    """Cuts `text` into pieces of about `size` characters that add up to it again.

    Each piece ends with the first blank line after `size` characters, or else with the first line
    end, or else right there.
    """
    start = 0
    while len(text) - start > size:
        for mark in ('\n\n', '\n'):
            end = text.find(mark, start + size - len(mark), start + 2 * size)
            if end >= 0:
                end += len(mark)
                break
        else:
            end = start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _hold_out(root, files):
    if len(files) < 3:
        raise ValueError(
            f'{root} holds {len(files)} text files whose names tell no split; expected names that '
            'begin with train, validation and test, or at least three files to choose from.'
        )

    def rank(path):
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()

    ranked = sorted(files, key=rank)
    count = max(1, round(HELD_OUT * len(files)))
    return {
        'train': sorted(ranked[2 * count :]),
        'validation': sorted(ranked[:count]),
        'test': sorted(ranked[count : 2 * count]),
    }
