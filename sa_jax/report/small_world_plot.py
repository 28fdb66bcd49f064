"""Figure 1: clustering against path length, from the result of the small-world experiment."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

from sa_jax.report import figures as looks

_STYLES = {
    'swa': (looks.COLORS['swa'], 'o', 'SWA'),
    'sa': (looks.COLORS['sa'], 's', 'SA'),
    'sa_swa': (looks.COLORS['sa_swa'], 'D', 'SA + SWA'),
    'watts_strogatz': ('#999999', '.', 'Watts–Strogatz, share rewired'),
    'connectome': (looks.COLORS['partition'], '*', 'measured'),
}
# Where a label stands. SA over one layer more coincides with SA + SWA: theirs are on either side.
_LABELS = {'sa': ((-8, -3), 'right'), 'watts_strogatz': ((0, 6), 'center')}
# SA in one layer coincides with SWA, which has to show around it.
_SIZES = {'swa': 12, 'connectome': 15}
_PUBLISHED = (looks.COLORS['partition'], 'P', 'published')
_TITLE = (
    'Patterns and rings with as many nodes and edges as a connectome. Dashed lines lie halfway '
    'between SWA and a random graph with its degrees.'
)
_REGIMES = '#F3EFE3'


def plot(result: Mapping[str, Any], folder: Path) -> None:
    """Writes small_world.png and small_world.svg.

    Args:
      result: of the small-world experiment.
      folder: receives the files.
    """
    groups = result['figures']['groups']
    with looks.style():
        figure, panels = plt.subplots(
            1, len(groups), figsize=(5.6 * len(groups), 5.4), squeeze=False, layout='constrained'
        )
        for axes, group in zip(panels[0], groups, strict=True):
            _panel(axes, group)
        panels[0][0].set_ylabel('clustering')
        figure.suptitle(textwrap.fill(_TITLE, 80 * len(groups)), fontsize=10)
        looks.save(figure, folder / 'small_world')


def _panel(axes: plt.Axes, group: Mapping[str, Any]) -> None:
    axes.set(xscale='log', yscale='log', xlabel='mean shortest path, hops')
    axes.set_title(
        f'{group["name"]}\nn = {group["tokens"]:,}, {group["window"] - 1} outgoing edges',
        loc='left',
    )
    for kind, (color, marker, label) in _STYLES.items():
        points = [x for x in map(_point, group['rows']) if x and x[0] == kind]
        if not points:
            continue
        _, x, y, names = zip(*points, strict=True)
        line = '-' if len(points) > 1 else ''
        axes.plot(x, y, line, color=color, marker=marker, ms=_SIZES.get(kind, 7), lw=1, label=label)
        offset, align = _LABELS.get(kind, ((8, -3), 'left'))
        for at, name in zip(zip(x, y, strict=True), names, strict=True):
            axes.annotate(
                name,
                at,
                offset,
                textcoords='offset points',
                color=color,
                fontsize=8,
                ha=align,
            )
    if group['published']:
        color, marker, label = _PUBLISHED
        figures = group['published']
        at = figures['path_length'], figures['clustering_parallel']
        label = f'{label}, {figures["nodes_with_edges"]:,} neurons'
        axes.plot(*at, color=color, marker=marker, ms=11, ls='', label=label)
    _regimes(axes, group['rows'])
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc='lower right')


def _point(row: Mapping[str, Any]) -> tuple[str, float, float, str] | None:
    """Kind, path length, clustering and what tells it from others of its kind."""
    length = row['statistics']['path_length']
    clustering = row['statistics']['clustering']['parallel']['value']
    if length is None or not clustering:
        return None
    name = ''
    if row['kind'] in ('sa', 'sa_swa'):
        name = f'{row["layers"]} layer{"s" * (row["layers"] > 1)}'
    if row['kind'] == 'watts_strogatz':
        name = f'{row["rewired"]:g}'
    return row['kind'], length['value'], clustering, name


def _regimes(axes: plt.Axes, rows: list[Mapping[str, Any]]) -> None:
    """Names the corners, parted halfway between SWA and a random graph of its degrees."""
    swa = next(x['statistics'] for x in rows if x['kind'] == 'swa')
    random = swa['matched']
    if swa['path_length'] is None or random['path_length'] is None:
        return
    length = np.sqrt(swa['path_length']['value'] * random['path_length']['value'])
    clustering = np.sqrt(swa['clustering']['parallel']['value'] * random['clustering']['value'])
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    left, right, bottom, top = left / 2.2, right * 1.3, bottom / 2, top * 1.8
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.axvline(length, color='#BBBBBB', lw=1, ls=(0, (4, 3)), zorder=0)
    if not clustering:
        return
    axes.axhline(clustering, color='#BBBBBB', lw=1, ls=(0, (4, 3)), zorder=0)
    axes.fill_between([left, length], clustering, top, color=_REGIMES, lw=0, zorder=-1)
    corners = (('small world', 0.02, 0.98, 'left', 'top'), ('lattice', 0.98, 0.98, 'right', 'top'))
    for name, x, y, across, along in (*corners, ('random', 0.02, 0.02, 'left', 'bottom')):
        axes.text(
            x,
            y,
            name,
            ha=across,
            va=along,
            transform=axes.transAxes,
            fontsize=11,
            style='italic',
            color='#777777',
        )


def _plain_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of each decade, 1 and 3 where there are many, without powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 3) if high > 100 * low else (1, 2, 5)))
    axis.set_major_formatter(looks.PLAIN_NUMBERS)
    axis.set_minor_locator(NullLocator())
