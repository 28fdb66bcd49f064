"""The loop: resuming, refusing, stopping, sharding."""

import json
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.training import trainer
from sa_jax.training.metrics import TIME_FIELDS, read_metrics
from sa_jax.training.program import Program
from sa_jax.training.trainer import NonFiniteError, StopOnSigterm, describe_norms
from sa_jax.training.workdir import claim_workdir


class StopAfter:
    """Asks to stop once it has been asked a number of times, once for each step."""

    def __init__(self, steps):
        self._left = steps

    @property
    def requested(self):
        self._left -= 1
        return self._left <= 0


def records(workdir):
    """The metrics but for those fields that depend on the clock."""
    return [
        {name: value for name, value in record.items() if name not in TIME_FIELDS}
        for record in read_metrics(workdir / 'metrics.jsonl')
    ]


def assert_equal_states(first, second):
    def compare(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)

    jax.tree.map(compare, first, second)


@pytest.fixture
def train(data_dir, one_device):
    def run(config, workdir, **options):
        return trainer.train(config, workdir, data_dir, **({'devices': one_device} | options))

    return run


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    """The folder of the module's uninterrupted run."""
    return tmp_path_factory.mktemp('reference') / 'run'


@pytest.fixture(scope='module')
def cache():
    return {}


@pytest.fixture
def reference(tiny, train, uninterrupted, cache):
    """The module's uninterrupted run."""
    if 'run' not in cache:
        cache['run'] = train(tiny(), uninterrupted)
    return cache['run']


def test_run_records_every_step_and_evaluates(reference, uninterrupted):
    lines = records(uninterrupted)
    assert [line['step'] for line in lines] == list(range(1, 21))
    assert [line['step'] for line in lines if 'evaluation' in line] == [5, 10, 15, 20]
    assert {'loss', 'perplexity', 'grad_norm', 'learning_rate', 'tokens', 'gates'} <= set(lines[0])
    assert lines[-1]['loss'] < lines[0]['loss'] - 1
    assert lines[-1]['evaluation']['draws'] == 2
    assert lines[-1]['evaluation']['perplexity_std'] > 0
    assert 'tokens_per_s' in read_metrics(uninterrupted / 'metrics.jsonl')[0]
    assert reference.finished


def test_both_gates_move(reference, uninterrupted):
    first, last = records(uninterrupted)[0]['gates'], records(uninterrupted)[-1]['gates']
    for path in ('0_stochastic', '1_sliding_window'):
        assert first[path] == [0.5, 0.5]
        assert all(abs(gate - 0.5) > 1e-3 for gate in last[path])


def test_resume_is_exact(reference, uninterrupted, tiny, train, tmp_path):
    # Between two checkpoints of the policy, and between two evaluations.
    stopped = train(tiny(), tmp_path, stop=StopAfter(7))
    assert not stopped.finished
    assert stopped.checkpoint.name == '7'
    resumed = train(tiny(), tmp_path)
    assert resumed.finished
    assert_equal_states(reference.state, resumed.state)
    assert records(tmp_path) == records(uninterrupted)


def test_resume_after_losing_the_last_steps(uninterrupted, reference, tiny, train, tmp_path):
    workdir = tmp_path / 'run'
    shutil.copytree(uninterrupted, workdir)
    shutil.rmtree(workdir / 'checkpoints' / '20')
    resumed = train(tiny(), workdir)
    assert_equal_states(reference.state, resumed.state)
    assert records(workdir) == records(uninterrupted)


def test_nothing_is_compiled_twice(tiny, train, tmp_path):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if 'backend_compile' in name else None
    )
    counts = []
    for name, steps in (('first', 4), ('short', 6), ('long', 12)):
        compiled.clear()
        train(tiny(training__steps=steps, evaluation__every=2), tmp_path / name)
        counts.append(len(compiled))
    assert counts[1] == counts[2] > 0  # the first one also compiles what all runs share


def test_finished_run_has_nothing_to_do(uninterrupted, reference, tiny, train):
    before = (uninterrupted / 'metrics.jsonl').read_bytes()
    again = train(tiny(), uninterrupted)
    assert again.finished
    assert not again.evaluated
    assert_equal_states(reference.state, again.state)
    assert (uninterrupted / 'metrics.jsonl').read_bytes() == before


