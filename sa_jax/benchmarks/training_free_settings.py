"""What a training-free sweep scores: patterns, effective windows, tasks."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from typing import Any, NamedTuple

from sa_jax.evaluation.patterns import PATTERNS, matched_pattern
from sa_jax.evaluation.scoring import CONTINUATIONS


class Cell(NamedTuple):
    """What is measured at once.

    Attributes:
      task: Its name.
      pattern: One of `PATTERNS`.
      effective_window: Keys; None for full attention.
      draw: Of the permutations.
    """

    task: str
    pattern: str
    effective_window: int | None
    draw: int

    @property
    def matched(self) -> tuple[str, int | None]:
        """Pattern and effective window."""
        return self.pattern, self.effective_window

    @property
    def file_name(self) -> str:
        """Of the cell's file."""
        task = urllib.parse.quote(self.task, safe=' ')
        window = '' if self.effective_window is None else f'-{self.effective_window}'
        return f'{task}-{self.pattern}{window}-draw{self.draw}.json'

    def __str__(self) -> str:
        words = [self.task, self.pattern]
        if self.effective_window is not None:
            words.append(f'w_eff {self.effective_window}')
        if PATTERNS[self.pattern].is_random:
            words.append(f'draw {self.draw}')
        return ', '.join(words)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The settings of a sweep.

    Attributes:
      patterns: Names out of `PATTERNS`.
      effective_windows: Keys, ascending.
      tasks: Their names.
      limit: Items of a task at most; None for all.
      num_shots: Solved items before each one; None for none in local files, and for the task's own
        number in the harness.
      text_window: Tokens of a window of a text.
      text_limit: Windows of a text at most; None for all.
      draws: Permutations over which patterns that permute are averaged.
      continuation: How what follows a prompt is scored: 'prefill', under the prompt's pattern;
        'decode', attending to all before it, as in generation.
      num_sinks: First tokens that are visible from everywhere.
      full_layers: Layers that keep full attention, as text: indices or slices such as '-3:'.
      permutation_scope: 'layer', 'example' or 'head'.
      tokens_per_batch: Tokens of a batch; it doesn't change a score.

    Raises:
      ValueError: A setting is out of range.
    """

    patterns: tuple[str, ...] = ('full', 'swa', 'sa', 'moba')
    effective_windows: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    num_shots: int | None = None
    text_window: int = 512
    text_limit: int | None = None
    draws: int = 3
    continuation: str = 'prefill'
    num_sinks: int = 0
    full_layers: tuple[str, ...] = ()
    permutation_scope: str = 'layer'
    tokens_per_batch: int = 4096

    def __post_init__(self):
        for name in ('patterns', 'effective_windows', 'tasks'):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f'{name} = {values}; expected at least one, each once.')
        if list(self.effective_windows) != sorted(self.effective_windows):
            raise ValueError(f'effective_windows = {self.effective_windows}; expected ascending.')
        if self.continuation not in CONTINUATIONS:
            raise ValueError(
                f'continuation = {self.continuation!r}; expected {" or ".join(CONTINUATIONS)}.'
            )
        least = dict.fromkeys(('draws', 'tokens_per_batch', 'limit', 'text_limit'), 1)
        for name, smallest in (least | {'num_sinks': 0, 'num_shots': 0, 'text_window': 2}).items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f'{name} = {value}; expected at least {smallest}.')
        for pattern in self.patterns:
            for window in self.effective_windows:
                matched_pattern(pattern, window)

    def cells(self) -> list[Cell]:
        """All of them: tasks one after another, full attention once for each."""
        return [
            Cell(task, pattern, window, draw)
            for task in self.tasks
            for window in (None, *self.effective_windows)
            for pattern in self.patterns
            if (pattern == 'full') == (window is None)
            for draw in range(self.draws if PATTERNS[pattern].is_random else 1)
        ]

    def changes(self, cell: Cell) -> dict[str, Any]:
        """What gives a decoder the pattern of a cell."""
        return matched_pattern(
            cell.pattern,
            cell.effective_window,
            num_sinks=self.num_sinks,
            full_layers=self.full_layers,
            permutation_scope=self.permutation_scope,
        )

    def fixed_settings(self) -> dict[str, Any]:
        """What all cells of a workdir have in common: it decides their scores."""
        names = ('limit', 'num_shots', 'text_window', 'text_limit', 'continuation')
        names += ('num_sinks', 'full_layers', 'permutation_scope')
        return {name: value for name, value in self.to_json().items() if name in names}

    def to_json(self) -> dict[str, Any]:
        """The settings with lists for tuples."""
        return json.loads(json.dumps(dataclasses.asdict(self)))
