"""Tasks made from the default corpus' held-out speeches, for those who have no others.

- `speeches_last_word.jsonl`: passages of whole sentences whose last word, of five letters at least,
  has occurred in them before. It is to be predicted, as in LAMBADA; how far back it occurred isn't
  looked at.
- `speeches_text.txt`: an excerpt from the middle of each speech, for perplexity.

The speeches are in the public domain. The files are the same wherever they are made.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterator

from sa_jax.data.sotu import Sotu
from sa_jax.data.sources import read_text

_PASSAGES_PER_SPEECH = 4
_LEAST_WORDS, _MOST_WORDS = 150, 190  # of a passage
_EXCERPT_CHARACTERS = 2600
_SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z])')
_LAST_WORD = re.compile(r'(.*\S) ([a-z]{5,})[.!?]')


def write_speech_tasks(folder: pathlib.Path) -> None:
    """Writes the task files into a folder.

    Raises:
      ImportError: The package `sotu` is missing.
    """
    _, files = Sotu.find(None)
    speeches = [' '.join(read_text(path).split()) for path in files['validation']]
    items = [item for speech in speeches for item in _spread(list(passages(speech)))]
    middles = [(len(speech) - _EXCERPT_CHARACTERS) // 2 for speech in speeches]
    excerpts = [
        speech[start : start + _EXCERPT_CHARACTERS]
        for speech, start in zip(speeches, middles, strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / 'speeches_last_word.jsonl', items)
    (folder / 'speeches_text.txt').write_text('\n\n'.join(excerpts) + '\n', encoding='utf-8')


def write_held_out_passages(path: pathlib.Path) -> None:
    """Writes the passages of all speeches that nothing is trained on, validation and test.

    Raises:
      ImportError: The package `sotu` is missing.
    """
    _, files = Sotu.find(None)
    speeches = [
        ' '.join(read_text(path).split())
        for split in ('validation', 'test')
        for path in files[split]
    ]
    _write(path, [item for speech in speeches for item in passages(speech)])


def passages(text: str) -> Iterator[tuple[str, str]]:
    """Passages of a text without line breaks, not overlapping: all but the last word, and that.

    Args:
      text: Sentences with single spaces between them.
    """
    sentences = _SENTENCE_END.split(text)
    start = 0
    while start < len(sentences):
        for end in range(start + 1, len(sentences) + 1):
            passage = ' '.join(sentences[start:end])
            num_words = passage.count(' ') + 1
            if num_words < _LEAST_WORDS:
                continue
            found = _LAST_WORD.fullmatch(passage)
            if num_words > _MOST_WORDS:
                start += 1
                break
            if found and re.search(rf'\b{found[2]}\b', found[1], re.IGNORECASE):
                yield found[1], found[2]
                start = end
                break
        else:
            return


def _write(path: pathlib.Path, items: list[tuple[str, str]]) -> None:
    lines = [
        json.dumps({'context': context, 'continuation': word}) + '\n' for context, word in items
    ]
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')  # others may be reading
    temporary.write_text(''.join(lines), encoding='utf-8')
    temporary.replace(path)


def _spread(items: list) -> list:
    """A few of many, evenly spread."""
    count = min(_PASSAGES_PER_SPEECH, len(items))
    return [items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count)]
