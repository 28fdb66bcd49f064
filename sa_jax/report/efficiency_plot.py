"""Time against length, log-log, beside the slopes of linear and quadratic cost."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from sa_jax.benchmarks import patterns, peers
from sa_jax.benchmarks.settings import Case
from sa_jax.report import figures as looks
from sa_jax.report.efficiency_tables import Measurements, device_label, is_peer, settings_label

_COLORS = {
    'full': looks.COLORS['full'],
    'sliding_window': looks.COLORS['swa'],
    patterns.TWO_SIDED: looks.COLORS['local_sa'],
    'stochastic': looks.COLORS['sa'],
    patterns.GATED: looks.COLORS['sa_swa'],
    'stochastic_partition': looks.COLORS['partition'],
    'moba': looks.COLORS['moba'],
}
# Solid is this package; a peer has the colour of its pattern and dashes of its own.
_DASHES = {
    'jax_xla': (0, (1, 1.2)),
    'jax_cudnn': (0, (5, 1.5)),
    'tokamax': (0, (6, 1.5, 1, 1.5)),
    'torch_sdpa': (0, (3.5, 1.5)),
    'torch_flex': (0, (1.5, 1.5)),
}
_TITLES = {'forward': 'Forward', 'forward_backward': 'Forward + backward'}


def plot(result: dict, path: Path) -> None:
    """Draws a panel for each precision and mode that was measured.

    Args:
      result: of the efficiency experiment.
      path: the PNG to write, an SVG beside it.
    """
    data = Measurements(result)
    groups = list(dict.fromkeys((x.dtype, x.mode) for x in data.cases))
    if not groups:
        return
    with looks.style():
        figure, panels = plt.subplots(
            1,
            len(groups),
            figsize=(6.2 * len(groups) + 0.6, 5.6),
            sharey=True,
            squeeze=False,
            layout='constrained',
        )
        figure.get_layout_engine().set(wspace=0.04)
        medians = [data.time(x, n).median for x in data.cases for n in _measured(data, x)]
        limits = min(medians) / 2.5, max(medians) * 2
        for axes, (dtype, mode) in zip(panels[0], groups, strict=True):
            axes.set(xscale='log', yscale='log', ylim=limits)
            _draw(axes, data, [x for x in data.cases if (x.dtype, x.mode) == (dtype, mode)])
            axes.set_title(f'{_TITLES[mode]}, {dtype}', loc='left')
        panels[0][0].set_ylabel('time of a call, ms')
        settings = f'{device_label(result)}; {settings_label(result)}'
        looks.note(figure, f'{settings}; medians, shaded between the quartiles')
        looks.save(figure, path)


def _measured(data: Measurements, case: Case) -> list[int]:
    return [n for n in data.lengths if data.time(case, n)]


def _draw(axes: plt.Axes, data: Measurements, cases: list[Case]) -> None:
    ends: dict[tuple[int, float], list[tuple]] = {}
    for case in cases:
        lengths = _measured(data, case)
        times = [data.time(case, n) for n in lengths]
        color = _COLORS.get(case.kind, looks.MUTED)
        medians = [x.median for x in times]
        axes.plot(
            lengths,
            medians,
            color=color,
            ls=_DASHES.get(case.implementation, '-'),
            lw=1.3 if is_peer(case) else 2.2,
            marker='o',
            ms=2.5 if is_peer(case) else 4.5,
            zorder=2 if is_peer(case) else 3,
        )
        low, high = [x.low for x in times], [x.high for x in times]
        axes.fill_between(lengths, low, high, color=color, alpha=0.18, lw=0)
        if lengths[-1] == data.lengths[-1]:
            distance = 1.45
        else:
            # Beside the end; before it, if other lines of the pattern go on.
            longest = max(_measured(data, x)[-1] for x in cases if x.kind == case.kind)
            distance = 1.15 if lengths[-1] == longest else 1 / 1.15
        end = lengths[-1], distance
        ends.setdefault(end, []).append((medians[-1], _label(case), color))
    axes.set_xticks(data.lengths, [_short(n) for n in data.lengths])
    axes.minorticks_off()
    axes.set_xlabel('tokens')
    looks.tidy(axes)
    axes.tick_params(axis='y', labelleft=True)
    for (length, distance), names in ends.items():
        _label_ends(axes, length, distance, names)
    _guides(axes, data, cases)


def _guides(axes: plt.Axes, data: Measurements, cases: list[Case]) -> None:
    """Faint lines of linear growth below all others, and of quadratic growth before them."""
    points = [(n, data.time(x, n).median) for x in cases for n in _measured(data, x)]
    x = np.array([data.lengths[0], data.lengths[-1]], float)
    _guide(axes, x, min(y / n for n, y in points) / 1.6 * x, 'O(n)', 'top')
    # Its upper part only: at short lengths a call costs more than the square's share.
    slowest = max(y for _, y in points)
    factor = 2.2 * max(y / n**2 for n, y in points if y > slowest / 5)
    top = (axes.get_ylim()[1] / factor) ** 0.5
    x = np.array([top / 4, top])
    _guide(axes, x, factor * x**2, 'O(n²)', 'bottom')


def _guide(axes: plt.Axes, x: np.ndarray, y: np.ndarray, name: str, side: str) -> None:
    limits = axes.get_xlim()
    axes.plot(x, y, color='#AAAAAA', lw=1, ls=(0, (2, 3)), zorder=1)
    middle = (np.prod(x) ** 0.5, np.prod(y) ** 0.5)
    offset, align = ((6, -4), 'left') if side == 'top' else ((-6, 4), 'right')
    axes.annotate(
        name,
        middle,
        offset,
        textcoords='offset points',
        color=looks.MUTED,
        fontsize=9,
        ha=align,
        va=side,
    )
    axes.set_xlim(limits)


def _label_ends(axes: plt.Axes, length: int, distance: float, names: list[tuple]) -> None:
    """Names the lines that end at a length, apart from one another, each tied to its end."""
    align = 'left' if distance > 1 else 'right'
    names = sorted(names)
    heights = _apart(np.log([y for y, _, _ in names]), np.log(axes.get_ylim()))
    for (y, name, color), height in zip(names, heights, strict=True):
        axes.annotate(
            name,
            (length, y),
            (length * distance, np.exp(height)),
            color=color,
            fontsize=9,
            ha=align,
            va='center',
            arrowprops={
                'arrowstyle': '-',
                'color': color,
                'lw': 0.6,
                'alpha': 0.6,
                'relpos': (0 if align == 'left' else 1, 0.5),
                'shrinkA': 1,
                'shrinkB': 3,
            },
            annotation_clip=False,
        )


def _apart(heights: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Moves ascending heights until they are a line of text apart."""
    gap = (limits[1] - limits[0]) / 25
    heights = heights.copy()
    for _ in range(500):
        lack = gap - np.diff(heights)
        push = np.where(lack > 1e-6, lack / 2, 0)
        heights[:-1] -= push
        heights[1:] += push
        heights += max(0.0, limits[0] - heights[0]) - max(0.0, heights[-1] - limits[1])
    return heights


def _label(case: Case) -> str:
    if case.implementation == 'default':
        return patterns.label(case.kind)
    who = peers.LABELS.get(case.implementation, case.implementation)
    return f'{patterns.label(case.kind)}, {who}'


def _short(length: int) -> str:
    return f'{length // 1024}k' if length % 1024 == 0 else str(length)
