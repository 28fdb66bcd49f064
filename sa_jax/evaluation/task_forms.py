"""The forms of items in local task files, told by the fields of their lines.

- `context`, `continuation`: would the model continue the context so? (LAMBADA)
- `query`, `choices`, `gold`: which choice is likeliest behind the query? (ARC, PIQA, BoolQ, …)
- `context_options`, `continuation`, `gold`: behind which context is the continuation likeliest?
  (WinoGrande)

Items are formatted and judged as lm-evaluation-harness does.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sa_jax.evaluation.scoring import Score
from sa_jax.untrusted import MAX_LINE, brief


class Item(NamedTuple):
    """What is asked of a model.

    Attributes:
      requests: Contexts and their continuations.
      gold: Which request is the right one.
    """

    requests: tuple[tuple[str, str], ...]
    gold: int


class Form(NamedTuple):
    """A form of items.

    Attributes:
      fields: What a line holds.
      parse: The fields' values, in this order, to the item.
      judge: `(item, scores of its requests)` to its outcome by metric, as for
        `task_results.summarize`.
    """

    fields: tuple[str, ...]
    parse: Callable[..., Item]
    judge: Callable[[Item, Sequence[Score]], Mapping[str, float]]


def read_items(path: pathlib.Path) -> tuple[list[Item], Form]:
    """The items of a file and their form.

    Raises:
      ValueError: The file is empty, or a line is of no known form, of another form than the first,
        or damaged; the message names file and line.
    """
    items, form = [], None
    for line, record in read_records(path):
        try:
            form = form or _form_of(record)
            items.append(form.parse(*fields_of(record, form.fields)))
        except ValueError as error:
            raise ValueError(f'{path}:{line}: {error}') from error
    if form is None:
        raise ValueError(f'{path} has no lines; expected a JSON object in each.')
    return items, form


def read_records(path: pathlib.Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a `.jsonl` file, each with the number of its line.

    Raises:
      ValueError: A line holds no object; the message names file and line.
    """
    with path.open('rb') as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b''), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (RecursionError, ValueError) as error:
                raise ValueError(f'{path}:{number}: expected a JSON object; {error}.') from error
            if not isinstance(record, dict):
                raise ValueError(f'{path}:{number}: expected a JSON object, got {record!r:.60}.')
            yield number, record


def fields_of(record: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """The values of fields, checked.

    Raises:
      ValueError: A field is missing or not what its name promises.
    """
    for name in names:
        expected, is_valid = _EXPECTED.get(name, _TEXT)
        if name not in record:
            raise ValueError(f'{name!r} is missing; expected {", ".join(names)}.')
        if not is_valid(record[name]):
            raise ValueError(f'{name!r} is {record[name]!r:.60}; expected {expected}.')
    return [record[name] for name in names]


def _form_of(record: Mapping[str, Any]) -> Form:
    for form in _FORMS:
        if set(form.fields) <= set(record):
            return form
    known = '; '.join(', '.join(form.fields) for form in _FORMS)
    raise ValueError(f'no form has the fields {brief(", ".join(record))}; expected {known}.')


def _cloze(context: str, continuation: str) -> Item:
    return Item(((context, f' {continuation}'),), 0)


def _choices(query: str, choices: list[str], gold: int) -> Item:
    prompt = query.rstrip()
    # A query that asks nothing is a text to be continued, as in HellaSwag.
    if 'Question:' in prompt and not prompt.endswith('Answer:'):
        prompt += '\nAnswer:'
    return Item(tuple((prompt, f' {choice}') for choice in choices), _within(gold, choices))


def _context_options(context_options: list[str], continuation: str, gold: int) -> Item:
    requests = tuple((context, f' {continuation}') for context in context_options)
    return Item(requests, _within(gold, context_options))


def _within(gold: int, options: list[str]) -> int:
    if gold >= len(options):
        raise ValueError(f"'gold' is {gold}; expected the index of one of {len(options)} options.")
    return gold


def _judge_cloze(item: Item, scores: Sequence[Score]) -> dict[str, float]:
    del item
    (score,) = scores
    return {'acc': float(score.is_greedy), 'perplexity': -score.log_probability}


def _judge_choices(item: Item, scores: Sequence[Score]) -> dict[str, float]:
    # In characters, without the space before the choice.
    lengths = [len(choice) - 1 for _, choice in item.requests]
    return {
        'acc': _hit(item, [score.log_probability for score in scores]),
        'acc_norm': _hit(
            item,
            [score.log_probability / n for score, n in zip(scores, lengths, strict=True)],
        ),
    }


def _judge_context_options(item: Item, scores: Sequence[Score]) -> dict[str, float]:
    return {'acc': _hit(item, [score.log_probability for score in scores])}


def _hit(item: Item, values: Sequence[float]) -> float:
    return float(np.argmax(values) == item.gold)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    # JSON can spell halves of surrogate pairs, which no tokenizer takes.
    return isinstance(value, str) and bool(value.strip()) and not _SURROGATE.search(value)


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_SURROGATE = re.compile('[\ud800-\udfff]')
_TEXT = ('text', _is_text)
_EXPECTED = {
    'choices': ('a list of at least two texts', _is_texts),
    'context_options': ('a list of at least two texts', _is_texts),
    'gold': ('an index, from 0', _is_index),
}
_FORMS = (
    Form(('context', 'continuation'), _cloze, _judge_cloze),
    Form(('query', 'choices', 'gold'), _choices, _judge_choices),
    Form(('context_options', 'continuation', 'gold'), _context_options, _judge_context_options),
)
