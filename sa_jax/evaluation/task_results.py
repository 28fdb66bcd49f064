"""Figures of a task, with their standard errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Metric(NamedTuple):
    """A figure over the items of a task.

    Attributes:
      value: The mean over the items; for 'perplexity' its exponential.
      stderr: The standard error, from the spread of the items; None for a single one.
    """

    value: float
    stderr: float | None


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """How a model does on a task.

    Attributes:
      metrics: By the names of lm-evaluation-harness.
      num_items: Items, or windows of a text; None where it isn't known.
      mean_tokens: Tokens that the model reads of an item, the mean over all items; None if it
        isn't known.
      share_longer: By effective window, the share of the items that are longer than it.
      num_truncated: Requests that were too long and were cut.
      num_dropped: Tokens cut from them.
      per_item: By metric `[num_items]`, what is averaged; empty where it isn't known. Not for
        publication.
    """

    metrics: Mapping[str, Metric]
    num_items: int | None
    mean_tokens: float | None
    share_longer: Mapping[int, float]
    num_truncated: int
    num_dropped: int
    per_item: Mapping[str, np.ndarray]

    def aggregates(self) -> dict[str, Any]:
        """All but the outcomes of single items, for a JSON file."""
        return {
            'metrics': {name: metric._asdict() for name, metric in self.metrics.items()},
            'num_items': self.num_items,
            'mean_tokens': self.mean_tokens,
            'share_longer': {str(window): share for window, share in self.share_longer.items()},
            'num_truncated': self.num_truncated,
            'num_dropped': self.num_dropped,
        }


def summarize(
    outcomes: Sequence[Mapping[str, float]],
    *,
    num_read: Sequence[int],
    num_dropped: Sequence[int],
    effective_windows: Sequence[int],
) -> TaskResult:
    """Averages over items.

    Args:
      outcomes: Of each item, by metric: 1 for a hit and 0 for none; for 'perplexity' the negative
        log probability.
      num_read: The tokens that the model reads of each item.
      num_dropped: The tokens that were cut from each request.
      effective_windows: What `num_read` is compared with.
    """
    per_item = {
        name: np.array([outcome[name] for outcome in outcomes], np.float64) for name in outcomes[0]
    }
    num_read = np.array(num_read)
    return TaskResult(
        metrics={name: _metric(name, values) for name, values in per_item.items()},
        num_items=len(outcomes),
        mean_tokens=float(num_read.mean()),
        share_longer={window: float((num_read > window).mean()) for window in effective_windows},
        num_truncated=sum(dropped > 0 for dropped in num_dropped),
        num_dropped=sum(num_dropped),
        per_item=per_item,
    )


def _metric(name: str, values: np.ndarray) -> Metric:
    mean = float(values.mean())
    stderr = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    if name != 'perplexity':
        return Metric(mean, stderr)
    # The error of an exponential, to first order.
    value = math.exp(mean)
    return Metric(value, None if stderr is None else value * stderr)
