"""The small-world experiment on tiny graphs, its tables and its figure."""

import dataclasses
import json

import matplotlib.image
import numpy as np
import pytest

from sa_jax.analysis import connectomes
from sa_jax.analysis.connectomes import Connectome
from sa_jax.analysis.random_graphs import watts_strogatz
from sa_jax.analysis.small_world import Settings, measure
from sa_jax.report import small_world_plot, small_world_tables

TINY = {
    'tokens': 400,
    'window': 9,
    'layers': (1, 3),
    'rewired': (0.1, 1.0),
    'sources': 8,
    'wedges': 1000,
}


@pytest.fixture(scope='module')
def result():
    """The fly by its published figures, a made-up worm, and no columns."""

    def no_columns(extent):
        raise ImportError('pip install flyvis')

    graph = watts_strogatz(90, 9, 0.2, np.random.default_rng(0))
    worm = Connectome('Worm', 'made up', graph, {'self-loops': 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connectomes, 'load_worm', lambda: worm)
        patch.setattr(connectomes, 'load_columns', no_columns)
        settings = Settings(**TINY)
        figures = measure(settings)
    return json.loads(json.dumps({'config': dataclasses.asdict(settings), 'figures': figures}))


def rows_of(result, number):
    return {x['label']: x['statistics'] for x in result['figures']['groups'][number]['rows']}


def test_measure(result):
    fly, worm = result['figures']['groups']
    assert (fly['tokens'], fly['window']) == (400, 9)
    assert fly['source'] is None
    assert fly['published']['small_worldness'] == 141.02
    assert (worm['tokens'], worm['window']) == (90, 10)
    assert worm['published'] is None
    assert result['figures']['missing'] == {'columns': 'pip install flyvis'}
    labels = [
        'SWA',
        'SA, 1 layer',
        'SA, 3 layers',
        'SA + SWA, 1 layer',
        'SA + SWA, 3 layers',
        'Watts–Strogatz, 0.1 rewired',
        'Watts–Strogatz, 1 rewired',
    ]
    assert list(rows_of(result, 0)) == labels
    assert list(rows_of(result, 1)) == ['Worm', *labels]

    # The lattice has long paths and clusters, a random graph neither; SA is a lattice in one layer.
    x = rows_of(result, 0)
    length = {name: x[name]['path_length']['value'] for name in x}
    clustering = {name: x[name]['clustering']['parallel']['value'] for name in x}
    assert length['SWA'] > 3 * length['SA, 3 layers']
    assert clustering['SA, 1 layer'] == clustering['SWA']
    assert clustering['SA, 1 layer'] > 1.5 * clustering['SA, 3 layers']
    assert clustering['SA + SWA, 1 layer'] > 3 * clustering['Watts–Strogatz, 1 rewired']
    assert length['SA + SWA, 1 layer'] < 1.3 * length['Watts–Strogatz, 1 rewired']


def test_same_seed_same_figures(result):
    again = measure(Settings(**TINY, connectomes=('fly',)))
    first = [x['statistics'] for x in result['figures']['groups'][0]['rows']]
    assert [x['statistics'] for x in again['groups'][0]['rows']] == first


def test_tables(result):
    text = small_world_tables.tables(result)
    assert 'Fly brain, **published** | 127,319 | 2,613,129 | 0.0001612 | 0.04633 | – | –' in text
    assert 'Not measured: no edge list was given.' in text
    assert 'codex.flywire.ai' in text
    assert '| Worm, **measured** | 90 | 810 |' in text
    assert 'n is not the fly’s' in text
    assert 'made up. self-loops: 3.' in text
    assert '- pip install flyvis' in text
    # Sampled figures have an interval, counted ones none.
    swa = next(x for x in text.splitlines() if x.startswith('| SWA |'))
    cells = swa.split(' | ')
    assert '±' in cells[-1]
    assert '±' not in cells[4]


@pytest.mark.parametrize(
    ('value', 'error', 'expected'),
    [(0.04633, 0.0001, '0.04633 ± 0.00020'), (3960.4, 51.0, '3,960 ± 100'), (0.25, 0.0, '0.2500')],
)
def test_figures_to_the_digit_of_their_interval(value, error, expected):
    assert small_world_tables._estimate({'value': value, 'error': error}) == expected


def test_figure(result, tmp_path):
    small_world_plot.plot(result, tmp_path)
    image = matplotlib.image.imread(tmp_path / 'small_world.png')
    assert image.shape[0] > 500
    assert image[..., :3].std() > 0.05
    svg = (tmp_path / 'small_world.svg').read_text()
    small_world_plot.plot(result, tmp_path)
    assert (tmp_path / 'small_world.svg').read_text() == svg


def test_fly_from_its_table(tmp_path):
    pytest.importorskip('pyarrow')
    graph = watts_strogatz(60, 4, 0.1, np.random.default_rng(1))
    source, target = graph.nonzero()
    # A pair at the threshold, one below it, and a neuron that has no other.
    lines = [f'{i},{j},FB,5' for i, j in zip(source, target, strict=True)] + ['0,99,FB,4']
    path = tmp_path / 'connections.csv'
    path.write_text('\n'.join(['pre_root_id,post_root_id,neuropil,syn_count', *lines]) + '\n')
    settings = Settings(
        connectomes=('fly',),
        flywire=str(path),
        layers=(1,),
        rewired=(1.0,),
        sources=8,
        wedges=100,
    )
    (group,) = measure(settings)['groups']
    assert (group['tokens'], group['window']) == (60, 5)
    fly = group['rows'][0]
    assert fly['kind'] == 'connectome'
    # The neuron without edges is a node all the same.
    assert (fly['statistics']['nodes'], fly['statistics']['edges']) == (61, 240)
    assert group['published'] is not None


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'tokens': 0}, 'tokens=0; expected at least 1'),
        ({'window': 500}, 'window=500 among n=400 tokens; expected at most n'),
        ({'window': 1}, 'window=1; expected at least 2'),
        ({'layers': (8,)}, 'shared among the 9 windows of SA . SWA in 8 layers'),
        ({'layers': (0,)}, r'layers=\(0,\); expected at least 1'),
        ({'layers': ()}, r'layers=\(\); expected one or several'),
        ({'rewired': (0.1, 2.0)}, 'expected probabilities'),
        ({'sources': 1}, 'sources=1; expected at least 2'),
        ({'wedges': 0}, 'wedges=0; expected at least 1'),
        ({'connectomes': ('mouse',)}, 'connectomes=mouse; expected some of fly, worm, columns'),
        ({'connectomes': ('worm',)}, 'tokens belongs to the fly'),
        ({'min_synapses': 0}, 'min_synapses=0; expected at least 1'),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**TINY | changes)


