"""Time against length, log-log, beside the slopes of linear and quadratic cost."""

from pathlib import Path

import matplotlib
import numpy as np

from sa_jax.benchmarks import patterns, peers
from sa_jax.benchmarks.settings import Case
from sa_jax.report.efficiency_tables import Measurements, device_label, is_peer, settings_label

matplotlib.use('Agg')
from matplotlib import pyplot as plt

_INK, _MUTED = '#222222', '#8A8A8A'
# Okabe and Ito's colours: colour-blind readers tell them apart.
_COLORS = {
    'full': _INK,
    'sliding_window': '#0072B2',
    patterns.TWO_SIDED: '#56B4E9',
    'stochastic': '#E69F00',
    patterns.GATED: '#009E73',
    'stochastic_partition': '#D55E00',
    'moba': '#CC79A7',
}
# Solid is this package; a peer has the colour of its pattern and dashes of its own.
_DASHES = {
    'jax_xla': (0, (1, 1.2)),
    'jax_cudnn': (0, (5, 1.5)),
    'tokamax': (0, (6, 1.5, 1, 1.5)),
    'torch_sdpa': (0, (3.5, 1.5)),
    'torch_flex': (0, (1.5, 1.5)),
}
_TITLES = {'forward': 'forward', 'forward_backward': 'forward + backward'}
_STYLE = {
    'font.size': 11,
    'axes.titlesize': 12,
    'axes.titleweight': 'bold',
    'text.color': _INK,
    'axes.labelcolor': _INK,
    'axes.edgecolor': '#888888',
    'xtick.color': '#555555',
    'ytick.color': '#555555',
}


def plot(result: dict, path: Path) -> None:
    """Draws a panel for each precision and mode that was measured.

    Args:
      result: of the efficiency experiment.
      path: the PNG to write.
    """
    data = Measurements(result)
    groups = list(dict.fromkeys((x.dtype, x.mode) for x in data.cases))
    if not groups:
        return
    with plt.rc_context(_STYLE):
        figure, panels = plt.subplots(
            1,
            len(groups),
            figsize=(6.2 * len(groups) + 0.6, 5.6),
            sharey=True,
            squeeze=False,
            layout='constrained',
        )
        figure.get_layout_engine().set(wspace=0.04)
        for axes, (dtype, mode) in zip(panels[0], groups, strict=True):
            cases = [x for x in data.cases if (x.dtype, x.mode) == (dtype, mode)]
            _draw(axes, data, cases)
            axes.set_title(f'{_TITLES[mode].capitalize()}, {dtype}', loc='left')
        panels[0][0].set_ylabel('time of a call, ms')
        figure.supxlabel(
            f'{device_label(result)}; {settings_label(result)}; '
            'medians, shaded between the quartiles',
            fontsize=9,
            color=_MUTED,
        )
        figure.savefig(path, dpi=160, facecolor='white')
        plt.close(figure)


def _draw(axes: plt.Axes, data: Measurements, cases: list[Case]) -> None:
    ends = []
    for case in cases:
        lengths = [n for n in data.lengths if data.time(case, n)]
        times = [data.time(case, n) for n in lengths]
        color = _COLORS.get(case.kind, _MUTED)
        medians = [x.median for x in times]
        axes.plot(
            lengths,
            medians,
            color=color,
            ls=_DASHES.get(case.implementation, '-'),
            lw=1.5 if is_peer(case) else 2.2,
            marker='o',
            ms=3 if is_peer(case) else 4.5,
            zorder=2 if is_peer(case) else 3,
        )
        low, high = [x.low for x in times], [x.high for x in times]
        axes.fill_between(lengths, low, high, color=color, alpha=0.18, lw=0)
        ends.append((lengths[-1], medians[-1], _label(case), color))
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    axes.set_xticks(data.lengths, [_short(n) for n in data.lengths])
    axes.minorticks_off()
    axes.grid(axis='y', color='#EEEEEE', lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel('tokens')
    axes.spines[['top', 'right']].set_visible(False)
    axes.tick_params(axis='y', labelleft=True)
    _guides(axes, data.lengths)
    _label_ends(axes, ends, data.lengths)


def _guides(axes: plt.Axes, lengths: list[int]) -> None:
    """Faint lines of linear and quadratic growth through the panel's lower left corner."""
    bottom, top = axes.get_ylim()
    x = np.array([lengths[0], lengths[-1]], float)
    for power, name in ((1, 'O(n)'), (2, 'O(n²)')):
        y = bottom * 1.25 * (x / x[0]) ** power
        axes.plot(x, y, color='#BBBBBB', lw=1, ls=(0, (2, 3)), zorder=1)
        # The name stands on the line, at its last point inside the panel.
        inside = min(x[1], x[0] * (top / bottom / 1.6) ** (1 / power))
        middle = x[0] * (inside / x[0]) ** 0.8
        axes.text(
            middle,
            bottom * 1.25 * (middle / x[0]) ** power,
            name,
            color=_MUTED,
            fontsize=9,
            ha='center',
            va='center',
            bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 1.5},
            zorder=1.5,
        )
    axes.set_ylim(bottom, top)


def _label_ends(axes: plt.Axes, ends: list[tuple], lengths: list[int]) -> None:
    """Names each line at the right, apart from one another, tied to its end by a thin line."""
    bottom, top = np.log(axes.get_ylim())
    gap = (top - bottom) / 24
    ends = sorted(ends, key=lambda x: x[1])
    heights = np.log([x[1] for x in ends])
    for _ in range(200):
        # Neighbours that stand too close push each other away.
        for i in range(len(heights) - 1):
            lack = gap - (heights[i + 1] - heights[i])
            if lack > 0:
                heights[i] -= lack / 2
                heights[i + 1] += lack / 2
        heights = np.clip(heights, bottom, top + 2 * gap)
    factor = (lengths[-1] / lengths[0]) ** 0.035 if len(lengths) > 1 else 1.05
    for (x, y, name, color), height in zip(ends, heights, strict=True):
        axes.annotate(
            name,
            (x, y),
            (lengths[-1] * factor, np.exp(height)),
            color=color,
            fontsize=9,
            va='center',
            arrowprops={'arrowstyle': '-', 'color': color, 'lw': 0.5, 'alpha': 0.5},
            annotation_clip=False,
        )


def _label(case: Case) -> str:
    if case.implementation == 'default':
        return patterns.label(case.kind)
    who = peers.LABELS.get(case.implementation, case.implementation)
    return f'{patterns.label(case.kind)}, {who}'


def _short(length: int) -> str:
    return f'{length // 1024}k' if length % 1024 == 0 else str(length)
