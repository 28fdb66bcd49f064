"""Tables of compared variants, from their result file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from sa_jax.report import markdown

REFERENCE = 'sa_swa'
METRICS = {
    'perplexity': ('perplexity', lambda run: run['held_out']['perplexity'], 2),
    'far': ('perplexity, far', lambda run: run['far']['perplexity'], 2),
    'last_word': ('last word, %', lambda run: 100 * run['last_word']['accuracy'], 1),
}
_PREFACE = (
    'Held-out perplexity per token; "far": of the tokens that have three quarters of a row behind '
    'them; the share of held-out passages whose last word, which occurred before, is predicted. '
    'Mean ± sample standard deviation over the seeds, which decide parameters, permutations and '
    'the order of the data, alike for all variants. Differences to {reference}, positive where '
    'the variant is worse in perplexity, are means over the seeds that both have, with 95 % '
    "intervals of Student's t; of a single seed there is none, and the spread of {reference} over "
    'its seeds tells what chance does.'
)


class Difference(NamedTuple):
    """A mean difference over paired seeds; no half_width for a single one."""

    value: float
    half_width: float | None


def tables(figures: Mapping[str, Any]) -> str:
    """All tables in Markdown.

    Args:
      figures: of `training.comparison.collect`.
    """
    runs = figures['runs']
    parts = [_PREFACE.format(reference=f'`{REFERENCE}`'), _baselines(runs)]
    for group in dict.fromkeys(run['group'] for run in runs):
        parts.append(f'## {group.capitalize()}')
        parts.append(_table(group, runs))
    if figures['missing']:
        parts.append(f'Not run yet: {_by_variant(figures["missing"])}.')
    return '\n\n'.join(['# Variants compared', *parts]) + '\n'


def difference(
    runs: Sequence[Mapping[str, Any]], variant: str, reference: str, metric: str
) -> Difference | None:
    """How much a variant has more of a metric than another one, paired by seed.

    Args:
      runs: of `training.comparison.collect`.
      variant: its name.
      reference: the other one's.
      metric: 'perplexity', 'far' or 'last_word'.

    Returns:
      None without a seed that both have.
    """
    ours, theirs = (values(runs, name, metric) for name in (variant, reference))
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    found = np.array([ours[seed] - theirs[seed] for seed in seeds])
    if len(found) == 1:
        return Difference(float(found[0]), None)
    error = found.std(ddof=1) / np.sqrt(len(found))
    return Difference(float(found.mean()), float(stats.t.ppf(0.975, len(found) - 1) * error))


def values(runs: Sequence[Mapping[str, Any]], variant: str, metric: str) -> dict[int, float]:
    """A metric of a variant by seed."""
    _, read, _ = METRICS[metric]
    return {run['seed']: read(run) for run in runs if run['variant'] == variant}


def _baselines(runs: Sequence[Mapping[str, Any]]) -> str:
    run = runs[0]
    revisions = sorted({_revision(run['git_revision']) for run in runs})
    counted = ', '.join(f'{name} {x["perplexity"]:.1f}' for name, x in run['baselines'].items())
    return (
        f'Each run: {run["tokens"] / 1e6:.1f}M tokens. On the same {run["held_out"]["tokens"]:,} '
        f'held-out tokens: {counted}. {run["last_word"]["items"]} passages. '
        f'Trained at revision {"; ".join(revisions)}.'
    )


def _table(group: str, runs: Sequence[Mapping[str, Any]]) -> str:
    header = ['variant', 'seeds', 'parameters', 'MFLOPs a token']
    for title, _, _ in METRICS.values():
        header += [title, f'… less {REFERENCE}']
    names = dict.fromkeys(run['variant'] for run in runs if run['group'] == group)
    if group != 'main':
        names = {REFERENCE: None} | names
    rows = []
    for name in names:
        of_variant = [run for run in runs if run['variant'] == name]
        if not of_variant:
            continue
        row = [
            f'`{name}`',
            str(len(of_variant)),
            f'{of_variant[0]["parameters"]:,}',
            f'{of_variant[0]["flops_per_token"] / 1e6:.2f}',
        ]
        for metric, (_, _, digits) in METRICS.items():
            found = list(values(runs, name, metric).values())
            row.append(_spread(found, digits))
            beside = difference(runs, name, REFERENCE, metric)
            row.append('' if name == REFERENCE else _signed(beside, digits))
        rows.append(row)
    return markdown.table(header, *rows)


def _revision(name: str | None) -> str:
    if name is None:
        return 'unknown'
    return name[:12] + ', changed' * name.endswith('-dirty')


def _by_variant(missing: Sequence[Mapping[str, Any]]) -> str:
    seeds: dict[str, list[str]] = {}
    for run in missing:
        seeds.setdefault(run['variant'], []).append(str(run['seed']))
    return '; '.join(f'`{name}` (seeds {", ".join(found)})' for name, found in seeds.items())


def _spread(found: Sequence[float], digits: int) -> str:
    mean = f'{np.mean(found):.{digits}f}'
    return mean if len(found) == 1 else f'{mean} ± {np.std(found, ddof=1):.{digits}f}'


def _signed(found: Difference | None, digits: int) -> str:
    if found is None:
        return '–'
    text = f'{found.value:+.{digits}f}'.replace('-', '−')
    return text if found.half_width is None else f'{text} ± {found.half_width:.{digits}f}'
