"""Tables of connections made up here, and the packages' connectomes where they are installed."""

import importlib.util
import json
import types

import numpy as np
import pytest

from sa_jax.analysis import connectomes
from sa_jax.analysis.graphs import statistics

pa = pytest.importorskip('pyarrow')

# Neurons' ids have 18 digits.
A, B, C, D = 720575940596125868, 720575940608552405, 720575940611348834, 720575940613059993
ROWS = [
    # pre, post, neuropil, synapses
    (A, B, 'LOP_R', 3),
    (A, B, 'ME_R', 2),  # five in all: an edge
    (A, B, 'ME_R', 2),  # repeated, not counted
    (B, C, 'FB', 4),  # too few
    (B, C, 'EB', 9),
    (C, A, None, 7),
    (C, C, 'FB', 11),  # a self-loop
    (D, A, 'FB', 1),  # too few: D has no edge
]
NAMES = ('pre_root_id', 'post_root_id', 'neuropil', 'syn_count')


def table(names=NAMES, rows=ROWS):
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def write(path, content):
    if path.name.endswith('.parquet'):
        pytest.importorskip('pyarrow.parquet').write_table(content, path)
    elif path.name.endswith('.feather'):
        pytest.importorskip('pyarrow.feather').write_feather(content, str(path))
    else:
        csv = pytest.importorskip('pyarrow.csv')
        compression = 'gzip' if path.name.endswith('.gz') else None
        with pa.output_stream(path, compression=compression) as stream:
            csv.write_csv(content, stream)
    return path


@pytest.mark.parametrize('suffix', ['csv', 'csv.gz', 'parquet', 'feather'])
def test_flywire(suffix, tmp_path):
    path = write(tmp_path / f'connections.{suffix}', table())
    fly = connectomes.load_flywire(path)
    np.testing.assert_array_equal(
        fly.graph.toarray(), [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    )
    assert fly.cleaned == {
        'rows': 8,
        'repeated rows': 1,
        'pairs of neurons': 5,
        'pairs below the threshold': 1,
        'self-loops': 1,
    }
    assert f'connections.{suffix}' in fly.source
    assert connectomes.load_flywire(path, min_synapses=1).graph.nnz == 4
    assert connectomes.load_flywire(path, min_synapses=8).graph.nnz == 1


def test_flywire_without_neuropils_and_with_other_names(tmp_path):
    """Rows of a pair are added then: nothing tells a repeated one from another region's."""
    names = ('pre_pt_root_id', 'post_pt_root_id', 'syn_count')
    rows = [(A, B, 3), (A, B, 2), (B, A, 4)]
    fly = connectomes.load_flywire(write(tmp_path / 'x.feather', table(names, rows)))
    np.testing.assert_array_equal(fly.graph.toarray(), [[0, 1], [0, 0]])
    assert fly.cleaned['repeated rows'] == 0


@pytest.mark.parametrize(
    ('names', 'rows', 'message'),
    [
        (
            ('pre_root_id', 'target', 'neuropil', 'syn_count'),
            ROWS,
            r'no column for the postsynaptic neuron \(post_root_id or post_pt_root_id\); it has '
            'pre_root_id, target, neuropil, syn_count',
        ),
        ((*NAMES[:3], 'weight'), ROWS, 'no column for the number of synapses'),
        (NAMES, [(A, B, 'FB', 0), (B, A, 'FB', 5)], '1 rows have a synapse count below 1'),
        (NAMES, [(None, B, 'FB', 5), (B, A, 'FB', 5)], 'presynaptic neuron is missing in 1 rows'),
        (NAMES, [(A + 0.5, B, 'FB', 5)], 'type double; expected whole numbers'),
        (NAMES, [(A, B, 'FB', 4)], 'no pair of neurons with at least 5 synapses'),
    ],
)
def test_bad_tables_are_named(names, rows, message, tmp_path):
    path = write(tmp_path / 'bad.parquet', table(names, rows))
    with pytest.raises(ValueError, match=message):
        connectomes.load_flywire(path)


def test_bad_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'codex\.flywire\.ai'):
        connectomes.load_flywire(tmp_path / 'none.csv')
    (tmp_path / 'table.xlsx').touch()
    with pytest.raises(ValueError, match=r'expected \.parquet, \.feather, \.csv'):
        connectomes.load_flywire(tmp_path / 'table.xlsx')
    with pytest.raises(ValueError, match='min_synapses=0'):
        connectomes.load_flywire(tmp_path / 'none.csv', min_synapses=0)


