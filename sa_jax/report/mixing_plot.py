"""Figures of the mixing experiment: errors against the window, and mixing against depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from sa_jax.report import figures as looks
from sa_jax.report.mixing_tables import exponent, source_label

_SWA, _SA, _BIAS = (looks.COLORS[name] for name in ('swa', 'sa', 'partition'))
_SHADES = ('#F6D58E', '#E69F00', '#8C6100')
_COLUMNS = (
    ('bidirectional', 'all', 'Bidirectional'),
    ('causal', 'all', 'Causal, all queries'),
    ('causal', 'later half', 'Causal, later half of the queries'),
)


def plot(result: Mapping[str, Any], folder: Path) -> None:
    """Draws estimator_SOURCE for each source and spectra, as PNG and SVG each.

    Args:
      result: of the mixing experiment.
      folder: receives the files.
    """
    cases = result['figures']['errors']
    with looks.style():
        for source in dict.fromkeys(case['source'] for case in cases):
            figure = _errors([x for x in cases if x['source'] == source], result['config'])
            looks.save(figure, folder / f'estimator_{source.replace(" ", "_")}')
        looks.save(_spectra(result['figures']['spectra']), folder / 'spectra')


def _errors(cases: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> plt.Figure:
    """Panels by weights, and by mask and queries."""
    figure, grid = plt.subplots(
        2, len(_COLUMNS), figsize=(13.5, 8.2), sharex=True, sharey=True, layout='constrained'
    )
    figure.get_layout_engine().set(wspace=0.03, hspace=0.04)
    by_place = {(x['weights'], x['mask'], x['queries']): x for x in cases}
    for row, weights in zip(grid, ('uniform', 'softmax'), strict=True):
        for axes, (mask, queries, title) in zip(row, _COLUMNS, strict=True):
            handles = _draw_errors(axes, by_place[weights, mask, queries])
            axes.set_title(f'{title}\n{weights} weights', loc='left')
    for axes in grid[1]:
        axes.set_xlabel('keys that a query sees on average, w')
    figure.legend(handles=handles, loc='outside upper center', ncols=len(handles), frameon=False)
    low, high = grid[0, 0].get_ylim()
    grid[0, 0].set_ylim(low * (low / high) ** 0.3, high)  # room for the exponents
    figure.supylabel('squared error, relative to the spread of the values', fontsize=11)
    source = source_label(cases[0]['source'])
    if config['model'] and cases[0]['source'] != 'random':
        source = f'{config["model"]}, {cases[0]["source"]}'
    note = 'Error bars: two standard errors over the draws. Exponents of w: 95 % intervals.'
    later = 'In the later half SA sees about 1.5·w keys, SWA w.'
    size = f'{config["tokens"]:,} tokens, {config["draws"]} permutations'
    looks.note(figure, f'{source}: {size}. {note} {later}')
    return figure


def _draw_errors(axes: plt.Axes, case: Mapping[str, Any]) -> list[Any]:
    """Draws a panel; returns what its legend shows."""
    points, fits = case['points'], case['fits']
    windows = np.array([x['window'] for x in points])
    axes.set(xscale='log', yscale='log')
    series = (
        ('bias_squared', _BIAS, 's', 'SA: bias², what averaging over permutations leaves'),
        ('variance', _SA, 'o', 'SA: variance over permutations'),
    )
    handles = []
    for name, color, marker, label in series:
        values = np.array([x[name]['value'] for x in points])
        errors = 2 * np.array([x[name]['standard_error'] for x in points])
        shown = values > errors  # nothing below is known to be above zero
        handles.append(
            axes.errorbar(
                windows[shown],
                values[shown],
                yerr=errors[shown],
                color=color,
                marker=marker,
                ms=6,
                lw=0,
                elinewidth=1.5,
                capsize=3,
                zorder=3,
                label=label,
            )
        )
        expected = [x[f'first_order_{name}'] for x in points]
        axes.plot(windows, expected, color=color, lw=1.2, ls=(0, (4, 2)), zorder=2)
    sliding = [x['sliding_squared'] for x in points]
    handles += axes.plot(
        windows,
        sliding,
        color=_SWA,
        marker='D',
        ms=5,
        lw=2,
        zorder=2,
        label='SWA: bias², its whole error',
    )
    dashes = {'color': looks.MUTED, 'lw': 1.2, 'ls': (0, (4, 2))}
    (line,) = axes.plot([], [], **dashes, label='first-order formula')
    names = (
        ('bias', 'SA bias', _BIAS),
        ('variance', 'SA variance', _SA),
        ('sliding', 'SWA bias', _SWA),
    )
    for place, (name, label, color) in enumerate(names):
        axes.text(
            0.03,
            0.04 + 0.065 * (2 - place),
            f'{label} ∝ $w^x$, x = {exponent(fits[name])}',
            transform=axes.transAxes,
            color=color,
            fontsize=9,
        )
    axes.set_xticks(windows, [str(x) for x in windows])
    axes.minorticks_off()
    looks.tidy(axes)
    return [*handles, line]


def _spectra(cases: Sequence[Mapping[str, Any]]) -> plt.Figure:
    """The gap against n, and singular values and total variation against depth."""
    figure, (gap, singular, distance) = plt.subplots(1, 3, figsize=(15, 4.8), layout='constrained')
    figure.get_layout_engine().set(wspace=0.05)
    window = cases[0]['window']
    _draw_gap(gap, cases)
    _draw_singular(singular, cases[-1])
    _draw_distance(distance, cases)
    for axes in (gap, singular, distance):
        looks.tidy(axes)
    looks.note(
        figure,
        f'Uniform attention, circular windows of w = {window}, not causal; stochastic layers with '
        'independent permutations',
    )
    return figure


def _draw_gap(axes: plt.Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    lengths = np.array([x['tokens'] for x in cases])
    closed = [1 - x['sliding_eigenvalue'] for x in cases]
    axes.plot(lengths, closed, color=_SWA, marker='D', ms=8, lw=2, label='SWA, closed form')
    found = [(x['tokens'], 1 - y) for x in cases for y in x['stochastic_eigenvalues']]
    if found:
        axes.plot(*zip(*found, strict=True), 'o', color=_SA, ms=4.5, label='SA, computed')
    axes.set(xscale='log', yscale='log', xlabel='tokens n', ylabel='spectral gap, 1 − |λ₂|')
    axes.set_xticks(lengths, [f'{x:,}' for x in lengths])
    axes.minorticks_off()
    axes.set_title('One layer: the same gap', loc='left')
    axes.legend(frameon=False)


def _draw_singular(axes: plt.Axes, case: Mapping[str, Any]) -> None:
    depths = np.array(case['depths'])
    axes.plot(depths, case['sliding_singular'], color=_SWA, marker='D', ms=5, lw=2, label='SWA')
    axes.errorbar(
        depths,
        case['stochastic_singular'],
        yerr=[spread or 0 for spread in case['stochastic_singular_spread']],
        color=_SA,
        marker='o',
        ms=5,
        lw=2,
        capsize=3,
        label='SA',
    )
    axes.plot(
        depths,
        case['mean_square'] ** (depths / 2),
        color=looks.MUTED,
        lw=1.2,
        ls=(0, (4, 2)),
        label=r'SA, root mean square of all: $\approx w^{-\ell/2}$',
    )
    axes.set(yscale='log', xlabel='layers ℓ', ylabel='second singular value σ₂')
    axes.set_xticks(depths)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.35)  # room for the legend
    axes.set_title(f'Products of layers, n = {case["tokens"]:,}', loc='left')
    axes.legend(frameon=False, loc='upper left')


def _draw_distance(axes: plt.Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    shades = _SHADES[-len(cases) :] if len(cases) <= len(_SHADES) else (_SA,) * len(cases)
    alphas = np.linspace(0.35, 1, len(cases)) if len(cases) > 1 else [1]
    for case, shade, alpha in zip(cases, shades, alphas, strict=True):
        name, curve = f'n = {case["tokens"]:,}', case['sliding_curve']
        axes.plot(
            curve['depths'], curve['distance'], color=_SWA, alpha=alpha, lw=2, label=f'SWA, {name}'
        )
        axes.plot(
            case['depths'],
            case['distance'],
            color=shade,
            marker='o',
            ms=4,
            lw=2,
            label=f'SA, {name}',
        )
    axes.axhline(0.25, color=looks.MUTED, lw=1, ls=(0, (2, 3)))
    axes.set(xscale='log', xlabel='layers ℓ', ylabel='total variation from uniform', ylim=(0, 1.02))
    axes.set_title("Where a token's share goes", loc='left')
    axes.legend(frameon=False, fontsize=9, loc='center left', bbox_to_anchor=(1, 0.5))
