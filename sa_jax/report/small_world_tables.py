"""Tables of the small-world experiment, from its result file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sa_jax.analysis.connectomes import HOW_TO_GET_FLYWIRE
from sa_jax.report import markdown

_NONE = '–'
_PREFACE = """\
# Small worlds

Who sees whom is a directed graph. SA and SA + SWA are unions over the layers, and all patterns of a
table have as many edges: more layers share them among narrower windows. The masks are
bidirectional. Under causal masks all edges lead back, so that no two tokens reach each other, the
largest strongly connected component is one token and no mean shortest path exists; the undirected
columns hold for causal masks too, with windows as docs/theory.md says.

± is half of the 95 % interval of what was sampled; what has none was counted. Clustering is that of
the undirected view: with two opposite edges as two parallel ones, as Lin et al. count, as one edge,
and the mean over nodes. The mean shortest path is over the largest strongly connected component.\
"""


def tables(result: Mapping[str, Any]) -> str:
    """All tables in Markdown.

    Args:
      result: of the small-world experiment.
    """
    figures = result['figures']
    parts = [_PREFACE]
    for group in figures['groups']:
        parts += [_heading(group), _main_table(group), _random_table(group), _degree_table(group)]
    if figures['missing']:
        parts.append('## Left out')
        parts += [f'- {reason}' for reason in figures['missing'].values()]
    return '\n\n'.join(parts) + '\n'


def _heading(group: Mapping[str, Any]) -> str:
    lines = [f'## {group["name"]}', '']
    if group['source'] is None:
        lines.append(f'Not measured: no edge list was given. {HOW_TO_GET_FLYWIRE}')
    else:
        cleaned = '; '.join(f'{name}: {count:,}' for name, count in group['cleaned'].items())
        lines.append(f'{group["source"]}. {cleaned}.')
    lines.append(
        f'Patterns and rings beside it: n = {group["tokens"]:,} tokens, each of which sees '
        f'{group["window"] - 1} others.'
    )
    published = group['published']
    if published:
        lines.append(
            f'Published: Lin et al. 2024, snapshot 630, of {published["nodes"]:,} neurons '
            f'{published["nodes_with_edges"]:,} with edges.'
        )
        if group['tokens'] != published['nodes_with_edges'] and group['source'] is None:
            lines.append('**n is not the fly’s: the rows below it are no match of its size.**')
    return '\n'.join(lines)


def _main_table(group: Mapping[str, Any]) -> str:
    header = [
        'graph',
        'nodes',
        'edges',
        'connection probability',
        'clustering, parallel edges',
        'clustering',
        'local clustering',
        'reciprocity',
        'largest strong component',
        'mean shortest path',
    ]
    rows = []
    if group['published']:
        x = group['published']
        rows.append(
            [
                f'{group["name"]}, **published**',
                f'{x["nodes"]:,}',
                f'{x["edges"]:,}',
                _digits(x['connection_probability']),
                _digits(x['clustering_parallel']),
                _NONE,
                _NONE,
                _digits(x['reciprocity']),
                f'{x["strong_nodes"]:,}',
                _digits(x['path_length']),
            ]
        )
    for row in group['rows']:
        x = row['statistics']
        clustering = x['clustering']
        rows.append(
            [
                _label(row),
                f'{x["nodes"]:,}',
                f'{x["edges"]:,}',
                _digits(x['connection_probability']),
                *(_estimate(clustering[name]) for name in ('parallel', 'transitivity', 'local')),
                _digits(x['reciprocity']),
                f'{x["strong_nodes"]:,}',
                _estimate(x['path_length']),
            ]
        )
    return markdown.table(header, *rows)


def _random_table(group: Mapping[str, Any]) -> str:
    header = [
        'against random graphs',
        'undirected: mean shortest path',
        'undirected, Erdős–Rényi: small-worldness',
        'matched degrees: C / C random',
        'matched degrees: L / L random',
        'matched degrees: small-worldness',
    ]
    rows = []
    if group['published']:
        x = group['published']
        rows.append(
            [
                f'{group["name"]}, **published**',
                _digits(x['undirected_path_length']),
                _digits(x['small_worldness']),
                _digits(x['clustering_over_matched']),
                _NONE,
                _NONE,
            ]
        )
    for row in group['rows']:
        x = row['statistics']
        matched = x['matched']
        rows.append(
            [
                _label(row),
                _estimate(x['undirected_path_length']),
                _estimate(x['small_worldness']),
                _ratio(x['clustering']['parallel'], matched['clustering']),
                _ratio(x['path_length'], matched['path_length']),
                _estimate(x['matched_small_worldness']),
            ]
        )
    return markdown.table(header, *rows)


def _degree_table(group: Mapping[str, Any]) -> str:
    header = ['edges of a node', 'mean']
    for name in ('outgoing', 'incoming'):
        header += [f'{name}: deviation', f'{name}: median', f'{name}: most']
    rows = []
    for row in group['rows']:
        degree = row['statistics']['degree']
        cells = [_label(row), _digits(degree['outgoing']['mean'])]
        for name in ('outgoing', 'incoming'):
            x = degree[name]
            cells += [_digits(x['std']), f'{x["median"]:g}', f'{x["largest"]:,}']
        rows.append(cells)
    return markdown.table(header, *rows)


def _label(row: Mapping[str, Any]) -> str:
    return f'{row["label"]}, **measured**' if row['kind'] == 'connectome' else row['label']


def _estimate(x: Mapping[str, float] | None) -> str:
    """A figure with its interval, to the digit that the interval allows."""
    if x is None:
        return _NONE
    half = 1.96 * x['error']
    if not half:
        return _digits(x['value'])
    decimals = max(0, 1 - _exponent(half))
    return f'{x["value"]:,.{decimals}f} ± {half:,.{decimals}f}'


def _ratio(above: Mapping[str, float] | None, below: Mapping[str, float] | None) -> str:
    if above is None or below is None or not below['value']:
        return _NONE
    return _digits(above['value'] / below['value'])


def _digits(x: float) -> str:
    """Four significant digits, not in powers of ten."""
    if not x:
        return '0'
    return f'{x:,.{max(0, 3 - _exponent(x))}f}'


def _exponent(x: float) -> int:
    return int(f'{x:e}'.partition('e')[2])
