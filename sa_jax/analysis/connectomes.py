"""Connectomes as directed graphs: the fly's by file, those of two packages, and published figures.

Neurons are nodes and an edge leads from the presynaptic cell to the postsynaptic one, however many
synapses there are. None of the data comes with this package.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from sa_jax.analysis.graphs import simple_graph
from sa_jax.analysis.random_graphs import from_edges
from sa_jax.extras import optional_import

# Of the names that a column has in public tables, the first one is that of the FlyWire Codex.
FLYWIRE_COLUMNS = {
    'presynaptic neuron': ('pre_root_id', 'pre_pt_root_id'),
    'postsynaptic neuron': ('post_root_id', 'post_pt_root_id'),
    'number of synapses': ('syn_count',),
}
_NEUROPIL = 'neuropil'
HOW_TO_GET_FLYWIRE = (
    "The edge list is FlyWire's and free of charge: sign in to codex.flywire.ai, download "
    '"Connections" of snapshot 630 or 783 (connections.csv.gz), and give its path as --flywire.'
)
_CECT_READER = 'cect.readers.Cook2019HermReader'
_FLYVIS_FILE = 'connectome/fib25-fib19_v2.2.json'


@dataclasses.dataclass(frozen=True)
class Connectome:
    """A connectome.

    Attributes:
      name: for readers.
      source: where it comes from, in a sentence.
      graph: bool `[n, n]` without self-loops.
      cleaned: what was taken out or merged, counts by what it is.
    """

    name: str
    source: str
    graph: sparse.csr_array
    cleaned: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Published:
    """Figures of a connectome that others published; names as in `graphs.Statistics`."""

    nodes: int
    nodes_with_edges: int
    edges: int
    connection_probability: float
    clustering_parallel: float
    reciprocity: float
    strong_nodes: int
    weak_nodes: int
    path_length: float
    undirected_path_length: float
    small_worldness: float
    clustering_over_matched: float


# Lin et al. (2024) on FlyWire's snapshot 630, pairs with at least 5 synapses; from the outputs that
# their notebooks keep, but for the mean shortest path, which the paper states. The connection
# probability counts all 127,319 neurons with any synapse.
PUBLISHED_FLY = Published(
    nodes=127_319,
    nodes_with_edges=124_891,
    edges=2_613_129,
    connection_probability=0.00016120,
    clustering_parallel=0.046329,
    reciprocity=0.13838,
    strong_nodes=115_661,
    weak_nodes=124_778,
    path_length=4.42,
    undirected_path_length=3.9061,
    small_worldness=141.02,
    clustering_over_matched=7.57,
)


def load_flywire(path: Path, *, min_synapses: int = 5) -> Connectome:
    """Reads FlyWire's public table of connections.

    A row has the synapses of a pair of neurons in a neuropil. They are added over neuropils, and a
    pair with at least `min_synapses` is an edge. Every neuron of the table is a node, whether it
    has edges or not: a table that is already cut off at 5 lacks neurons without edges.

    Args:
      path: .parquet, .feather, .csv or .csv.gz, of snapshot 630, 783 or another with such columns.
      min_synapses: of an edge.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another kind of file, missing columns, ids or counts that are none, no edges.
    """
    if min_synapses < 1:
        raise ValueError(f'min_synapses={min_synapses}; expected at least 1')
    columns = _read_columns(path)
    pre, post, count = (_whole_numbers(x, columns[x], path) for x in FLYWIRE_COLUMNS)
    if not len(pre):
        raise ValueError(f'{path} has no rows')
    if count.min() < 1:
        raise ValueError(f'{path}: {(count < 1).sum():,} rows have a synapse count below 1')
    neurons, place = np.unique(np.concatenate([pre, post]), return_inverse=True)
    n = len(neurons)
    pre, post = place[: len(pre)], place[len(pre) :]
    repeated = np.zeros(len(pre), bool)
    if _NEUROPIL in columns:
        repeated = _repeated(np.stack([pre, post, columns[_NEUROPIL], count]))
    kept = ~repeated
    pairs = sparse.coo_array((count[kept], (pre[kept], post[kept])), shape=(n, n)).tocsr()
    strong = pairs.multiply(pairs >= min_synapses).tocsr()
    strong.eliminate_zeros()
    graph, loops = simple_graph(strong)
    if not graph.nnz:
        raise ValueError(f'{path} has no pair of neurons with at least {min_synapses} synapses')
    return Connectome(
        name='Fly brain',
        source=f'FlyWire, {path.name}, at least {min_synapses} synapses',
        graph=graph,
        cleaned={
            'rows': len(pre),
            'repeated rows': int(repeated.sum()),
            'pairs of neurons': pairs.nnz,
            'pairs below the threshold': pairs.nnz - strong.nnz,
            'self-loops': loops,
        },
    )


def load_worm() -> Connectome:
    """The chemical synapses of the hermaphrodite *C. elegans* (Cook et al. 2019), from `cect`.

    Its nodes are the cells, muscles and others among them, with a chemical connection to another.

    Raises:
      ImportError: if cect isn't installed.
    """
    try:
        reader = importlib.import_module(_CECT_READER)
    except ImportError as error:
        raise ImportError(
            f'C. elegans needs the package cect ({error}): pip install cect'
        ) from error
    dataset = reader.get_instance(from_cache=True)
    synapses = sparse.csr_array(np.asarray(dataset.connections['Generic_CS']))
    graph, loops = simple_graph(synapses)
    outgoing, incoming = np.diff(graph.indptr), np.bincount(graph.indices, minlength=graph.shape[0])
    cells = np.flatnonzero(outgoing + incoming)
    return Connectome(
        name='C. elegans',
        source='Cook et al. 2019, hermaphrodite, chemical synapses, from cect',
        graph=graph[cells][:, cells],
        cleaned={'cells without edges': len(dataset.nodes) - len(cells), 'self-loops': loops},
    )


def load_columns(extent: int = 15) -> Connectome:
    """The fly's motion pathway that `flyvis` simulates: its 65 cell types in columns on a hexagon.

    The package has the mean number of synapses between cell types by the distance of their
    columns. Every pair of cells at a distance where any were reported is an edge; gaps that
    flyvis fills with assumed synapses are none.

    Args:
      extent: columns from the middle to the rim; 15 as in flyvis.

    Raises:
      ImportError: if flyvis isn't installed.
      ValueError: an extent below 0.
    """
    if extent < 0:
        raise ValueError(f'extent={extent}; expected at least 0')
    # Importing flyvis would take PyTorch and create folders.
    package = importlib.util.find_spec('flyvis')
    if package is None or not package.submodule_search_locations:
        raise ImportError("The fly's visual columns need the package flyvis: pip install flyvis")
    path = Path(package.submodule_search_locations[0]) / _FLYVIS_FILE
    if not path.exists():
        raise ImportError(f'flyvis has no {_FLYVIS_FILE}; expected that of flyvis 1.x')
    specification = json.loads(path.read_text())
    cells = _hexagons(specification['nodes'], extent)
    n = 1 + max(grid.max() for grid in cells.values())
    source, target = [], []
    for edge in specification['edges']:
        for offset, synapses in edge['offsets']:
            if synapses > 0:
                pre, post = _shifted(cells[edge['src']], cells[edge['tar']], *offset)
                source.append(pre)
                target.append(post)
    source, target = np.concatenate(source), np.concatenate(target)
    graph, loops = simple_graph(from_edges(source, target, n))
    return Connectome(
        name='Fly visual columns',
        source=f'flyvis, {len(cells)} cell types in a hexagon of extent {extent}',
        graph=graph,
        cleaned={'repeated edges': len(source) - graph.nnz - loops, 'self-loops': loops},
    )


def _hexagons(types: list[dict[str, Any]], extent: int) -> dict[str, np.ndarray]:
    """By cell type the number of the cell at column (u + extent, v + extent), -1 where is none."""
    u, v = np.mgrid[-extent : extent + 1, -extent : extent + 1]
    inside = np.abs(u + v) <= extent
    cells, count = {}, 0
    for cell in types:
        pattern, strides = cell['pattern']
        if pattern != 'stride':
            raise ValueError(f"flyvis places {cell['name']} by {pattern!r}; expected 'stride'")
        has_cell = inside & (u % strides[0] == 0) & (v % strides[1] == 0)
        number = count + np.cumsum(has_cell).reshape(u.shape) - 1
        cells[cell['name']] = np.where(has_cell, number, -1)
        count += int(has_cell.sum())
    return cells


def _shifted(
    source: np.ndarray, target: np.ndarray, du: int, dv: int
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of a cell and another one du and dv columns on."""
    u, v = np.nonzero(source >= 0)
    size = len(source)
    inside = (u + du >= 0) & (u + du < size) & (v + dv >= 0) & (v + dv < size)
    u, v = u[inside], v[inside]
    pre, post = source[u, v], target[u + du, v + dv]
    exists = post >= 0
    return pre[exists], post[exists]


