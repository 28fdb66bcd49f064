"""Tasks by name: where they come from, and what is told of them."""

import json

import numpy as np
import pytest

from sa_jax.evaluation import named_tasks, programs
from sa_jax.evaluation.named_tasks import NamedTask, TaskOptions
from sa_jax.evaluation.programs import ProgramTask
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
    assert (cloze.num_shots, tale.num_shots) == (1, 0)
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
    monkeypatch.setattr(programs, 'load_humaneval', lambda limit: ProgramTask('humaneval', []))
    # Whatever the file is called.
    (folder / 'puzzles.jsonl').write_text(json.dumps(PROBLEM))
    for name, place in (('humaneval', folder), ('humaneval', None), ('puzzles', folder)):
        with pytest.raises(ValueError, match='set confirm_run_unsafe_code to run them'):
            NamedTask(name, place, TaskOptions())


def test_what_a_model_cannot_be_asked_is_found_at_once(folder):
    tale = NamedTask('tale', folder, TaskOptions(text_window=16))
    tale.check(ByteTokenizer(), 15)
    with pytest.raises(ValueError, match='choose a window of at most 15'):
        tale.check(ByteTokenizer(), 14)


def test_missing_tasks_are_named(folder):
    with pytest.raises(ValueError, match=r"0 files for the task 'tail'.*cloze, humaneval, tale"):
        NamedTask('tail', folder, TaskOptions())
    (folder / 'tale.jsonl').write_text('')
    with pytest.raises(ValueError, match="2 files for the task 'tale'"):
        NamedTask('tale', folder, TaskOptions())


class HarnessTask:
    """A task as the harness gives it."""

    def __init__(self, output_type='multiple_choice'):
        self.OUTPUT_TYPE = output_type


@pytest.fixture
def in_harness(monkeypatch):
    """The harness with tasks that are loaded at once; its module, and what was loaded."""
    harness = pytest.importorskip('sa_jax.evaluation.harness')
    asked = []

    def load_tasks(names, *, num_shots):
        asked.append((*names, num_shots))
        found = {
            'tasks': {'boolq': HarnessTask(), 'wikitext': HarnessTask('loglikelihood_rolling')}
        }
        if names == ['several']:
            return harness.LoadedTasks(found, dict.fromkeys(found['tasks'], 0))
        return harness.LoadedTasks({'tasks': {x: found['tasks'][x] for x in names}}, {names[0]: 5})

    names = frozenset(['boolq', 'several', 'wikitext'])
    monkeypatch.setattr(named_tasks, '_harness_tasks', lambda: names)
    monkeypatch.setattr(harness, 'load_tasks', load_tasks)
    return harness, asked


def test_names_in_the_harness(in_harness):
    with pytest.raises(ValueError, match=r"no task 'bolq'.*Did you mean 'boolq'"):
        NamedTask('bolq', None, TaskOptions())
    with pytest.raises(ValueError, match=r'stands for several tasks .*: boolq, wikitext'):
        NamedTask('several', None, TaskOptions())
    # So that a sweep can refuse to decode them.
    assert NamedTask('wikitext', None, TaskOptions()).is_text
    assert not NamedTask('boolq', None, TaskOptions()).is_text


def test_tasks_of_the_harness(in_harness, make_model, monkeypatch):
    harness, asked = in_harness
    task = NamedTask('boolq', None, TaskOptions(limit=3, num_shots=5))
    assert task.fingerprint.startswith('lm_eval 0.')
    assert task.num_shots == 5

    def evaluate_tasks(models, tasks, *, limit):
        (model,), (name,) = models, tasks.found['tasks']
        model._loglikelihood_tokens([(None, [1] * 10, [2]), (None, [1] * 80, [2])])
        metrics = {'acc': {'mean': 0.5, 'std': None, 'values': [0.5], 'stderr': 0.1}}
        return {name: {'metrics': metrics, 'num_items': limit}, 'more': {}}

    monkeypatch.setattr(harness, 'evaluate_tasks', evaluate_tasks)
    scorer = Scorer(make_model(), max_length=64)
    found = task.evaluate(scorer, ByteTokenizer(), effective_windows=(16,))
    assert json.loads(json.dumps(found)) == {
        'metrics': {'acc': {'value': 0.5, 'stderr': 0.1}},
        'num_items': 3,
        'mean_tokens': 37,
        'share_longer': {'16': 0.5},
        'num_truncated': 1,
        'num_dropped': 16,
        'groups': {},
    }
    # The data are read once, whatever the number of evaluations.
    task.evaluate(scorer, ByteTokenizer())
    assert asked == [('boolq', 5)]
