"""Tasks by name: where they come from, and what is told of them."""

import json

import numpy as np
import pytest

from sa_jax.evaluation import named_tasks, programs
from sa_jax.evaluation.named_tasks import NamedTask, TaskOptions
from sa_jax.evaluation.scoring import Scorer
from sa_jax.evaluation.task_results import summarize
from sa_jax.tokenization.tokenizers import ByteTokenizer

ITEMS = [{'context': f'The {i}th cat sat on', 'continuation': 'it'} for i in range(4)]
PROBLEM = {
    'task_id': 'T/0',
    'prompt': 'def one():\n',
    'entry_point': 'one',
    'test': 'def check(function):\n    assert function() == 1\n',
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'cloze.jsonl').write_text('\n'.join(map(json.dumps, ITEMS)))
    (tmp_path / 'tale.txt').write_text('A cat sat on a mat. ' * 10)
    (tmp_path / 'humaneval.jsonl').write_text(json.dumps(PROBLEM))
    return tmp_path


def test_local_tasks_are_scored(folder, make_model):
    scorer = Scorer(make_model(), max_length=64)
    options = TaskOptions(limit=2, num_shots=1, text_window=16, text_limit=3)
    cloze = NamedTask('cloze', folder, options)
    found = cloze.evaluate(scorer, ByteTokenizer(), effective_windows=(20, 50))
    assert json.loads(json.dumps(found)) == found
    assert found['num_items'] == 2
    # Each behind another one, which is long enough for the first window.
    assert found['share_longer'] == {'20': 1.0, '50': 0.0}
    assert set(found['metrics']) == {'acc', 'perplexity'}
    tale = NamedTask('tale', folder, options)
    assert tale.is_text
    assert not cloze.is_text
    assert tale.evaluate(scorer, ByteTokenizer())['num_items'] == 3
    assert tale.fingerprint != cloze.fingerprint


def test_groups_have_the_means_of_several_items():
    def groups(num_items):
        values = np.arange(num_items, dtype=float)
        result = summarize(
            [{'acc': value} for value in values],
            num_read=[1] * num_items,
            num_dropped=[0],
            effective_windows=(),
        )
        return named_tasks._groups(result)

    assert groups(39) == {}
    assert groups(40)['acc'] == [2 + 5 * group for group in range(8)]
    assert len(groups(1000)['acc']) == 20


def test_programs_need_a_confirmation(folder, monkeypatch):
    monkeypatch.setattr(programs, 'load_humaneval', lambda limit: None)
    for place in (folder, None):
        with pytest.raises(ValueError, match='set confirm_run_unsafe_code to run them'):
            NamedTask('humaneval', place, TaskOptions())


def test_missing_tasks_are_named(folder):
    with pytest.raises(ValueError, match=r"0 files for the task 'tail'.*cloze, humaneval, tale"):
        NamedTask('tail', folder, TaskOptions())
    (folder / 'tale.jsonl').write_text('')
    with pytest.raises(ValueError, match="2 files for the task 'tale'"):
        NamedTask('tale', folder, TaskOptions())


def test_tasks_of_the_harness(make_model, monkeypatch):
    harness = pytest.importorskip('sa_jax.evaluation.harness')
    monkeypatch.setattr(named_tasks, '_harness_tasks', lambda: frozenset(['mathqa', 'boolq']))
    with pytest.raises(ValueError, match=r"no task 'bolq'.*Did you mean 'boolq'"):
        NamedTask('bolq', None, TaskOptions())
    task = NamedTask('boolq', None, TaskOptions(limit=3))
    assert task.fingerprint.startswith('lm_eval 0.')

    def evaluate_tasks(models, names, *, limit, num_shots):
        (model,), (name,) = models, names
        model._loglikelihood_tokens([(None, [1] * 10, [2]), (None, [1] * 80, [2])])
        metrics = {'acc': {'mean': 0.5, 'std': None, 'values': [0.5], 'stderr': 0.1}}
        return {name: {'metrics': metrics, 'num_items': limit}, 'more': {}}

    monkeypatch.setattr(harness, 'evaluate_tasks', evaluate_tasks)
    scorer = Scorer(make_model(), max_length=64)
    found = task.evaluate(scorer, ByteTokenizer(), effective_windows=(16,))
    assert found == {
        'metrics': {'acc': {'value': 0.5, 'stderr': 0.1}},
        'num_items': 3,
        'mean_tokens': 37,
        'share_longer': {'16': 0.5},
        'num_truncated': 1,
        'num_dropped': 16,
        'groups': {},
    }
