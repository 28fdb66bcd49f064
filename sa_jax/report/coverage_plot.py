"""Coverage as figures: the receptive field against depth, and depth to coverage against n."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import pyplot as plt

from sa_jax.report import figures as looks
from sa_jax.report.coverage_tables import LABELS, connected, layers_to, size_label

_SETTINGS = ('bidirectional', 'causal')
_TITLES = {'bidirectional': 'Bidirectional', 'causal': 'Causal'}
# Where "all pairs connected" stands on a logarithmic axis of those that aren't, %.
_FLOOR = 0.0001


def plot_receptive_field(figures: Mapping[str, Any], path: Path) -> None:
    """Draws what a query sees, and which pairs aren't connected, against depth (Figure 2).

    Args:
      figures: of `experiments.receptive_field`.
      path: without a suffix; a PNG and an SVG are written.
    """
    cases = [x for x in figures['focus'] if x['setting'] in _SETTINGS]
    first = cases[0]
    with looks.style():
        figure, grid = plt.subplots(
            2, 2, figsize=(10.6, 7.8), sharex=True, sharey='row', layout='constrained'
        )
        figure.get_layout_engine().set(wspace=0.04, hspace=0.05)
        for (fields, rest), setting in zip(grid.T, _SETTINGS, strict=True):
            shown = [x for x in cases if x['setting'] == setting]
            _draw_fields(fields, shown)
            _draw_rest(rest, shown)
            fields.set_title(
                f'{_TITLES[setting]}, {first["n"]:,} tokens, w = {first["window"]:,}', loc='left'
            )
        # Room for the labels of the lines on top.
        grid[0][0].set_ylim(top=2 * first['n'])
        grid[0][0].set_ylabel('tokens that a query sees, mean')
        grid[1][0].set_ylabel('pairs not yet connected, %')
        _add_legend(figure, cases, 'formula')
        seeds = max(len(x['runs']) for x in cases)
        looks.note(figure, f'{size_label(first)}; {seeds} draws of all permutations, their mean')
        looks.save(figure, path)


def plot_depth(figures: Mapping[str, Any], window: int, path: Path) -> None:
    """Draws the layers to 99 and 100 % of the pairs against n.

    Args:
      figures: of `experiments.receptive_field`.
      window: whose cases are drawn.
      path: without a suffix; a PNG and an SVG are written.
    """
    cases = [x for x in figures['sweep'] if x['window'] == window]
    lengths = sorted({x['n'] for x in cases})
    with looks.style():
        figure, grid = plt.subplots(
            2, 2, figsize=(10.6, 8.2), sharex=True, sharey=True, layout='constrained'
        )
        figure.get_layout_engine().set(wspace=0.04, hspace=0.05)
        for row, (place, share) in zip(grid, ((1, '99 %'), (2, '100 %')), strict=True):
            for axes, setting in zip(row, _SETTINGS, strict=True):
                shown = [x for x in cases if x['setting'] == setting]
                _draw_depth(axes, shown, place, window, lengths)
                axes.set_title(
                    f'{_TITLES[setting]}, w = {window:,}: {share} of the pairs', loc='left'
                )
            row[0].set_ylabel('layers')
        for axes in grid[1]:
            axes.set_xlabel('tokens n')
        _add_legend(figure, cases, 'formula (hollow: deeper than was walked)')
        looks.note(figure, 'medians over draws; long sequences: of the sampled queries')
        looks.save(figure, path)


def _draw_fields(axes: plt.Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    n, is_causal = cases[0]['n'], cases[0]['setting'] == 'causal'
    admissible = (n + 1) / 2 if is_causal else n
    axes.axhline(admissible, color=looks.MUTED, lw=1, ls=(0, (4, 3)))
    deepest = max(_depths(x)[-1] for x in cases)
    place = {'xytext': (0, 6), 'textcoords': 'offset points', 'ha': 'right'}
    text = f'all: {admissible:,.0f}'
    axes.annotate(text, (deepest, admissible), **place, fontsize=9, color=looks.MUTED)
    for case in cases:
        means = [admissible * fmean(connected(case, x)) for x in _depths(case)]
        _line(axes, case['kind'], _depths(case), means)
        if case['expected_connected'] is not None:
            expected = [admissible * x for x in case['expected_connected']]
            _formula(axes, range(1, len(expected) + 1), expected)
    axes.set(yscale='log')
    axes.yaxis.set_major_formatter(looks.PLAIN_NUMBERS)
    looks.tidy(axes)


def _draw_rest(axes: plt.Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    for case in cases:
        rest = [100 * (1 - fmean(connected(case, x))) for x in _depths(case)]
        _line(axes, case['kind'], _depths(case), [max(x, _FLOOR) for x in rest])
        if case['expected_connected'] is not None:
            expected = [100 * (1 - x) for x in case['expected_connected']]
            shown = [(k, x) for k, x in enumerate(expected, start=1) if x >= _FLOOR]
            _formula(axes, *zip(*shown, strict=True))
    complete = [x for x in cases if connected(x, _depths(x)[-1]) == [1.0] * len(x['runs'])]
    for number, case in enumerate(complete):
        # One above the other, behind the last: several may end in the same place.
        behind = max(_depths(x)[-1] for x in complete)
        place = {'xytext': (12, 3 + 13 * number), 'textcoords': 'offset points'}
        text = f'{LABELS[case["kind"]]}: all after {_depths(case)[-1]}'
        color = looks.COLORS[case['kind']]
        axes.annotate(text, (behind, _FLOOR), **place, fontsize=9, color=color)
    axes.set(yscale='log', ylim=(_FLOOR / 1.6, 200), xlabel='layers')
    ticks = [100, 10, 1, 0.1, 0.01, 0.001, _FLOOR]
    axes.set_yticks(ticks, [*(f'{x:g}' for x in ticks[:-1]), f'≤ {_FLOOR:g}'])
    looks.tidy(axes)


def _draw_depth(axes, cases, place, window, lengths) -> None:
    for kind in dict.fromkeys(x['kind'] for x in cases):
        shown = sorted((x for x in cases if x['kind'] == kind), key=lambda x: x['n'])
        found = [(x, *layers_to(x, place)) for x in shown]
        measured = [(x['n'], layers) for x, layers, _ in found if layers is not None]
        expected = [(x['n'], layers) for x, _, layers in found if layers is not None]
        deeper = [(x['n'], e) for x, layers, e in found if layers is None and e is not None]
        if expected:
            _formula(axes, *zip(*expected, strict=True))
        if measured:
            _line(axes, kind, *zip(*measured, strict=True))
        if deeper:
            hollow = {'mfc': 'white', 'ls': 'none'}
            axes.plot(*zip(*deeper, strict=True), **_style(kind) | hollow)
    logs = [math.log(n) / math.log(window) for n in lengths]
    axes.plot(lengths, logs, color=looks.MUTED, lw=1.2)
    axes.annotate(
        'log_w n',
        (lengths[-1], logs[-1]),
        (0, -12),
        textcoords='offset points',
        ha='right',
        fontsize=9,
        color=looks.MUTED,
    )
    axes.set(xscale='log', yscale='log')
    axes.set_xticks(lengths, [f'{n:,}' for n in lengths], fontsize=9)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(looks.PLAIN_NUMBERS)
    looks.tidy(axes)


def _depths(case: Mapping[str, Any]) -> range:
    return range(1, max(x['layers'] for x in case['runs']) + 1)


def _style(kind: str) -> dict[str, Any]:
    style = {'color': looks.COLORS[kind], 'marker': looks.MARKERS[kind], 'label': LABELS[kind]}
    if kind == 'partition':
        # It goes where SA goes: a broad band below SA's line.
        return style | {'lw': 6, 'alpha': 0.35, 'ms': 9, 'zorder': 1}
    return style | {'lw': 2, 'ms': 5}


def _line(axes: plt.Axes, kind: str, x: Sequence, y: Sequence) -> None:
    axes.plot(x, y, **_style(kind))


def _formula(axes: plt.Axes, x: Sequence, y: Sequence) -> None:
    axes.plot(x, y, color=looks.INK, lw=1, ls=(0, (2, 2)), zorder=3)


def _add_legend(figure: plt.Figure, cases: Sequence[Mapping[str, Any]], formula: str) -> None:
    handles = [plt.Line2D([], [], **_style(x)) for x in dict.fromkeys(x['kind'] for x in cases)]
    handles.append(plt.Line2D([], [], color=looks.INK, lw=1, ls=(0, (2, 2)), label=formula))
    figure.legend(handles=handles, loc='outside upper center', ncols=len(handles), frameon=False)
