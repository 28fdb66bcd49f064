"""Tables and figure of made-up training-free sweeps."""

import math

import matplotlib.image
import numpy as np
import pytest

from sa_jax.report import training_free_plot, training_free_tables
from sa_jax.report.training_free_scores import MEAN, Scores

# By task the mean of each pattern and window; draws lie 0.02 to either side.
ACCURACIES = {
    'lambada_openai': {'full': 0.5, ('swa', 64): 0.30, ('sa', 64): 0.40, ('moba', 64): 0.20},
    'boolq': {'full': 0.7, ('swa', 64): 0.60, ('sa', 64): 0.64, ('moba', 64): 0.62},
}
ODD = np.tile([1.0, -1.0], 5)


def cell(task, pattern, window, draw, value, perplexity=None, shift=0.0):
    groups = {'acc': (value + 0.1 * ODD + shift).tolist()}
    metrics = {'acc': {'value': value, 'stderr': 0.03}, 'acc_norm': {'value': 0, 'stderr': 0}}
    if perplexity is not None:
        metrics['perplexity'] = {'value': perplexity, 'stderr': perplexity / 10}
        groups['perplexity'] = (math.log(perplexity) + 0.1 * ODD).tolist()
    return {
        'task': task,
        'pattern': pattern,
        'effective_window': window,
        'draw': draw,
        'metrics': metrics,
        'groups': groups,
        'num_items': 100,
        'mean_tokens': 83.2,
        'share_longer': {'64': 0.75},
        'num_truncated': 2,
        'num_dropped': 1234,
        'num_shots': 5,
        'seconds': 1.0,
    }


def make_result(model='Small-1M', parameters=1_234_567, **config):
    cells = []
    for task, of_task in ACCURACIES.items():
        for place, value in of_task.items():
            pattern, window = (place, None) if place == 'full' else place
            for draw, change in enumerate((-0.02, 0.02) if pattern == 'sa' else (0.0,)):
                perplexity = 10 / value if task == 'lambada_openai' else None
                cells.append(cell(task, pattern, window, draw, value + change, perplexity))
    return {
        'config': {
            'model': model,
            'patterns': ['full', 'swa', 'sa', 'moba'],
            'effective_windows': [64],
            'tasks': list(ACCURACIES),
            'task_data': None,
            'limit': 100,
            'num_shots': None,
            'draws': 2,
            'continuation': 'prefill',
            'num_sinks': 0,
            'full_layers': [],
            'permutation_scope': 'layer',
        }
        | config,
        'device': {'kind': 'cpu', 'platform': 'cpu', 'host': 'x86_64, 2 CPUs'},
        'figures': {
            'model': {'parameters': parameters, 'layers': 2, 'dtype': 'float32'},
            'cells': cells,
            'missing': 0,
        },
    }


@pytest.fixture
def result():
    return make_result()


def rows(text, title):
    """The header and the cells of the table under a title, by the texts before the numbers."""
    section = text.split(f'# {title}')[1].split('\n#')[0]
    lines = [x.strip('| ').split(' | ') for x in section.splitlines() if x.startswith('|')]
    texts = lines[1].count('---')
    return lines[0], {' '.join(x[:texts]): x[texts:] for x in lines[2:]}


def test_scores_join_draws(result):
    scores = Scores(result)
    score = scores.accuracy('boolq', 'sa', 64)
    assert score.value == pytest.approx(64)
    assert score.spread == pytest.approx(2 * math.sqrt(2))
    assert score.stderr == pytest.approx(3)
    mean = scores.accuracy(MEAN, 'sa', 64)
    assert mean.value == pytest.approx(52)
    # Both tasks move together from draw to draw, and their items are independent.
    assert mean.spread == pytest.approx(2 * math.sqrt(2))
    assert mean.stderr == pytest.approx(3 / math.sqrt(2))
    assert scores.accuracy(MEAN, 'swa', 64).spread is None
    assert scores.accuracy('boolq', 'swa', 32) is None


def test_differences_are_taken_on_the_same_items(result):
    scores = Scores(result)
    # The groups differ from each other, but by as much under both patterns.
    difference = scores.accuracy_difference('boolq', 'moba', 'swa', 64)
    assert difference.value == pytest.approx(2)
    assert difference.stderr == pytest.approx(0, abs=1e-9)
    for x in result['figures']['cells']:
        if (x['task'], x['pattern']) == ('boolq', 'swa'):
            x['groups']['acc'] = (0.6 - 0.1 * ODD).tolist()
    scores = Scores(result)
    difference = scores.accuracy_difference('boolq', 'sa', 'swa', 64)
    assert difference.value == pytest.approx(4)
    # Groups differ by 0.04 ± 0.2, and two draws by 0.04.
    assert difference.stderr == pytest.approx(math.hypot(20 / 3, 2))
    mean = scores.accuracy_difference(MEAN, 'sa', 'swa', 64)
    assert mean.value == pytest.approx(7)
    # The draws of both tasks move together.
    assert mean.stderr == pytest.approx(math.hypot(10 / 3, 2))
    ratio = scores.perplexity_ratio('lambada_openai', 'swa', 'full', 64)
    assert ratio.value == pytest.approx(5 / 3)
    assert ratio.stderr == pytest.approx(0, abs=1e-9)
    for x in result['figures']['cells']:
        if x['pattern'] == 'sa' and 'perplexity' in x['metrics']:
            x['metrics']['perplexity']['value'] = 20 + 10 * x['draw']
    ratio = Scores(result).perplexity_ratio('lambada_openai', 'sa', 'full', 64)
    # The mean of two logarithms is off by half of their difference.
    assert ratio.stderr == pytest.approx(ratio.value * math.log(1.5) / 2)
    for x in result['figures']['cells']:
        x['groups'] = {}
    assert Scores(result).accuracy_difference('boolq', 'sa', 'swa', 64) is None


