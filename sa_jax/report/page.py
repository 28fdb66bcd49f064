"""One page of all results: the paper's figures and ours, side by side, as Markdown and HTML."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sa_jax.extras import optional_import
from sa_jax.report import markdown, paper
from sa_jax.report.comparison_tables import values
from sa_jax.untrusted import damage_reported, read_json
from sa_jax.version import __version__

NOT_MEASURED = 'not measured'
_FIELDS = {
    'command': str,
    'config': dict,
    'device': dict,
    'figures': dict,
    'finished': str,
    'git_revision': str | None,
    'versions': dict,
}


class Found(NamedTuple):
    """A result file.

    Attributes:
      folder: where it is, with its tables (*.md) and figures (*.png).
      experiment: what made it: the module behind `experiments.`.
      result: its content.
    """

    folder: Path
    experiment: str
    result: Mapping[str, Any]


class Part(NamedTuple):
    """A part of the page.

    Attributes:
      title: what it is of the paper's.
      experiment: what makes its results.
      beside: the results to a table in Markdown with the paper's figures beside ours; None if the
        experiment's own table has them, or there are none.
      how: the command that fills a gap.
    """

    title: str
    experiment: str
    beside: Callable[[Sequence[Found]], str] | None
    how: str


def collect(folders: Sequence[Path]) -> tuple[list[Found], list[str]]:
    """Reads all result.json below some folders.

    Args:
      folders: several may hold results of one experiment.

    Returns:
      Those to be shown, and messages about those that are left out: unreadable ones, those of
      another version of this package, and all but the newest of one experiment and configuration.

    Raises:
      ValueError: a folder doesn't exist.
    """
    newest: dict[tuple[str, str], Found] = {}
    messages = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f'{folder} is no folder; expected one with results.')
        for path in sorted(folder.rglob('result.json')):
            try:
                found = _read(path)
            except ValueError as error:
                messages.append(f'{path}: left out, {error}')
                continue
            if found.experiment == 'compare' and 'runs' not in found.result['figures']:
                continue  # a single run, which the comparison above it has in its table
            key = found.experiment, json.dumps(found.result['config'], sort_keys=True)
            other = newest.get(key)
            if other:
                first, last = sorted([other, found], key=lambda x: x.result['finished'])
                messages.append(
                    f'{first.folder}: left out, {last.folder} is newer and has its configuration'
                )
                found = last
            newest[key] = found
    return list(newest.values()), messages


def to_markdown(found: Sequence[Found], messages: Sequence[str], folder: Path) -> str:
    """The page in Markdown.

    Args:
      found: of `collect`.
      messages: of `collect`.
      folder: where the page will be; figures are linked from there.
    """
    lines = ['# Stochastic attention: the paper and this implementation', '', _PREFACE, '']
    by_part = {part: [x for x in found if x.experiment == part.experiment] for part in PARTS}
    for part, of_part in by_part.items():
        anchor = re.sub(r'[^\w\- ]', '', part.title.lower()).replace(' ', '-')
        state = '' if of_part else f': {NOT_MEASURED}'
        lines.append(f'- [{part.title}](#{anchor}){state}')
    for part, of_part in by_part.items():
        lines += ['', f'## {part.title}']
        if not of_part:
            lines += ['', f'{NOT_MEASURED.capitalize()}: `{part.how}`']
            if part.beside:
                lines += ['', part.beside([])]
            continue
        if part.beside:
            with damage_reported(of_part[0].folder):
                lines += ['', part.beside(of_part)]
        for x in of_part:
            with damage_reported(x.folder):
                lines += ['', _origin(x)]
            lines += [
                f'\n![{image.stem}]({_relative(image, folder)})'
                for image in sorted(x.folder.glob('*.png'))
            ]
            lines += [
                '\n' + _demoted(text.read_text(encoding='utf-8'))
                for text in sorted(x.folder.glob('*.md'))
            ]
    if messages:
        lines += ['', '## Left out', '', *(f'- {message}' for message in messages)]
    return '\n'.join(lines) + '\n'


def to_html(text: str, folder: Path) -> str:
    """A page in one file, figures inside, for screens of any width and for print.

    Args:
      text: of `to_markdown`.
      folder: what its links start from.

    Raises:
      ImportError: the package markdown is missing.
    """
    convert = optional_import('markdown', 'the page in HTML', 'train').markdown
    body = convert(text, extensions=['tables', 'toc', 'fenced_code'])
    body = re.sub(r'<table>', '<div class="table"><table>', body).replace(
        '</table>', '</table></div>'
    )

    def embed(match):
        image = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{image}"'

    body = re.sub(r'src="([^":]+\.png)"', embed, body)
    return _HTML.replace('BODY', body)


def _read(path: Path) -> Found:
    result = read_json(path)
    lacking = [name for name in _FIELDS if name not in result]
    if lacking:
        raise ValueError(f'it lacks {", ".join(lacking)}')
    for name, kind in _FIELDS.items():
        if not isinstance(result[name], kind):
            raise ValueError(f'its {name} is {result[name]!r:.60}')
    experiment = re.search(r'experiments[./](\w+)', result['command'])
    if not experiment:
        raise ValueError(f'its command {result["command"]!r:.500} is no experiment of this package')
    version = result['versions'].get('sa_jax', __version__)
    if version != __version__:
        raise ValueError(f'it is of sa_jax {version}, this is {__version__}')
    return Found(path.parent, experiment[1], result)


def _origin(found: Found) -> str:
    result = found.result
    revision = result['git_revision'] or 'unknown'
    state = ', from a changed tree' if revision.endswith('-dirty') else ''
    device = result['device']
    return (
        f'### {found.folder.name}\n\n`{result["command"]}`: revision '
        f'{revision.removesuffix("-dirty")[:12]}{state}, {device["kind"]} ({device["host"]}), '
        f'JAX {result["versions"].get("jax", "unknown")}, {result["finished"][:10]}.'
    )


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _demoted(text: str) -> str:
    return re.sub(r'^(#+) ', r'###\1 ', text, flags=re.MULTILINE)


def _pretraining(found: Sequence[Found]) -> str:
    """Table 1's order, as perplexity over full attention's: scales differ too much for more."""
    runs = found[0].result['figures']['runs'] if found else []
    full = list(values(runs, 'full', 'perplexity').values())
    rows = []
    for variant, theirs in paper.PRETRAINING.items():
        ours = list(values(runs, variant, 'perplexity').values())
        ratio = NOT_MEASURED
        if ours and full:
            ratio = f'{np.mean(ours) / np.mean(full):.3f}'
        spread = f' ± {np.std(ours, ddof=1):.2f}' if len(ours) > 1 else ''
        rows.append(
            [
                variant,
                f'{theirs.wikitext:.2f}',
                f'{theirs.wikitext / paper.PRETRAINING["full"].wikitext:.3f}',
                f'{np.mean(ours):.2f}{spread}' if ours else NOT_MEASURED,
                ratio,
                f'{theirs.lambada_accuracy[0]} / {theirs.lambada_accuracy[1]}',
            ]
        )
    header = ['variant', 'paper: WikiText perplexity', '… over full', 'ours: held-out perplexity']
    header += ['… over full', 'paper: LAMBADA, %']
    scale = 'The paper: 360M parameters, 15B tokens, w = 256, zero-shot.'
    if runs:
        seeds = len({run['seed'] for run in runs if run['variant'] in paper.PRETRAINING})
        scale += (
            f' Ours: {runs[0]["parameters"] / 1e6:.1f}M parameters, {runs[0]["tokens"] / 1e6:.1f}M '
            f'tokens, {seeds} {"seed" if seeds == 1 else "seeds"}.'
        )
    return f'{scale}\n\n{markdown.table(header, *rows)}'


def _efficiency(found: Sequence[Found]) -> str:
    rows = [
        [f'{length:,}', f'{x.sa_ms:g}', f'{x.full_ms:g}', f'{x.speed_up:g}×']
        for length, x in paper.EFFICIENCY.items()
    ]
    header = ['tokens', 'paper: SA, ms', 'full attention, ms', 'speed-up']
    ours = 'Ours, with the paper beside it, is below.' if found else f'Ours: {NOT_MEASURED}.'
    return f'The paper: {paper.EFFICIENCY_DEVICE}. {ours}\n\n{markdown.table(header, *rows)}'


_PREFACE = """\
Each figure stands with the command and the revision that gave it, and with the scale at which it
was obtained. The paper is arXiv 2604.00754; its figures are those known from public sources."""
_MINI = 'python -m experiments.compare --config=configs/pretrain/table1_mini.py --workdir=DIR'
PARTS = (
    Part('Table 1: pre-training from scratch', 'compare', _pretraining, _MINI),
    Part('Table 1: zero-shot', 'zero_shot', None, 'python -m experiments.zero_shot …'),
    Part(
        'What earlier tokens are worth',
        'context',
        None,
        'python -m experiments.context --runs=RUNS --workdir=DIR',
    ),
    Part('Recall against distance', 'recall', None, 'python -m experiments.recall --workdir=DIR'),
    Part(
        'Table 2: efficiency',
        'efficiency',
        _efficiency,
        'python -m experiments.efficiency --workdir=DIR',
    ),
    Part(
        'Tables 4 and 5, Figure 4: without training',
        'training_free',
        None,
        'python -m experiments.training_free …',
    ),
    Part(
        'Figure 1: small worlds',
        'small_world',
        None,
        'python -m experiments.small_world --workdir=DIR',
    ),
    Part(
        'Figure 2: receptive fields',
        'receptive_field',
        None,
        'python -m experiments.receptive_field --workdir=DIR',
    ),
    Part('Estimation and mixing', 'mixing', None, 'python -m experiments.mixing --workdir=DIR'),
    Part('Decoding', 'decoding', None, 'python -m experiments.decoding --workdir=DIR'),
    Part('The demo', 'pretrain', None, 'make demo'),
    Part(
        'Training steps compiled for clusters',
        'cluster_report',
        None,
        'python -m experiments.cluster_report --config=configs/pretrain/paper_360m.py '
        '--workdir=DIR',
    ),
    Part(
        'Published models in the memory of a GPU',
        'model_memory',
        None,
        'python -m experiments.model_memory --workdir=DIR',
    ),
    Part(
        'GPU kernels, compiled',
        'kernel_report',
        None,
        'python -m experiments.kernel_report --workdir=DIR',
    ),
    Part(
        'Generation beside transformers',
        'generation',
        None,
        'python -m experiments.generation --workdir=DIR --model=MODEL',
    ),
)
_HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Stochastic attention: the paper and this implementation</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 60rem;
  padding: 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { border-top: 1px solid #ddd; padding-top: 1.2rem; margin-top: 2.5rem; }
img { max-width: 100%; height: auto; }
code { background: #f4f4f4; padding: 0 .2em; overflow-wrap: anywhere; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #e4e4e4; }
th { text-align: left; vertical-align: bottom; }
@media print {
  body { font-size: 10pt; max-width: none; }
  .table { overflow: visible; }
  table { font-size: 7pt; }
  h2, h3 { break-after: avoid; }
  img, tr { break-inside: avoid; }
}
</style>
BODY
</html>
"""
