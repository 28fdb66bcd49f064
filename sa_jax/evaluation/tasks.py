"""Tasks from local files: items of the forms in `task_forms`, texts, and programs to complete."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence

from sa_jax.evaluation import programs
from sa_jax.evaluation.requests import Request, encode_request
from sa_jax.evaluation.scoring import Score, Scorer
from sa_jax.evaluation.task_forms import Form, Item, read_items, read_records
from sa_jax.evaluation.task_results import TaskResult, summarize
from sa_jax.tokenization.tokenizers import Tokenizer
from sa_jax.untrusted import damage_reported

_BEHIND_SHOT = '\n\n'


@dataclasses.dataclass(frozen=True)
class ItemTask:
    """Items of one form.

    Attributes:
      name: The file's name without its ending.
      items: What is scored.
      form: How items are judged.
    """

    name: str
    items: Sequence[Item]
    form: Form

    def requests(self, tokenizer: Tokenizer) -> list[list[Request]]:
        """The requests of each item."""
        return [
            [encode_request(tokenizer, *request) for request in item.requests]
            for item in self.items
        ]

    def outcomes(self, scores: Sequence[Sequence[Score]]) -> list[Mapping[str, float]]:
        """The outcome of each item, by metric."""
        return [self.form.judge(*pair) for pair in zip(self.items, scores, strict=True)]


@dataclasses.dataclass(frozen=True)
class TextTask:
    """The perplexity per token of a text, in windows that are predicted from their first token.

    Attributes:
      name: The file's name without its ending.
      text: All of it.
      window: Tokens of a window; what is left behind the last whole one isn't scored.
      limit: The number of windows at most; None for all.
    """

    name: str
    text: str
    window: int
    limit: int | None

    def requests(self, tokenizer: Tokenizer) -> list[list[Request]]:
        """The request of each window."""
        ids = tokenizer.encode(self.text)
        starts = range(0, len(ids) - self.window + 1, self.window)[: self.limit]
        if not starts:
            raise ValueError(
                f'{self.name} has {len(ids)} tokens, less than one window of {self.window}; choose '
                'a smaller window.'
            )
        prefix = [tokenizer.bos_id] if tokenizer.adds_bos else []
        return [[Request(prefix + ids[i : i + 1], ids[i + 1 : i + self.window])] for i in starts]

    def outcomes(self, scores: Sequence[Sequence[Score]]) -> list[Mapping[str, float]]:
        """The loss per token of each window."""
        return [{'perplexity': -score.log_probability / score.num_scored} for (score,) in scores]


Task = ItemTask | TextTask | programs.ProgramTask


def load_task(
    path: str | pathlib.Path, *, limit: int | None = None, num_shots: int = 0, window: int = 512
) -> Task:
    """Reads a task from a file.

    Args:
      path: Of `NAME.jsonl`, with a form of `task_forms` or the fields of HumanEval, or of
        `NAME.txt`, a text.
      limit: The first items or windows only; None for all.
      num_shots: Solved items to put before each one: the last ones of the file, which are never
        scored.
      window: Tokens of a window of text.

    Raises:
      ValueError: A number is out of range; or the file is missing, of no known form, too short, or
        damaged, with the line's number.
    """
    path = pathlib.Path(path).expanduser()
    for name, value, least in (
        ('limit', limit, 1),
        ('num_shots', num_shots, 0),
        ('window', window, 2),
    ):
        if value is not None and value < least:
            raise ValueError(f'{name} must be at least {least}, got {value}.')
    if path.suffix not in ('.jsonl', '.txt') or not path.is_file():
        raise ValueError(f'{path} is no task; expected a file NAME.jsonl or NAME.txt.')
    if path.suffix == '.txt':
        if num_shots:
            raise ValueError(f'{path} is a text and has no items for num_shots = {num_shots}.')
        with damage_reported(path):
            return TextTask(path.stem, path.read_text(encoding='utf-8'), window, limit)
    _, first = next(read_records(path), (0, {}))
    if set(programs.FIELDS) <= set(first):
        if num_shots:
            raise ValueError(f'{path} has programs, which take no num_shots = {num_shots}.')
        return programs.load_programs(path, limit=limit)
    items, form = read_items(path)
    if len(items) <= num_shots:
        raise ValueError(
            f'{path} has {len(items)} items, which leaves none beside num_shots = {num_shots}.'
        )
    num_scored = len(items) - num_shots
    shots = ''.join(
        f'{context}{continuation}{_BEHIND_SHOT}'
        for context, continuation in (item.requests[item.gold] for item in items[num_scored:])
    )
    scored = [
        item._replace(requests=tuple((shots + context, text) for context, text in item.requests))
        for item in items[:num_scored][:limit]
    ]
    return ItemTask(path.stem, scored, form)


def check(task: Task, tokenizer: Tokenizer, max_length: int) -> None:
    """Finds out whether a model can be asked, before hours are spent on other tasks.

    Args:
      task: Of `load_task`.
      tokenizer: Of the model.
      max_length: The tokens that the model reads at most.

    Raises:
      ValueError: It can't; the message says why and what helps.
    """
    if isinstance(task, programs.ProgramTask):
        programs.check_room(task, max_length)
    else:
        _requests(task, tokenizer, max_length)


def evaluate(
    task: Task,
    scorer: Scorer,
    tokenizer: Tokenizer,
    *,
    effective_windows: Sequence[int] = (),
    confirm_run_unsafe_code: bool = False,
    progress: bool = True,
) -> TaskResult:
    """Evaluates a task.

    Args:
      task: Of `load_task`.
      scorer: With the model.
      tokenizer: Of the model.
      effective_windows: For each of them, the result says which share of the items is longer.
      confirm_run_unsafe_code: That programs of the model may be run on this machine.
      progress: Whether to show a bar on standard error.

    Returns:
      The metrics over the items, and how long these are.

    Raises:
      ValueError: The text is too short, or its windows longer than the model may read; or running
        programs isn't confirmed.
      RuntimeError: Programs can't be confined here.
    """
    if isinstance(task, programs.ProgramTask):
        return programs.evaluate_programs(
            task,
            scorer,
            tokenizer,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
            effective_windows=effective_windows,
            progress=progress,
        )
    requests = _requests(task, tokenizer, scorer.max_length)
    flat = iter(scorer.score(list(itertools.chain(*requests)), progress=progress))
    scores = [list(itertools.islice(flat, len(of_item))) for of_item in requests]
    return summarize(
        task.outcomes(scores),
        num_read=[max(score.num_read for score in of_item) for of_item in scores],
        num_dropped=[score.num_dropped for of_item in scores for score in of_item],
        effective_windows=effective_windows,
    )


def _requests(task, tokenizer, max_length) -> list[list[Request]]:
    longest = max_length + 1 - tokenizer.adds_bos
    if isinstance(task, TextTask) and task.window > longest:
        raise ValueError(
            f'{task.name} has windows of {task.window} tokens, but the model reads at most '
            f'{max_length}; choose a window of at most {longest}.'
        )
    return task.requests(tokenizer)
