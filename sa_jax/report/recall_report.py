"""The recall experiment as a table and a figure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from sa_jax.report import figures as looks
from sa_jax.report import markdown

_LABELS = {'full': 'full', 'swa': 'SWA', 'sa': 'SA', 'sa_swa': 'SA + SWA'}


def table(result: Mapping[str, Any]) -> str:
    """Accuracy by distance in Markdown.

    Args:
      result: of the recall experiment.
    """
    config, figures = result['config'], result['figures']
    variants = list(figures['reach'])
    preface = (
        f'{config["tokens"]} tokens, {config["layers"]} layers, w = {config["window"]}, '
        f'{config["steps"]} steps of {config["rows"]} rows. Recalled values, %: mean over seeds '
        '(± sample standard deviation); in parentheses the pairs of tokens so far apart that the '
        f'masks of all layers connect. Guessing: {100 * figures["chance"]:.1f}. SWA reaches '
        f'{figures["swa_reach"]} tokens.'
    )
    rows = []
    for place, name in enumerate(_names(figures['edges'])):
        cells = []
        for variant in variants:
            found = 100 * _accuracy(figures, variant)[:, place]
            spread = f' ± {found.std(ddof=1):.1f}' if len(found) > 1 else ''
            cells.append(
                f'{found.mean():.1f}{spread} ({100 * figures["reach"][variant][place]:.0f})'
            )
        rows.append([name, *cells])
    header = ['distance', *(_LABELS[x] for x in variants)]
    return f'{preface}\n\n{markdown.table(header, *rows)}\n'


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws accuracy against distance, the connected share dotted beside it.

    Args:
      result: of the recall experiment.
      path: of the PNG and the SVG, without suffix.
    """
    config, figures = result['config'], result['figures']
    edges = np.array(figures['edges'])
    middles = (edges[:-1] + edges[1:] - 1) / 2
    with looks.style():
        figure, axes = plt.subplots(figsize=(8.4, 4.6), layout='constrained')
        for variant, connected in figures['reach'].items():
            color = looks.COLORS[variant]
            found = 100 * _accuracy(figures, variant)
            axes.plot(middles, found.T, color=color, lw=0.7, alpha=0.5)
            axes.plot(
                middles,
                found.mean(0),
                color=color,
                marker=looks.MARKERS.get(variant, 'x'),
                ms=5,
                lw=2,
                label=_LABELS[variant],
            )
            if variant != 'full':
                axes.plot(middles, 100 * np.array(connected), color=color, lw=1.2, ls=(0, (1, 2)))
        axes.plot([], [], color=looks.MUTED, lw=1.2, ls=(0, (1, 2)), label='connected by the masks')
        axes.axhline(100 * figures['chance'], color=looks.MUTED, lw=1, ls=(0, (4, 3)))
        axes.axvline(figures['swa_reach'] + 0.5, color=looks.COLORS['swa'], lw=1, ls=(0, (4, 3)))
        axes.set(xlabel='tokens back to the value', ylabel='recalled values, %', ylim=(0, 104))
        axes.set_title(
            f'{config["tokens"]} tokens, {config["layers"]} layers, w = {config["window"]}',
            loc='left',
        )
        looks.tidy(axes)
        axes.legend(frameon=False, loc='center left', bbox_to_anchor=(1, 0.5))
        looks.note(figure, "dashed: guessing, and the end of SWA's reach; thin lines: seeds")
        looks.save(figure, path)


def _accuracy(figures: Mapping[str, Any], variant: str) -> np.ndarray:
    """By seed and bin."""
    return np.array([x['accuracy'] for x in figures['cases'] if x['variant'] == variant])


def _names(edges: list[int]) -> list[str]:
    return [
        f'{low}' if high == low + 1 else f'{low} to {high - 1}'
        for low, high in itertools.pairwise(edges)
    ]