def test_worm_against_its_known_figures():
    pytest.importorskip('cect')
    worm = connectomes.load_worm()
    assert worm.graph.shape == (446, 446)
    assert worm.graph.nnz == 4841
    assert worm.cleaned['self-loops'] == 38
    found = statistics(worm.graph, np.random.default_rng(0), sources=446, wedges=1)
    assert round(found.path_length.value, 2) == 2.92
    assert round(found.clustering.transitivity.value, 3) == 0.230
    assert round(found.reciprocity, 3) == 0.276
    assert found.strong_nodes == 275


def test_columns_of_flyvis():
    if importlib.util.find_spec('flyvis') is None:
        pytest.skip('flyvis is not installed')
    columns = connectomes.load_columns()
    # As many cells as flyvis simulates; fewer edges, since it fills gaps with assumed ones.
    assert columns.graph.shape == (45_669, 45_669)
    assert columns.graph.nnz == 1_357_269
    assert columns.cleaned == {'repeated edges': 0, 'self-loops': 0}


@pytest.fixture
def flyvis(tmp_path, monkeypatch):
    """A package with two cell types: one in every column, one in every second along u."""
    specification = {
        'nodes': [
            {'name': 'L1', 'pattern': ['stride', [1, 1]]},
            {'name': 'Am', 'pattern': ['stride', [2, 1]]},
        ],
        'edges': [
            {'src': 'L1', 'tar': 'Am', 'offsets': [[[0, 0], 3.0], [[1, 0], 0.5], [[0, 1], 0]]},
            {'src': 'L1', 'tar': 'L1', 'offsets': [[[0, 0], 1.0], [[0, -1], 2.0]]},
        ],
    }
    file = tmp_path / 'connectome' / 'fib25-fib19_v2.2.json'
    file.parent.mkdir()
    file.write_text(json.dumps(specification))
    package = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: package)
    return file


def test_columns_by_hand(flyvis):
    """Extent 1: seven columns, of which (0, -1), (0, 0) and (0, 1) have the second type."""
    columns = connectomes.load_columns(1)
    assert columns.graph.shape == (10, 10)
    places = [(-1, 0), (-1, 1), (0, -1), (0, 0), (0, 1), (1, -1), (1, 0)]
    number = {place: i for i, place in enumerate(places)}
    second = {(0, -1): 7, (0, 0): 8, (0, 1): 9}
    expected = set()
    for (u, v), cell in number.items():
        targets = [second.get((u, v)), second.get((u + 1, v)), number.get((u, v - 1))]
        expected |= {(cell, x) for x in targets if x is not None}
    assert set(zip(*columns.graph.nonzero(), strict=True)) == expected
    assert columns.cleaned == {'repeated edges': 0, 'self-loops': 7}
    with pytest.raises(ValueError, match='extent=-1'):
        connectomes.load_columns(-1)
    flyvis.unlink()
    with pytest.raises(ImportError, match=r'no connectome/fib25-fib19_v2.2.json'):
        connectomes.load_columns(1)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match='pip install flyvis'):
        connectomes.load_columns()
    monkeypatch.setattr(connectomes, '_CECT_READER', 'no_such_package.reader')
    with pytest.raises(ImportError, match='pip install cect'):
        connectomes.load_worm()


def test_published_figures_agree_with_one_another():
    fly = connectomes.PUBLISHED_FLY
    assert fly.connection_probability == pytest.approx(
        fly.edges / (fly.nodes * (fly.nodes - 1)), rel=1e-4
    )
    assert fly.strong_nodes < fly.weak_nodes < fly.nodes_with_edges < fly.nodes