def test_more_steps_continue_and_fewer_are_refused(uninterrupted, reference, tiny, train, tmp_path):
    workdir = tmp_path / 'run'
    shutil.copytree(uninterrupted, workdir)
    train(tiny(training__steps=22), workdir)
    assert [record['step'] for record in records(workdir)] == list(range(1, 23))
    with pytest.raises(ValueError, match=r'already holds step 22, but training\.steps is 20'):
        train(tiny(), workdir)


def test_another_configuration_is_refused(uninterrupted, reference, tiny, train):
    config = tiny(optimizer__learning_rate=0.5, training__log_every=3)
    with pytest.raises(ValueError, match=r'learning_rate: 0.01 -> 0.5') as error:
        train(config, uninterrupted)
    assert 'log_every' not in str(error.value)
    assert json.loads((uninterrupted / 'config.json').read_text())['training']['log_every'] == 1


def test_claimed_workdir_takes_the_new_rhythm(tiny, tmp_path):
    claim_workdir(tmp_path, tiny())
    claim_workdir(tmp_path, tiny(training__log_every=3))
    assert json.loads((tmp_path / 'config.json').read_text())['training']['log_every'] == 3


def test_non_finite_loss_stops_and_is_never_saved(tiny, train, tmp_path, monkeypatch):
    place_batch, placed = Program.place_batch, []

    def place_poisoned_batch(self, batch):
        placed.append(batch)
        factor = np.nan if len(placed) == 4 else 1
        return place_batch(self, batch | {'weights': factor * batch['weights']})

    monkeypatch.setattr(Program, 'place_batch', place_poisoned_batch)
    with pytest.raises(NonFiniteError) as error:
        train(tiny(training__checkpoint_every=1), tmp_path)
    message = str(error.value)
    assert message.startswith('Step 4: loss nan')
    assert re.search(r'layers/attention/query\[1\]: gradient nan, .*<- not finite', message)
    assert f'Last good checkpoint: {tmp_path / "checkpoints" / "3"}' in message
    assert {path.name for path in (tmp_path / 'checkpoints').iterdir()} == {'2', '3'}
    assert [record['step'] for record in records(tmp_path)] == [1, 2, 3]


def test_norms_name_the_layer():
    norms = {
        'gradient': {'layers/a': np.array([1.0, np.nan]), 'b': np.array(2.0)},
        'parameter': {'layers/a': np.array([3.0, 4.0]), 'b': np.array(np.inf)},
    }
    marked = [line for line in describe_norms(norms).splitlines() if 'not finite' in line]
    assert [line.split(':')[0].strip() for line in marked] == ['layers/a[1]', 'b']


def test_sigterm_sets_the_flag_only_in_context():
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSigterm() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model__vocab_size': 200}, 'model.vocab_size'),
        ({'training__gradient_accumulation': 3}, 'training.batch_size is 8; expected a multiple'),
        ({'mesh__fsdp': 3}, 'mesh'),
        ({'training__batch_size': 0}, 'training.batch_size is 0'),
        ({'data__path': '/nowhere'}, '/nowhere'),
    ],
)
def test_errors_come_before_compilation(tiny, train, tmp_path, monkeypatch, changes, message):
    def compiled(*_):
        raise AssertionError('Compiled something')

    monkeypatch.setattr('jax.stages.Lowered.compile', compiled)
    with pytest.raises(ValueError, match=message):
        train(tiny(**changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_eight_devices_agree_with_one_on_the_fast_path(tiny, train, tmp_path):
    fast = {
        f'model__attention_options__{name}__implementation': 'xla'
        for name in ('stochastic', 'sliding_window')
    }
    mesh = {'mesh__data': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2}
    train(tiny(**fast), tmp_path / 'one')
    train(tiny(**fast, **mesh), tmp_path / 'eight', devices=None)
    one, eight = ([x['loss'] for x in records(tmp_path / name)] for name in ('one', 'eight'))
    assert len(one) == 20
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def test_eight_devices_agree_with_one(reference, uninterrupted, tiny, train, tmp_path):
    mesh = {'mesh__data': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2}
    eight = train(tiny(**mesh), tmp_path, devices=None)
    losses = [[line['loss'] for line in records(folder)] for folder in (uninterrupted, tmp_path)]
    assert len(losses[0]) == 20
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    query = eight.state.params['layers']['attention']['query']
    moment = eight.state.opt_state[1][0].mu['layers']['attention']['query']
    for array in (query, moment):
        assert len({shard.device for shard in array.addressable_shards}) == 8
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 16, 1, 16)}