def _read_columns(path: Path) -> dict[str, Any]:
    """The columns by what they hold, and numbers for the neuropils if there are any."""
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist. {HOW_TO_GET_FLYWIRE}')
    formats = {'.parquet': 'parquet', '.feather': 'feather', '.csv': 'csv', '.csv.gz': 'csv'}
    kind = next((x for end, x in formats.items() if path.name.lower().endswith(end)), None)
    if kind is None:
        raise ValueError(f'{path}; expected {", ".join(formats)}')
    dataset = optional_import('pyarrow.dataset', 'tables of connections', 'corpora')
    table = dataset.dataset(path, format=kind)
    names = {}
    for what, known in FLYWIRE_COLUMNS.items():
        names[what] = next((x for x in known if x in table.schema.names), None)
        if names[what] is None:
            raise ValueError(
                f'{path} has no column for the {what} ({" or ".join(known)}); it has '
                f'{", ".join(table.schema.names)}'
            )
    if _NEUROPIL in table.schema.names:
        names[_NEUROPIL] = _NEUROPIL
    columns = table.to_table(columns=list(names.values()))
    found = {what: columns.column(name) for what, name in names.items()}
    if _NEUROPIL in found:
        encoded = found[_NEUROPIL].cast('string').combine_chunks().dictionary_encode()
        found[_NEUROPIL] = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return found


def _whole_numbers(what: str, column: Any, path: Path) -> np.ndarray:
    if column.null_count:
        raise ValueError(f'{path}: the {what} is missing in {column.null_count:,} rows')
    kind = str(column.type)
    # Neurons' ids have 18 digits, which floating-point numbers don't hold.
    if 'int' not in kind:
        raise ValueError(f'{path}: the {what} is of type {kind}; expected whole numbers')
    return column.to_numpy().astype(np.int64)


def _repeated(rows: np.ndarray) -> np.ndarray:
    """By column of `[fields, columns]` whether an equal one comes before it in some order."""
    order = np.lexsort(rows)
    repeated = np.zeros(rows.shape[1], bool)
    repeated[order[1:]] = (rows[:, order[1:]] == rows[:, order[:-1]]).all(0)
    return repeated