def test_tables(result):
    text = training_free_tables.tables([result])
    assert '1.2M parameters, at most 100 items a task; float32' in text
    assert 'standard error over the items is up to 3.0 points' in text
    header, accuracy = rows(text, 'Accuracy, %, by effective window')
    assert header == ['task', 'full', 'SWA 64', 'SA 64', 'MoBA 64']
    assert accuracy['boolq (acc)'] == ['70.0', '60.0', '64.0 ± 2.8', '62.0']
    assert accuracy['**mean**'] == ['60.0', '45.0', '52.0 ± 2.8', '41.0']
    _, perplexity = rows(text, 'Perplexity, by effective window')
    assert list(perplexity) == ['lambada_openai']
    assert perplexity['lambada_openai'][1] == '33.33'
    _, gaps = rows(text, 'Stochastic attention against others')
    assert gaps['boolq SA − MoBA, points'] == ['+2.0 ± 2.0']
    assert gaps['boolq SA − full, points'] == ['−6.0 ± 2.0']
    header, lengths = rows(text, 'Lengths')
    names = ['task', 'items', 'solved before each', 'tokens, mean', '> 64, %']
    assert header == [*names, 'requests cut', 'tokens cut']
    assert lengths['boolq'] == ['100', '5', '83', '75', '2', '1,234']
    for x in result['figures']['cells']:
        del x['num_shots']
    _, lengths = rows(training_free_tables.tables([result]), 'Lengths')
    assert lengths['boolq'][1] == '–'
    _, keys = rows(text, 'Keys that a query sees')
    assert keys['a very long text SWA'] == keys['a very long text SA'] == ['64.0']
    assert keys['a very long text MoBA'] == ['48.5']
    assert keys['boolq, 83 tokens SA'] == keys['boolq, 83 tokens SWA'] == ['39.7']


def test_the_papers_figures_stand_beside(result):
    others = make_result('Big-2B', 2_000_000_000, limit=None)
    _, table = rows(training_free_tables.tables([result, others]), "Beside the paper's Tables")
    assert table['the paper Qwen3-8B 64 mean of 7 tasks'] == ['71.5', '50.7', '62.9', '66.4']
    assert table['the paper Qwen3-8B 32 mmlu'] == ['–', '29.0', '–', '44.4']
    ours = 'mean of lambada_openai, boolq'
    small = f'ours Small-1M: 1.2M parameters, at most 100 items a task 64 {ours}'
    assert table[small] == ['60.0', '45.0', '41.0', '52.0 ± 2.8']
    assert table[f'ours Big-2B: 2.00B parameters, all items 64 {ours}'] == table[small]
    # Windows that nobody measured, and tasks that weren't asked.
    assert not [name for name in table if 'Big-2B' in name and ' 256 ' in name]
    assert not [name for name in table if name.startswith('ours') and 'mmlu' in name]


def test_an_unfinished_sweep_has_no_mean(result):
    cells = result['figures']['cells']
    cells[:] = [x for x in cells if (x['task'], x['pattern']) != ('boolq', 'swa')]
    result['figures']['missing'] = 1
    text = training_free_tables.tables([result])
    assert 'Unfinished: 1 cells are not measured.' in text
    _, accuracy = rows(text, 'Accuracy')
    assert accuracy['boolq (acc)'][1] == accuracy['**mean**'][1] == 'not measured'
    cells[:] = [x for x in cells if (x['task'], x['draw']) != ('boolq', 1)]
    _, accuracy = rows(training_free_tables.tables([result]), 'Accuracy')
    assert accuracy['**mean**'][2] == 'not measured'


def test_what_has_no_known_metric_is_named(result):
    for x in result['figures']['cells']:
        if x['task'] == 'boolq':
            x['metrics'] = {'exact_match,strict': {'value': 0.5, 'stderr': None}, 'f1': {}}
    text = training_free_tables.tables([result])
    assert 'is known of boolq, whose metrics are exact_match,strict, f1.' in text
    assert 'No accuracy' not in training_free_tables.tables([make_result()])


def test_layers_with_full_attention_are_told_beside_the_keys(result):
    result['config']['full_layers'] = ['-3:', '0']
    text = training_free_tables.tables([result])
    assert 'In the layers -3:, 0 it sees all before it.' in text


def test_length_normalised_where_papers_do_so(result):
    for x in result['figures']['cells']:
        x['task'] = x['task'].replace('boolq', 'hellaswag')
    result['config']['tasks'] = ['lambada_openai', 'hellaswag']
    metrics = Scores(result).accuracies
    assert metrics == {'lambada_openai': 'acc', 'hellaswag': 'acc_norm'}


@pytest.mark.parametrize('models', [1, 2])
def test_plot(result, tmp_path, models):
    path = tmp_path / 'figure.png'
    training_free_plot.plot(models * [result], path)
    height, width, _ = matplotlib.image.imread(path).shape
    # Accuracy and one perplexity, a row for each model.
    assert height / width == pytest.approx(models * 4.5 / 9.6, rel=0.1)


def test_plot_without_perplexity_has_the_models_side_by_side(result, tmp_path):
    result['config']['tasks'] = ['boolq']
    path = tmp_path / 'figure.png'
    training_free_plot.plot([result, result], path)
    height, width, _ = matplotlib.image.imread(path).shape
    assert width > 1.8 * height
