"""Coverage as Markdown tables: depth to coverage, shares by depth and by distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

LABELS = {'swa': 'SWA', 'sa': 'SA', 'sa_swa': 'SA + SWA', 'partition': 'SA, partition'}
SETTING_LABELS = {
    'bidirectional': 'bidirectional',
    'circular': 'bidirectional, circular',
    'causal': 'causal',
}
_LEGEND = """\
Layers after which 50 / 99 / 100 % of the admissible pairs are connected: the median over seeds, and
in parentheses the formula's, where there is one. [In brackets]: the formula's alone, for depths
that were not walked to. "> 64": not within so many layers, and no formula. Lengths marked * are
sampled: 100 % is then of the sampled queries' pairs. SWA's formula is exact.
"""


def tables(figures: Mapping[str, Any]) -> str:
    """All tables of a result of `experiments.receptive_field`."""
    parts = [_focus(figures['focus']), _sweep(figures['sweep']), _by_distance(figures['focus'])]
    return '\n'.join(part for part in parts if part)


def connected(case: Mapping[str, Any], layer: int) -> list[float]:
    """The share of pairs connected after a layer, by seed; all of them behind the last walked."""
    return [x['connected'][min(layer, len(x['connected'])) - 1] for x in case['runs']]


def layers_to(case: Mapping[str, Any], place: int) -> tuple[float | None, int | None]:
    """Layers to the share at a place: measured (if every seed got there) and by formula."""
    found = [x['layers_to'][place] for x in case['runs']]
    expected = case['expected_layers_to']
    return None if None in found else median(found), expected and expected[place]


def size_label(case: Mapping[str, Any]) -> str:
    """How many queries stand for the case."""
    return 'every query' if case['is_exact'] else f'{case["queries"]:,} sampled queries a seed'


def _focus(cases: Sequence[Mapping[str, Any]]) -> str:
    n, window = cases[0]['n'], cases[0]['window']
    deepest = max(x['layers'] for case in cases for x in case['runs'])
    depths = sorted({x for x in (1, 2, 3, 4, 8, 16) if x < deepest} | {deepest})
    lines = [
        f'## n = {n:,}, w = {window:,}',
        '',
        f'log_w n = {_log(window, n):.1f}, n / w = {n / window:,.0f}; {size_label(cases[0])}. '
        'Pairs connected, %: mean over seeds ± its standard error (SWA, a single seed: that of the '
        'sample), in parentheses by formula; then layers to 50 / 99 / 100 %.',
        '',
        _row(['', 'pattern', *(_depth(x) for x in depths), 'worst query', 'to 50 / 99 / 100 %']),
        _row(['---'] * (len(depths) + 4)),
    ]
    for case in cases:
        shares = [_share(case, depth) for depth in depths]
        worst = min(x['worst'][-1] for x in case['runs'])
        row = [SETTING_LABELS[case['setting']], LABELS[case['kind']], *shares]
        lines.append(_row([*row, _percent(worst), _layers(case)]))
    errors = [100 * max(x['sampling_error']) for case in cases for x in case['runs']]
    lines += [
        '',
        'The worst query is that of all seeds, after the last layer walked to: the one that '
        f'connects all, or {deepest}. Sampling error of the share for a seed alone: at most '
        f'{max(errors):.2g} points.',
        '',
    ]
    return '\n'.join(lines)


def _sweep(cases: Sequence[Mapping[str, Any]]) -> str:
    kinds = list(dict.fromkeys(case['kind'] for case in cases))
    lines = ['## Depth to coverage', '', _LEGEND]
    for setting in dict.fromkeys(case['setting'] for case in cases):
        lines += [f'### {SETTING_LABELS[setting].capitalize()}', '']
        lines.append(_row(['n', 'w', 'log_w n', 'n / w', *(LABELS[x] for x in kinds)]))
        lines.append(_row(['---:'] * 4 + ['---'] * len(kinds)))
        rows: dict[tuple[int, int], dict] = {}
        for case in cases:
            if case['setting'] == setting:
                rows.setdefault((case['n'], case['window']), {})[case['kind']] = case
        for (n, window), row in rows.items():
            mark = '' if next(iter(row.values()))['is_exact'] else '*'
            sizes = [f'{n:,}{mark}', f'{window:,}', f'{_log(window, n):.1f}', f'{n / window:,.0f}']
            lines.append(_row([*sizes, *(_layers(row[x]) for x in kinds)]))
        lines.append('')
    errors = [x['largest_sampling_error'] for case in cases for x in case['runs']]
    lines += [
        f'Sampling error of the share for a seed alone: at most {100 * max(errors):.2g} points.'
    ]
    return '\n'.join([*lines, ''])


def _by_distance(cases: Sequence[Mapping[str, Any]]) -> str:
    cases = [case for case in cases if 'distances' in case]
    if not cases:
        return ''
    lines = ['## Causal: by distance', '']
    lines += [
        f'Pairs connected, %: mean over seeds, in parentheses by formula. {size_label(cases[0])}: '
        'a query has one pair at distance 1 and as many in a bin as it has distances.',
        '',
    ]
    for case in cases:
        depths = list(case['expected_by_distance'])
        title = f'{LABELS[case["kind"]]}: distance'
        lines.append(_row([title, *(_depth(x) for x in depths)]))
        lines.append(_row(['---:'] * (len(depths) + 1)))
        first = case['distances']
        for place, low in enumerate(first):
            high = first[place + 1] - 1 if place + 1 < len(first) else case['n'] - 1
            label = f'{low:,}' if high <= low else f'{low:,} to {high:,}'
            row = []
            for depth in depths:
                # Walks end where all is connected.
                measured = [x['by_distance'].get(depth) for x in case['runs']]
                values = [1.0 if x is None else x[place] for x in measured]
                values = [x for x in values if x is not None]
                expected = _percent(case['expected_by_distance'][depth][place])
                row.append(f'{_percent(fmean(values)) if values else "–"} ({expected})')
            lines.append(_row([label, *row]))
        lines.append('')
    return '\n'.join(lines)


def _depth(layers: int | str) -> str:
    return f'{layers} layer' if int(layers) == 1 else f'{layers} layers'


def _share(case: Mapping[str, Any], depth: int) -> str:
    shares = connected(case, depth)
    if len(shares) > 1:
        error = stdev(shares) / math.sqrt(len(shares))
    else:
        errors = case['runs'][0]['sampling_error']
        error = errors[min(depth, len(errors)) - 1]
    text = _percent(fmean(shares)) + (f' ± {_percent(error)}' if error else '')
    expected = case['expected_connected']
    return text if expected is None else f'{text} ({_percent(expected[depth - 1])})'


def _layers(case: Mapping[str, Any]) -> str:
    deepest = max(x['layers'] for x in case['runs'])
    parts = []
    for place in range(3):
        measured, expected = layers_to(case, place)
        if measured is not None:
            given = '' if expected is None or case['kind'] == 'swa' else f' ({expected:,})'
            parts.append(f'{measured:g}{given}')
        elif expected is not None:
            parts.append(f'[{expected:,}]' if expected > deepest else f'> {deepest} ({expected:,})')
        else:
            parts.append(f'> {deepest}')
    return ' / '.join(parts)


def _percent(share: float) -> str:
    """In %, with as many digits as keep near ones apart from 0 and 100."""
    percent = 100 * share
    if share in (0, 1):
        return f'{percent:.0f}'
    for digits in (1, 2, 3, 4):
        text = f'{percent:.{digits}f}'
        if 0 < float(text) < 100:
            return text
    return '< 0.0001' if share < 0.5 else '> 99.9999'


def _log(window: int, n: int) -> float:
    return math.log(n) / math.log(window)


def _row(cells: Sequence[str]) -> str:
    return f'| {" | ".join(cells)} |'
