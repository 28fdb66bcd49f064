"""Connectomes beside attention patterns and rewired rings of as many nodes and edges."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import sparse
from tqdm import tqdm

from sa_jax.analysis import connectomes
from sa_jax.analysis.connectomes import PUBLISHED_FLY, Connectome
from sa_jax.analysis.graphs import statistics
from sa_jax.analysis.pattern_graphs import union_graph
from sa_jax.analysis.random_graphs import watts_strogatz

CONNECTOMES = ('fly', 'worm', 'columns')
LABELS = {'swa': 'SWA', 'sa': 'SA', 'sa_swa': 'SA + SWA', 'watts_strogatz': 'Watts–Strogatz'}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      connectomes: of `CONNECTOMES`; None for those that are at hand.
      flywire: FlyWire's table of connections; without it the fly's figures are the published ones.
      min_synapses: of an edge of the fly's.
      tokens: n of the graphs beside the fly; None for its neurons with edges.
      window: keys that a token sees in all layers together, itself included, beside the fly; None
        for the fly's mean number of outgoing edges and one.
      layers: of the stacks whose union is taken.
      rewired: probabilities of Watts–Strogatz graphs.
      sources: nodes from which paths are searched.
      wedges: pairs of neighbours that clustering is sampled from in large graphs.
      extent: of the fly's visual columns, from the middle to the rim.
      seed: of permutations, random graphs and samples.

    Raises:
      ValueError: a setting out of range; it is named, with what was expected.
    """

    connectomes: tuple[str, ...] | None = None
    flywire: str | None = None
    min_synapses: int = 5
    tokens: int | None = None
    window: int | None = None
    layers: tuple[int, ...] = (1, 2, 4)
    rewired: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    sources: int = 512
    wedges: int = 1 << 22
    extent: int = 15
    seed: int = 0

    def __post_init__(self):
        least = {'tokens': 1, 'window': 2, 'sources': 2, 'wedges': 1, 'extent': 0, 'seed': 0}
        least['min_synapses'] = 1
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f'{name}={value}; expected at least {bound}')
        for name, known in (('connectomes', CONNECTOMES), ('layers', None), ('rewired', None)):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise ValueError(f'{name}={values}; expected one or several different ones')
            if known and values and set(values) - set(known):
                raise ValueError(f'{name}={",".join(values)}; expected some of {", ".join(known)}')
        if min(self.layers) < 1:
            raise ValueError(f'layers={self.layers}; expected at least 1')
        if not all(0 <= x <= 1 for x in self.rewired):
            raise ValueError(f'rewired={self.rewired}; expected probabilities')
        beside_fly = self.connectomes is None or 'fly' in self.connectomes
        given = [x for x in ('flywire', 'tokens', 'window') if getattr(self, x) is not None]
        if given and not beside_fly:
            raise ValueError(f'{given[0]} belongs to the fly, which connectomes leaves out')
        if self.flywire is None and beside_fly:
            _check_window(*self.beside(_published_size()), self.layers)

    def beside(self, size: tuple[int, int]) -> tuple[int, int]:
        """Tokens and window of the graphs beside the fly, of which `size` has nodes and edges."""
        tokens, window = _tokens_and_window(size)
        return self.tokens or tokens, self.window or window


def measure(settings: Settings) -> dict[str, Any]:
    """Measures all graphs.

    Args:
      settings: what to measure.

    Returns:
      JSON: 'groups', each with a connectome ('name', 'source', 'cleaned', 'published' figures or
      None), the 'tokens' and 'window' of the graphs beside it, and 'rows', each with its 'label',
      what it is and its 'statistics'; 'missing', why connectomes were left out, by name.

    Raises:
      ImportError: a package of a named connectome is missing.
      ValueError: a table that can't be read, a window wider than n or too narrow for the layers.
      FileNotFoundError: no such table.
    """
    groups, missing = [], {}
    for name in settings.connectomes or CONNECTOMES:
        try:
            groups.append(_group(name, settings))
        except ImportError as error:
            if settings.connectomes or name == 'fly':
                raise
            missing[name] = str(error)
    tasks = [(group, *row) for group, rows in groups for row in rows]
    with tqdm(tasks, unit='graph', disable=None) as progress:
        for number, (group, description, make) in enumerate(progress):
            progress.set_description(f'{group["name"]}: {description["label"]}')
            rng = np.random.default_rng([settings.seed, number])
            start = time.perf_counter()
            graph = make(rng)
            figures = statistics(graph, rng, sources=settings.sources, wedges=settings.wedges)
            description['statistics'] = figures.to_json()
            description['seconds'] = time.perf_counter() - start
            group['rows'].append(description)
    return {'groups': [group for group, _ in groups], 'missing': missing}


