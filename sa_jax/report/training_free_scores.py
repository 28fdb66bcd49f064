"""The scores of a training-free sweep, joined from its cells.

A score is the mean over the draws of the permutations, beside their sample standard deviation and
the standard error over items. Differences between patterns are taken item by item, in groups of
them, so that items that are hard for all patterns cancel; their standard errors also hold the
spread over the draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MEAN = 'mean'
# What is reported of a task, by the habit of papers on language models.
_METRICS = {'hellaswag': 'acc_norm', 'arc_challenge': 'acc_norm'}
_ACCURACIES = ('acc', 'pass@1', 'exact_match', 'acc_norm')
_PERPLEXITIES = ('perplexity', 'word_perplexity')


class Score(NamedTuple):
    """A score of a pattern.

    Attributes:
      value: The mean over the draws; accuracies in per cent.
      spread: Their sample standard deviation; None for a single draw.
      stderr: The standard error over the items; None where it isn't known.
    """

    value: float
    spread: float | None
    stderr: float | None


class Difference(NamedTuple):
    """One pattern against another.

    Attributes:
      value: Accuracies: the difference in points. Perplexities: the ratio.
      stderr: The standard error, over items (the same under both) and draws.
    """

    value: float
    stderr: float


class Scores:
    """The scores of a result.

    Attributes:
      model: Its name.
      windows: All effective windows.
      patterns: All patterns, full attention first.
      accuracies: By task, which metric is its accuracy.
      perplexities: By task, which metric is its perplexity.
      unknown: The metrics of the tasks that have neither.
    """

    def __init__(self, result: Mapping[str, Any]):
        config = result['config']
        self.model = config['model']
        self.windows = list(config['effective_windows'])
        self.patterns = sorted(config['patterns'], key=lambda name: name != 'full')
        self._cells: dict[tuple, list[Mapping[str, Any]]] = {}
        for cell in result['figures']['cells']:
            place = cell['task'], cell['pattern'], cell['effective_window']
            self._cells.setdefault(place, []).append(cell)
        metrics = {cells[0]['task']: cells[0]['metrics'] for cells in self._cells.values()}
        chosen = {
            task: [_METRICS.get(task), *_ACCURACIES] for task in config['tasks'] if task in metrics
        }
        self.accuracies = _first(chosen, metrics)
        self.perplexities = _first(dict.fromkeys(chosen, _PERPLEXITIES), metrics)
        self.unknown = {
            task: list(metrics[task])
            for task in chosen
            if task not in self.accuracies and task not in self.perplexities
        }

    def columns(self) -> list[tuple[str, int | None]]:
        """Patterns and effective windows: full attention, then all at each window."""
        sparse = [name for name in self.patterns if name != 'full']
        full = [('full', None)] if 'full' in self.patterns else []
        return full + [(name, window) for window in self.windows for name in sparse]

    def accuracy(self, task: str, pattern: str, window: int | None) -> Score | None:
        """The accuracy of a task, or with `MEAN` the mean over all; None unless all is measured."""
        if task != MEAN:
            return self._of_task(self.accuracies, task, pattern, window, scale=100.0)
        tasks = list(self.accuracies)
        scores = [self.accuracy(task, pattern, window) for task in tasks]
        if not scores or None in scores:
            return None
        draws = [self._draws(self.accuracies, task, pattern, window) for task in tasks]
        if len(set(map(len, draws))) > 1:
            return None
        draws = 100 * np.mean(draws, axis=0)
        errors = [score.stderr for score in scores]
        stderr = None if None in errors else math.hypot(*errors) / len(errors)
        return Score(float(draws.mean()), _spread(draws), stderr)

    def perplexity(self, task: str, pattern: str, window: int | None) -> Score | None:
        """The perplexity of a task."""
        return self._of_task(self.perplexities, task, pattern, window)

    def accuracy_difference(
        self, task: str, pattern: str, other: str, window: int | None
    ) -> Difference | None:
        """The accuracy of a pattern less that of another one at the same window."""
        tasks = list(self.accuracies) if task == MEAN else [task]
        found = [self._difference(self.accuracies, x, pattern, other, window) for x in tasks]
        if not found or None in found:
            return None
        value = float(np.mean([x.value for x in found]))
        of_items = math.hypot(*(x.stderr for x in found)) / len(tasks)
        of_draws = []
        for name in (pattern, other):
            place = name, None if name == 'full' else window
            draws = [self._draws(self.accuracies, x, *place) for x in tasks]
            if len(set(map(len, draws))) > 1:
                return None
            of_draws.append(_error(np.mean(draws, axis=0)))
        return Difference(100 * value, 100 * math.hypot(of_items, *of_draws))

    def perplexity_ratio(
        self, task: str, pattern: str, other: str, window: int | None
    ) -> Difference | None:
        """The perplexity of a pattern over that of another one at the same window."""
        found = self._difference(self.perplexities, task, pattern, other, window, np.log)
        if found is None:
            return None
        of_draws = [
            _error(np.log(self._draws(self.perplexities, task, *place)))
            for place in ((pattern, window), (other, None if other == 'full' else window))
        ]
        # The error of an exponential, to first order.
        ratio = math.exp(found.value)
        return Difference(ratio, ratio * math.hypot(found.stderr, *of_draws))

    def prompts(self, task: str) -> dict[str, Any]:
        """What is known of the items of a task.

        Returns:
          `num_items`, `num_shots`, `mean_tokens`, `num_truncated`, `num_dropped`, `share_longer`.
        """
        cells = [cell for place, of in self._cells.items() if place[0] == task for cell in of]
        names = ('num_items', 'mean_tokens', 'num_truncated', 'num_dropped')
        # Cells of an earlier command may lack a window.
        shares = {k: v for cell in cells for k, v in cell['share_longer'].items()}
        facts = {name: cells[0][name] for name in names}
        return facts | {'num_shots': cells[0].get('num_shots'), 'share_longer': shares}

    def _draws(self, metrics, task, pattern, window) -> list[float]:
        cells = self._at(task, pattern, window)
        return [cell['metrics'][metrics[task]]['value'] for cell in cells]

    def _of_task(self, metrics, task, pattern, window, scale=1.0) -> Score | None:
        draws = scale * np.array(self._draws(metrics, task, pattern, window))
        if not len(draws):
            return None
        errors = [
            cell['metrics'][metrics[task]]['stderr'] for cell in self._at(task, pattern, window)
        ]
        stderr = None if None in errors else scale * float(np.mean(errors))
        return Score(float(draws.mean()), _spread(draws), stderr)

    def _difference(self, metrics, task, pattern, other, window, transform=np.asarray):
        """Of the items' means; its standard error is that of the groups' differences alone."""
        values, groups = [], []
        for name in (pattern, other):
            place = task, name, None if name == 'full' else window
            of_draws = [cell['groups'].get(metrics[task]) for cell in self._at(*place)]
            if not of_draws or None in of_draws:
                return None
            values.append(float(np.mean(transform(self._draws(metrics, *place)))))
            groups.append(np.mean(of_draws, axis=0))
        difference = groups[0] - groups[1]
        stderr = float(difference.std(ddof=1)) / math.sqrt(len(difference))
        return Difference(values[0] - values[1], stderr)

    def _at(self, task, pattern, window) -> Sequence[Mapping[str, Any]]:
        return self._cells.get((task, pattern, window), ())


def _first(names, metrics) -> dict[str, str]:
    """By task, the first of the names that it has as a metric."""
    found = {
        task: next((name for name in of_task if name in metrics[task]), None)
        for task, of_task in names.items()
    }
    return {task: name for task, name in found.items() if name is not None}


def _spread(draws: np.ndarray) -> float | None:
    return float(draws.std(ddof=1)) if len(draws) > 1 else None


def _error(draws: np.ndarray) -> float:
    """The standard error of the mean over draws; 0 for a single one."""
    return (_spread(draws) or 0.0) / math.sqrt(len(draws))
