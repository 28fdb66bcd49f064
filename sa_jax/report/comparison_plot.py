"""Figures of compared variants: their scores, and what they learn over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from sa_jax.report import figures as looks
from sa_jax.report.comparison_tables import METRICS, REFERENCE, values

_LAYER_COLORS = [looks.COLORS[x] for x in ('swa', 'local_sa', 'sa_swa', 'sa', 'partition', 'moba')]
_FAR = 1.5  # times the median, or a part of it
_GROUP_COLORS = {name: looks.COLORS[x] for name, x in (('main', 'swa'), ('controls', 'sa'))}


def plot(figures: Mapping[str, Any], folder: Path) -> None:
    """Draws each of variants, learning and gates as .png and .svg.

    The main variants' learning, the reference variant's gates. What no finished run tells isn't
    drawn: scores may lack a learning curve.

    Args:
      figures: of `training.comparison.collect`.
      folder: receives the files.
    """
    runs = figures['runs']
    gated = [run for run in runs if run['variant'] == REFERENCE and run['gates']['steps']]
    main = [run for run in runs if run['group'] == 'main']
    learning = [run for run in main if run.get('learning_curve', {}).get('steps')]
    with looks.style():
        looks.save(_scores(runs), folder / 'variants')
        if learning:
            looks.save(_learning(learning), folder / 'learning')
        if gated:
            looks.save(_gates(gated), folder / 'gates')


def _scores(runs: Sequence[Mapping[str, Any]]) -> plt.Figure:
    """A row for each variant: a dot for each seed, a stroke for their mean.

    What would hide the others' differences is written at the edge.
    """
    groups = dict.fromkeys((run['group'], run['variant']) for run in runs)
    rows = list(groups)[::-1]
    figure, panels = plt.subplots(
        1,
        len(METRICS),
        figsize=(4.2 * len(METRICS), 1.2 + 0.32 * len(rows)),
        sharey=True,
        layout='constrained',
    )
    for axes, (metric, (title, _, _)) in zip(panels, METRICS.items(), strict=True):
        means = {x: np.mean(list(values(runs, x, metric).values())) for _, x in rows}
        median = np.median(list(means.values()))
        for y, (group, variant) in enumerate(rows):
            found = list(values(runs, variant, metric).values())
            color = _GROUP_COLORS.get(group, looks.COLORS['sa_swa'])
            mean = means[variant]
            if not median / _FAR <= mean <= median * _FAR:
                is_above = mean > median
                axes.text(
                    float(is_above),
                    y,
                    f'{mean:.1f} →' if is_above else f' ← {mean:.1f}',
                    color=color,
                    transform=axes.get_yaxis_transform(),
                    ha='right' if is_above else 'left',
                    va='center',
                )
                continue
            axes.plot(found, [y] * len(found), 'o', color=color, alpha=0.7, ms=5, mew=0)
            axes.plot([mean] * 2, [y - 0.3, y + 0.3], color=color, lw=2)
        reference = list(values(runs, REFERENCE, metric).values())
        if reference:
            axes.axvline(np.mean(reference), color=looks.MUTED, lw=1, ls=(0, (2, 3)), zorder=0)
        axes.set_title(title, loc='left')
        axes.margins(x=0.15)
        axes.locator_params(axis='x', nbins=5)
        axes.grid(axis='x', color='#EEEEEE')
        axes.spines[['top', 'right']].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [variant for _, variant in rows])
    looks.note(
        figure, f'a dot is a seed, a stroke the mean; dotted: {REFERENCE}; arrows: off the scale'
    )
    return figure


def _learning(runs: Sequence[Mapping[str, Any]]) -> plt.Figure:
    """A curve for each variant, a thin line a seed."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout='constrained')
    for variant in dict.fromkeys(run['variant'] for run in runs):
        curves = [run['learning_curve'] for run in runs if run['variant'] == variant]
        color = looks.COLORS.get(variant, looks.MUTED)
        for curve in curves:
            axes.plot(curve['steps'], curve['perplexity'], color=color, lw=0.6, alpha=0.5)
        mean = np.mean([curve['perplexity'] for curve in curves], axis=0)
        axes.plot(curves[0]['steps'], mean, color=color, lw=2, label=variant)
    axes.set(xlabel='step', ylabel='held-out perplexity', yscale='log')
    axes.yaxis.set_major_formatter(looks.PLAIN_NUMBERS)
    axes.yaxis.set_minor_formatter(looks.PLAIN_NUMBERS)
    axes.legend(frameon=False, fontsize=9)
    looks.tidy(axes)
    looks.note(figure, 'thin: seeds; thick: their mean')
    return figure


def _gates(runs: Sequence[Mapping[str, Any]]) -> plt.Figure:
    """A panel for each path: the mean gate of each layer over the steps, a thin line a seed."""
    paths = list(runs[0]['gates']['means'])
    figure, panels = plt.subplots(
        1, len(paths), figsize=(4.6 * len(paths), 3.6), sharey=True, layout='constrained'
    )
    for axes, path in zip(panels, paths, strict=True):
        curves = np.array([run['gates']['means'][path] for run in runs])  # [seeds, steps, layers]
        steps = runs[0]['gates']['steps']
        for layer in range(curves.shape[2]):
            color = _LAYER_COLORS[layer % len(_LAYER_COLORS)]
            axes.plot(steps, curves[:, :, layer].T, color=color, lw=0.6, alpha=0.5)
            mean = curves[:, :, layer].mean(0)
            axes.plot(steps, mean, color=color, lw=2, label=f'layer {layer}')
        axes.set_title(path.partition('_')[2].replace('_', ' '), loc='left')
        axes.set(xlabel='step', ylim=(0, 1))
        axes.spines[['top', 'right']].set_visible(False)
    panels[0].set_ylabel('mean gate')
    panels[-1].legend(frameon=False, fontsize=9)
    looks.note(figure, 'thin: seeds; thick: their mean')
    return figure
