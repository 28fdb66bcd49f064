"""Tasks by name: of local files, or of lm-evaluation-harness and the hub.

Whatever a task is, scoring it gives aggregates only, ready for a JSON file: nothing that a model
wrote, and no outcome of a single item. For paired comparisons items are averaged in groups, which
are the same for all patterns.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sa_jax.evaluation import programs, sandbox, tasks
from sa_jax.evaluation.scoring import Scorer
from sa_jax.evaluation.task_results import Metric, TaskResult
from sa_jax.extras import optional_import
from sa_jax.tokenization.tokenizers import Tokenizer

# Its items are programs that have to be run.
HUMANEVAL = 'humaneval'
_MOST_GROUPS, _LEAST_GROUPS, _LEAST_ITEMS = 20, 8, 5


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """How tasks are read.

    Attributes:
      limit: The first items only; None for all.
      num_shots: Solved items before each one; None for none in a local file, and for the task's own
        number in the harness. Texts and HumanEval have none.
      text_window: Tokens of a window of a text.
      text_limit: The first windows of a text only; None for all.
      confirm_run_unsafe_code: That programs of the model may be run on this machine.
    """

    limit: int | None = None
    num_shots: int | None = None
    text_window: int = 512
    text_limit: int | None = None
    confirm_run_unsafe_code: bool = False


class NamedTask:
    """A task.

    Attributes:
      name: Its name.
      fingerprint: Of its content; for tasks of the harness its version.
      is_text: Whether it is, or holds, the perplexity of a text.
      num_shots: Solved items before each item; None for a group whose tasks have different numbers.
    """

    def __init__(self, name: str, folder: pathlib.Path | None, options: TaskOptions):
        """Finds and reads the task.

        Args:
          name: Of a file NAME.jsonl or NAME.txt in the folder; or else of a task or group of the
            harness, or 'humaneval'.
          folder: Of local files; None for the harness.
          options: How it is read.

        Raises:
          ValueError: The task doesn't exist, can't be loaded or is damaged, or would run programs
            unconfirmed.
          RuntimeError: Its programs can't be confined here.
        """
        self.name = name
        self.num_shots: int | None = 0
        self._options = options
        self._task, self._loaded = None, None
        if folder is not None:
            path = _path(name, folder)
            self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            self._task = _load(path, options)
        elif name == HUMANEVAL:
            self.fingerprint = HUMANEVAL
            self._task = programs.load_humaneval(limit=options.limit)
        else:
            self.fingerprint = f'lm_eval {_check_harness(name)}'
            self._loaded = _load_of_harness(name, options.num_shots)
            self.num_shots = self._loaded.num_shots[name]
        if isinstance(self._task, programs.ProgramTask):
            sandbox.check_can_run(options.confirm_run_unsafe_code)
        elif isinstance(self._task, tasks.ItemTask):
            self.num_shots = options.num_shots or 0
        self.is_text = isinstance(self._task, tasks.TextTask) or (
            self._loaded is not None and self._loaded.has_texts
        )

    def check(self, tokenizer: Tokenizer, max_length: int) -> None:
        """Finds out whether a model can be asked, before hours are spent on other tasks.

        Args:
          tokenizer: Of the model.
          max_length: The tokens that it reads at most.

        Raises:
          ValueError: It can't.
        """
        if self._task is not None:
            tasks.check(self._task, tokenizer, max_length)

    def evaluate(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        *,
        effective_windows: Sequence[int] = (),
        progress: bool = False,
    ) -> dict[str, Any]:
        """Scores the task.

        Args:
          scorer: With the model, its pattern and the draw.
          tokenizer: Of the model.
          effective_windows: For each of them, the share of the items that is longer is told.
          progress: Whether to show a bar on standard error.

        Returns:
          `metrics` (by name `value` and `stderr`), `num_items`, `mean_tokens`, `share_longer`,
          `num_truncated` and `num_dropped` as in `TaskResult`; None where the harness doesn't tell.
          `groups`: by metric the means of groups of items, empty where they are few or unknown.
        """
        shared = {'effective_windows': effective_windows, 'progress': progress}
        if self._task is None:
            result = self._evaluate_harness(scorer, tokenizer, **shared)
        else:
            confirmed = self._options.confirm_run_unsafe_code
            result = tasks.evaluate(
                self._task, scorer, tokenizer, confirm_run_unsafe_code=confirmed, **shared
            )
        return result.aggregates() | {'groups': _groups(result)}

    def _evaluate_harness(self, scorer, tokenizer, effective_windows, progress) -> TaskResult:
        # It needs a package that local tasks do without.
        from sa_jax.evaluation import harness

        model = harness.HarnessLM(scorer, tokenizer, progress=progress)
        result = harness.evaluate_tasks([model], self._loaded, limit=self._options.limit)[self.name]
        num_read = np.array(model.num_read)
        has_read = len(num_read) > 0
        return TaskResult(
            metrics={
                name: Metric(metric['mean'], metric['stderr'])
                for name, metric in result['metrics'].items()
            },
            num_items=result['num_items'],
            mean_tokens=float(num_read.mean()) if has_read else None,
            share_longer={
                window: float((num_read > window).mean())
                for window in effective_windows
                if has_read
            },
            num_truncated=model.truncation.requests,
            num_dropped=model.truncation.tokens,
            per_item={},
        )


@functools.lru_cache
def _harness_tasks() -> frozenset[str]:
    tasks_of_harness = optional_import('lm_eval.tasks', 'tasks of lm-evaluation-harness', 'eval')
    return frozenset(tasks_of_harness.TaskManager().all_tasks)


def _check_harness(name: str) -> str:
    """The harness's version, if it has the task."""
    if name not in _harness_tasks():
        near = difflib.get_close_matches(name, _harness_tasks(), n=1)
        hint = f' Did you mean {near[0]!r}?' if near else ''
        raise ValueError(
            f'lm-evaluation-harness has no task {name!r}.{hint} Tasks of local files need their '
            'folder.'
        )
    return importlib.metadata.version('lm_eval')


