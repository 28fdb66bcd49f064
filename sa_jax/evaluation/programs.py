"""Programs that a model completes and that are run: HumanEval (Chen et al., arXiv 2107.03374)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sa_jax.evaluation import sandbox
from sa_jax.evaluation.completions import complete
from sa_jax.evaluation.scoring import Scorer
from sa_jax.evaluation.task_forms import fields_of, read_records
from sa_jax.evaluation.task_results import TaskResult, summarize
from sa_jax.extras import optional_import
from sa_jax.tokenization.tokenizers import Tokenizer

FIELDS = ('task_id', 'prompt', 'entry_point', 'test')

# As lm-evaluation-harness.
_MAX_NEW_TOKENS = 1024
# What follows the function that is to be completed.
_STOP = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')
_HUB_DATASET = 'openai/openai_humaneval'


class Problem(NamedTuple):
    """A function to complete.

    Attributes:
      prompt: Its head and docstring.
      entry_point: Its name.
      test: A program that defines `check(function)`.
    """

    prompt: str
    entry_point: str
    test: str

    def program(self, completion: str) -> str:
        """What has to run to its end."""
        return f'{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})'


@dataclasses.dataclass(frozen=True)
class ProgramTask:
    """Functions to complete.

    Attributes:
      name: Of the task.
      problems: Them.
    """

    name: str
    problems: Sequence[Problem]


def load_programs(path: pathlib.Path, *, limit: int | None = None) -> ProgramTask:
    """Reads a file whose lines have HumanEval's fields; `limit` takes the first ones.

    Raises:
      ValueError: A line is damaged; the message names file and line.
    """
    problems = []
    for line, record in read_records(path):
        try:
            problems.append(_problem(record))
        except ValueError as error:
            raise ValueError(f'{path}:{line}: {error}') from error
    return ProgramTask(path.stem, problems[:limit])


def load_humaneval(*, limit: int | None = None) -> ProgramTask:
    """Reads HumanEval from the Hugging Face hub.

    Raises:
      ImportError: The package `datasets` is missing.
    """
    datasets = optional_import('datasets', 'HumanEval from the hub', 'eval')
    records = datasets.load_dataset(_HUB_DATASET, split='test')
    return ProgramTask('humaneval', [_problem(record) for record in records][:limit])


def check_room(task: ProgramTask, max_length: int) -> None:
    """Raises a ValueError if a model that reads `max_length` tokens can't write programs."""
    if max_length <= _MAX_NEW_TOKENS:
        raise ValueError(
            f'{task.name} asks for programs of up to {_MAX_NEW_TOKENS} tokens, but the model reads '
            f'at most {max_length} tokens; leave the task out.'
        )


def evaluate_programs(
    task: ProgramTask,
    scorer: Scorer,
    tokenizer: Tokenizer,
    *,
    confirm_run_unsafe_code: bool,
    effective_windows: Sequence[int] = (),
    progress: bool = True,
) -> TaskResult:
    """Completes each function greedily, and runs it with its test.

    Args:
      task: The functions.
      scorer: With the model.
      tokenizer: Of the model.
      confirm_run_unsafe_code: That programs of the model may be run on this machine.
      effective_windows: For each of them, the result says which share of the prompts is longer.
      progress: Whether to show a bar on standard error.

    Returns:
      The share of functions that pass their test, pass@1.

    Raises:
      ValueError: Running programs isn't confirmed.
      RuntimeError: They can't be confined here.
    """
    sandbox.check_can_run(confirm_run_unsafe_code)
    completions = complete(
        scorer,
        tokenizer,
        [problem.prompt for problem in task.problems],
        max_new_tokens=_MAX_NEW_TOKENS,
        stop=_STOP,
        progress=progress,
    )
    outcomes = sandbox.run_programs(
        [
            problem.program(completion.text)
            for problem, completion in zip(task.problems, completions, strict=True)
        ],
        confirm_run_unsafe_code=confirm_run_unsafe_code,
    )
    return summarize(
        [{'pass@1': float(outcome == 'passed')} for outcome in outcomes],
        num_read=[completion.num_read for completion in completions],
        num_dropped=[completion.num_dropped for completion in completions],
        effective_windows=effective_windows,
    )


def _problem(record: Mapping[str, Any]) -> Problem:
    return Problem(*fields_of(record, FIELDS)[1:])