_Make = Callable[[np.random.Generator], sparse.csr_array]


def _group(
    name: str, settings: Settings
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], _Make]]]:
    """A group without its rows, and for each row what it is and how its graph is made."""
    connectome = _load(name, settings)
    size = _published_size() if connectome is None else _size(connectome)
    tokens, window = settings.beside(size) if name == 'fly' else _tokens_and_window(size)
    _check_window(tokens, window, settings.layers)
    group = {
        'connectome': name,
        'name': 'Fly brain' if connectome is None else connectome.name,
        'source': None if connectome is None else connectome.source,
        'cleaned': None if connectome is None else connectome.cleaned,
        'published': dataclasses.asdict(PUBLISHED_FLY) if name == 'fly' else None,
        'tokens': tokens,
        'window': window,
        'rows': [],
    }
    rows = []
    if connectome is not None:
        description = {'kind': 'connectome', 'label': connectome.name}
        rows.append((description, lambda rng: connectome.graph))
    key = jax.random.key(settings.seed)
    for kind, layers in (('swa', (1,)), ('sa', settings.layers), ('sa_swa', settings.layers)):
        for count in layers:
            make = functools.partial(
                union_graph, kind, tokens, degree=window - 1, layers=count, key=key
            )
            depth = '' if kind == 'swa' else f', {count} layer{"s" * (count > 1)}'
            description = {'kind': kind, 'label': f'{LABELS[kind]}{depth}', 'layers': count}
            rows.append((description, lambda rng, make=make: make()))
    for share in settings.rewired:
        make = functools.partial(watts_strogatz, tokens, window - 1, share)
        label = f'{LABELS["watts_strogatz"]}, {share:g} rewired'
        rows.append(({'kind': 'watts_strogatz', 'label': label, 'rewired': share}, make))
    return group, rows


def _load(name: str, settings: Settings) -> Connectome | None:
    if name == 'worm':
        return connectomes.load_worm()
    if name == 'columns':
        return connectomes.load_columns(settings.extent)
    if settings.flywire is None:
        return None
    path = Path(settings.flywire).expanduser()
    return connectomes.load_flywire(path, min_synapses=settings.min_synapses)


def _published_size() -> tuple[int, int]:
    return PUBLISHED_FLY.nodes_with_edges, PUBLISHED_FLY.edges


def _size(connectome: Connectome) -> tuple[int, int]:
    """Nodes with edges, and edges."""
    graph = connectome.graph
    has_edges = np.diff(graph.indptr) > 0
    has_edges[graph.indices] = True
    return int(has_edges.sum()), graph.nnz


def _tokens_and_window(size: tuple[int, int]) -> tuple[int, int]:
    nodes, edges = size
    return nodes, 1 + max(round(edges / nodes), 1)


def _check_window(tokens: int, window: int, layers: tuple[int, ...]) -> None:
    if window > tokens:
        raise ValueError(f'window={window} among n={tokens} tokens; expected at most n')
    windows = max(layers) + 1
    if window - 1 < 2 * windows:
        raise ValueError(
            f'window={window} is shared among the {windows} windows of SA + SWA in {max(layers)} '
            'layers, each of which shows two other tokens at least; expected window >= '
            f'{2 * windows + 1}, or fewer layers'
        )