def _load_of_harness(name: str, num_shots: int | None):
    # It needs a package that local tasks do without.
    from sa_jax.evaluation import harness

    loaded = harness.load_tasks([name], num_shots=num_shots)
    if name not in loaded.num_shots:
        raise ValueError(
            f'{name!r} stands for several tasks of lm-evaluation-harness; give them instead: '
            f'{", ".join(loaded.num_shots)}.'
        )
    return loaded


def _path(name: str, folder: pathlib.Path) -> pathlib.Path:
    paths = [folder / f'{name}.jsonl', folder / f'{name}.txt']
    found = [path for path in paths if path.is_file()]
    if len(found) != 1:
        known = sorted(path.stem for path in folder.glob('*') if path.suffix in ('.jsonl', '.txt'))
        raise ValueError(
            f'{folder} has {len(found)} files for the task {name!r}; expected {name}.jsonl or '
            f'{name}.txt. Tasks there: {", ".join(known) or "none"}.'
        )
    return found[0]


def _load(path: pathlib.Path, options: TaskOptions):
    if path.stem == HUMANEVAL:
        return programs.load_programs(path, limit=options.limit)
    if path.suffix == '.txt':
        return tasks.load_task(path, limit=options.text_limit, window=options.text_window)
    return tasks.load_task(path, limit=options.limit, num_shots=options.num_shots or 0)


def _groups(result: TaskResult) -> Mapping[str, list[float]]:
    """The means of neighbouring items, by metric."""
    if not result.per_item:
        return {}
    number = min(_MOST_GROUPS, result.num_items // _LEAST_ITEMS)
    if number < _LEAST_GROUPS:
        return {}
    return {
        metric: [float(part.mean()) for part in np.array_split(values, number)]
        for metric, values in result.per_item.items()
    }