def test_a_named_connectome_must_be_there(monkeypatch):
    monkeypatch.setattr(connectomes, '_CECT_READER', 'no_such_package.reader')
    with pytest.raises(ImportError, match='pip install cect'):
        measure(Settings(connectomes=('worm',)))
    with pytest.raises(FileNotFoundError, match=r'none\.csv does not exist'):
        measure(Settings(flywire='none.csv'))


def test_flags(run_experiment, tmp_path):
    flags = ['--quick', '--tokens=100', '--window=6', '--layers=1', '--rewired=1']
    done = run_experiment('small_world', *flags, '--connectomes=fly', f'--workdir={tmp_path}')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'small_world.md').read_text() == done.stdout
    assert (tmp_path / 'small_world.png').exists()
    result = json.loads((tmp_path / 'result.json').read_text())
    assert result['config']['layers'] == [1]
    # What --quick changes, unless it is given.
    assert (result['config']['wedges'], result['config']['tokens']) == (1 << 18, 100)
    assert result['seeds'] == {'permutations, random graphs and samples': 0}
    assert result['figures']['groups'][0]['rows'][0]['seconds'] > 0


@pytest.mark.slow
def test_bad_flags_are_named(run_experiment, tmp_path):
    for flags, message in (
        (['--tokens=0'], 'tokens=0; expected at least 1'),
        (['--tokens=20', '--window=21'], 'window=21 among n=20 tokens'),
        (['--layers=1,two'], '--layers=1,two; expected numbers'),
        (['--flywire=none.csv'], 'none.csv does not exist'),
    ):
        done = run_experiment('small_world', *flags, f'--workdir={tmp_path}')
        assert done.returncode == 1
        assert message in done.stdout + done.stderr
        assert 'Traceback' not in done.stderr
