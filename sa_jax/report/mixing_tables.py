"""Tables of the mixing experiment, from its result file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sa_jax.report import markdown

_UNITS = (
    'Squared errors against full attention, mean over queries, heads and texts, in units of the '
    "mean squared distance of a head's values from their mean. ± is the standard error over the "
    'draws. The bias is the root of the mean squared one, from which the share of the draws that '
    'are still in their mean is subtracted; < marks an upper limit where nothing is left of it. '
    'SA sees as many keys as SWA on average; the error of SA under one permutation is bias² + '
    'variance. "First order" is the formula of docs/theory.md.'
)
_FITS = (
    'Exponents x of error ∝ w^x with 95 % intervals, fitted to logarithms after the share 1 − π of '
    "the keys that the window misses is divided out: of SA's bias and variance once, of SWA's, "
    "which is its whole error, by the root, as of a random sample's. A window takes part if its "
    "standard error is at most a quarter of its value. The paper's claims: −1 for SA's bias and "
    'variance, none for SWA.'
)
_SPECTRA = (
    'Layers of uniform attention, not causal, circular. Gap: 1 − |λ₂|. σ₂: the second singular '
    'value of a product of layers, mean over stacks of permutations ± standard deviation; for SWA '
    '|λ₂|^ℓ. c^(ℓ/2): the root mean square of the other singular values of ℓ SA layers in '
    "expectation. Total variation: between where a token's share went and uniform, mean over "
    'starts and stacks ± standard deviation; in brackets the bounds of its expectation.'
)
_FITTED = {
    'bias': 'SA bias',
    'first_order_bias': 'first order',
    'variance': 'SA variance',
    'first_order_variance': 'first order',
    'sliding': 'SWA bias',
}


def tables(result: Mapping[str, Any]) -> str:
    """All tables in Markdown.

    Args:
      result: of the mixing experiment.
    """
    figures, config = result['figures'], result['config']
    parts = ['# Stochastic attention as an estimate, and how its layers mix']
    parts.append(f'## Bias and variance\n\n{_inputs(config)} {_UNITS}\n\n### Fits\n\n{_FITS}')
    parts.append(_fits(figures['errors']))
    for case in figures['errors']:
        parts.append(f'### {case_title(case)}\n\n{_points(case)}')
    parts.append(f'## Spectra and mixing\n\n{_SPECTRA}')
    parts.append(_gaps(figures['spectra']))
    for case in figures['spectra']:
        parts.append(f'### n = {case["tokens"]:,}, w = {case["window"]}\n\n{_depths(case)}')
    return '\n\n'.join(parts) + '\n'


def case_title(case: Mapping[str, Any]) -> str:
    """Inputs, weights, mask and queries in words."""
    queries = '' if case['queries'] == 'all' else f', {case["queries"]} of the queries'
    return f'{source_label(case["source"])}: {case["weights"]} weights, {case["mask"]}{queries}'


def source_label(source: str) -> str:
    """Where queries, keys and values come from, in words."""
    return 'Gaussian inputs' if source == 'random' else f'Model, {source}'


def exponent(fit: Mapping[str, Any] | None) -> str:
    """An exponent with its interval."""
    if fit is None:
        return 'too noisy'
    return f'{fit["exponent"]:.2f} ± {fit["half_width"]:.2f}'.replace('-', '−')


def _inputs(config: Mapping[str, Any]) -> str:
    facts = f'{config["tokens"]:,} tokens, {config["draws"]} permutations.'
    if config['model'] is None:
        return facts
    text = config['text'] or "the default corpus' held-out speeches"
    return f'{facts} Model: {config["model"]} on {config["texts"]} text(s) of {text}.'


def _fits(cases: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        [
            case_title(case),
            *(exponent(case['fits'][name]) for name in _FITTED),
            f'{case["effective_keys"]:,.0f}',
        ]
        for case in cases
    ]
    header = ['case', *_FITTED.values(), 'effective keys, 1 / Σ p²']
    return markdown.table(header, *rows)


def _points(case: Mapping[str, Any]) -> str:
    rows = []
    for x in case['points']:
        bias, variance = x['bias_squared'], x['variance']
        rows.append(
            [
                str(x['window']),
                str(x['slots']),
                _root(bias),
                _number(np.sqrt(x['first_order_bias_squared'])),
                _with_error(variance['value'], variance['standard_error']),
                _number(x['first_order_variance']),
                _number(bias['value'] + variance['value']),
                _number(x['sliding_squared']),
            ]
        )
    header = ['w, keys', 'slots of SA', 'SA bias', 'first order', 'SA variance', 'first order']
    return markdown.table([*header, "SA's squared error", "SWA's squared error"], *rows, texts=0)


def _root(squared: Mapping[str, float]) -> str:
    value, error = squared['value'], squared['standard_error']
    if value <= 2 * error:
        return f'< {_number(np.sqrt(max(value, 0) + 2 * error))}'
    root = np.sqrt(value)
    return _with_error(root, error / (2 * root))


def _gaps(cases: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for x in cases:
        found = x['stochastic_eigenvalues']
        gap = 1 - x['sliding_eigenvalue']
        # Layers are relabelled, so that the difference is of rounding and iterations alone.
        worst = max((abs(y - x['sliding_eigenvalue']) for y in found), default=None)
        rows.append(
            [
                f'{x["tokens"]:,}',
                str(x['window']),
                _number(gap),
                'not computed' if worst is None else _number(1 - np.mean(found)),
                'not computed' if worst is None else _number(worst, 1),
                str(x['mixing_depth'] or f'> {x["depths"][-1]}'),
                f'{x["sliding_mixing_depth"]:,}',
                f'{np.log(x["tokens"]) / np.log(x["window"]):.1f}',
                f'{(x["tokens"] / x["window"]) ** 2:,.0f}',
            ]
        )
    header = ['n', 'w', 'gap, closed form', 'gap of an SA layer', 'largest difference']
    header += ['layers to TV ≤ 1/4: SA', 'SWA', 'log_w n', '(n/w)²']
    return markdown.table(header, *rows, texts=0)


def _depths(case: Mapping[str, Any]) -> str:
    rows = []
    for place, depth in enumerate(case['depths']):
        value, spread = (
            case['stochastic_singular'][place],
            case['stochastic_singular_spread'][place],
        )
        bounds = _number(case['distance_lower'][place]), _number(case['distance_upper'][place])
        rows.append(
            [
                str(depth),
                f'{case["sliding_singular"][place]:.6f}',
                _number(value) if spread is None else _with_error(value, spread),
                _number(case['mean_square'] ** (depth / 2)),
                _number(case['sliding_distance'][place]),
                f'{_with_error(case["distance"][place], case["distance_spread"][place])} '
                f'[{bounds[0]}, {bounds[1]}]',
            ]
        )
    header = ['layers ℓ', 'σ₂, SWA', 'σ₂, SA', 'c^(ℓ/2)', 'total variation, SWA']
    return markdown.table([*header, 'total variation, SA'], *rows, texts=0)


def _with_error(value: float, error: float) -> str:
    """A number and its error to the error's first two digits, the same decimals for both."""
    if error < 1e-9 * abs(value):
        return _number(value)
    power = 0 if abs(value) >= 1e-3 else int(np.floor(np.log10(abs(value)))) if value else 0
    value, error = value / 10.0**power, error / 10.0**power
    places = max(0, 1 - int(np.floor(np.log10(error))))
    text = f'{value:.{places}f} ± {error:.{places}f}'
    return f'({text})e{power}'.replace('-', '−') if power else text


def _number(value: float, digits: int = 3) -> str:
    """A number with so many digits, small ones as powers of ten."""
    if value == 0:
        return '0'
    if 1e-3 <= abs(value) < 1e5:
        places = max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))
        return f'{value:,.{places}f}'
    text, power = f'{value:.{digits - 1}e}'.split('e')
    return f'{text}e{int(power)}'.replace('-', '−')
