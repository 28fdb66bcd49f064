"""Accuracy and perplexity against the effective window: the paper's Figure 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

from sa_jax.report import figures as looks
from sa_jax.report.training_free_scores import MEAN, Score, Scores
from sa_jax.report.training_free_tables import label, scale_label


class _Panel(NamedTuple):
    """What a panel shows: `score(pattern, window)` of a model."""

    scores: Scores
    what: str
    subtitle: str
    score: Callable[[str, int | None], Score | None]
    is_log: bool


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws a panel of the mean accuracy for each model, and one for each text's perplexity.

    Args:
      results: Of the training-free experiment, one for each model.
      path: The PNG to write, an SVG beside it.
    """
    rows = [_panels(result) for result in results]
    rows = [row for row in rows if row]
    if not rows:
        return
    if max(map(len, rows)) == 1:
        rows = [[row[0] for row in rows]]  # Models side by side.
    width = max(map(len, rows))
    with looks.style():
        figure, grid = plt.subplots(
            len(rows),
            width,
            figsize=(4.6 * width + 0.4, 4.0 * len(rows) + 0.5),
            squeeze=False,
            layout='constrained',
        )
        figure.get_layout_engine().set(wspace=0.04)
        handles: dict[str, Any] = {}
        for row, panels in zip(grid, rows, strict=True):
            for place, axes in enumerate(row):
                if place < len(panels):
                    handles |= _draw(axes, panels[place])
                else:
                    axes.axis('off')
        names = [name for name in looks.COLORS if name in handles]
        names += [name for name in handles if name not in names]
        figure.legend(
            [handles[name] for name in names],
            [label(name) for name in names],
            loc='outside upper center',
            ncols=len(names),
            frameon=False,
        )
        looks.note(figure, 'bars: standard deviation over the draws of the permutations')
        looks.save(figure, path)


def _panels(result: Mapping[str, Any]) -> list[_Panel]:
    scores, scale = Scores(result), scale_label(result)
    panels = []
    if scores.accuracies:
        tasks = list(scores.accuracies)
        what = f'mean of {len(tasks)} tasks' if len(tasks) > 1 else tasks[0]
        panels.append(_Panel(scores, f'accuracy, {what}, %', scale, _accuracy(scores), False))
    for task in scores.perplexities:
        panels.append(_Panel(scores, f'perplexity, {task}', scale, _perplexity(scores, task), True))
    return panels


def _accuracy(scores: Scores):
    return lambda pattern, window: scores.accuracy(MEAN, pattern, window)


def _perplexity(scores: Scores, task: str):
    return lambda pattern, window: scores.perplexity(task, pattern, window)


def _draw(axes: plt.Axes, panel: _Panel) -> dict[str, Any]:
    """Draws a panel; returns the line of each pattern."""
    scores, handles = panel.scores, {}
    full = panel.score('full', None)
    if full is not None:
        color = looks.COLORS['full']
        handles['full'] = axes.axhline(full.value, color=color, lw=1.6, ls=(0, (5, 2)), zorder=2)
    for pattern in scores.patterns:
        found = {window: panel.score(pattern, window) for window in scores.windows}
        found = {window: score for window, score in found.items() if score is not None}
        if pattern == 'full' or not found:
            continue
        spreads = [score.spread for score in found.values()]
        handles[pattern] = axes.errorbar(
            list(found),
            [score.value for score in found.values()],
            yerr=None if None in spreads else spreads,
            color=looks.COLORS.get(pattern, looks.MUTED),
            marker=looks.MARKERS.get(pattern, 'v'),
            ms=5,
            lw=2,
            capsize=3,
            zorder=3,
        )
    axes.set_xscale('log')
    axes.set_xticks(scores.windows, [str(window) for window in scores.windows])
    if panel.is_log:
        axes.set_yscale('log')
        low, high = axes.get_ylim()
        steps = (1.0, 3.0) if high > 100 * low else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.set_major_formatter(looks.PLAIN_NUMBERS)
    axes.minorticks_off()
    axes.set_xlabel('effective window, keys')
    axes.set_ylabel(panel.what)
    axes.set_title(scores.model, loc='left', pad=20)
    axes.text(0, 1.02, panel.subtitle, transform=axes.transAxes, fontsize=9, color=looks.MUTED)
    looks.tidy(axes)
    return handles
