"""Checkpoints: donation, shardings, policy."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sa_jax.training.checkpoints import Checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / 'checkpoints', keep=3)) as checkpoints:
        yield checkpoints


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state
    )


def test_saved_state_is_not_touched_by_the_training_that_goes_on(checkpoints):
    """Arrays on the CPU share their memory with NumPy: donating one must not reach the save."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {'x': jnp.zeros((2048, 1024)), 'key': jax.random.key(3)}
    for step in range(3):
        checkpoints.save(step, state, {'step': step}, {})
        for _ in range(4):
            state['x'] = increment(state['x'])
        jax.block_until_ready(state)
    for step in range(3):
        restored, data = checkpoints.restore(step, abstract(state))
        np.testing.assert_array_equal(restored['x'], np.full((2048, 1024), 4.0 * step))
        assert data == {'step': step}
    assert jnp.array_equal(jax.random.key_data(restored['key']), jax.random.key_data(state['key']))


def test_restores_into_other_shardings(checkpoints):
    state = {'x': jnp.arange(16.0).reshape(8, 2)}
    checkpoints.save(1, state, {}, {})
    mesh = Mesh(np.array(jax.devices()), ('data',))
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    assert checkpoints.latest_step() == 1
    restored, _ = checkpoints.restore(1, abstract(state, sharding))
    assert restored['x'].sharding == sharding
    np.testing.assert_array_equal(restored['x'], state['x'])


def test_keeps_the_latest(checkpoints):
    for step in range(5):
        checkpoints.save(step, {'x': jnp.ones(2)}, {}, {})
    assert checkpoints.latest_step() == 4
    kept = {path.name for path in checkpoints.directory.iterdir()}
    assert kept == {'2', '3', '4'}


def test_a_reader_disturbs_nobody_who_saves(checkpoints):
    checkpoints.save(1, {'x': jnp.ones(2)}, {}, {})
    assert checkpoints.steps() == [1]
    unfinished = checkpoints.directory / '2.orbax-checkpoint-tmp'
    unfinished.mkdir()
    with contextlib.closing(Checkpoints(checkpoints.directory, keep=None)) as reader:
        assert reader.steps() == [1]
    assert unfinished.exists()


def test_a_checkpoint_without_a_manifest(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, {'x': jnp.ones(2)}, {}, {})
    assert checkpoints.steps() == [1, 2]
    (checkpoints.directory / '2' / 'manifest.json').unlink()
    assert checkpoints.find_damage(2) == 'manifest.json is missing'
    (checkpoints.directory / '1' / 'manifest.json').unlink()
    assert checkpoints.find_damage(2) is None  # all from before there were any


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'compressor': {'id': 'zstd', 'level': 1}}, "array 'x' is compressed"),
        ({'chunks': [1 << 40]}, r"array 'x' of shape \[4\] has chunks of \[1099511627776\]"),
    ],
)
def test_small_files_that_become_large(checkpoints, changes, words):
    state = {'x': jnp.arange(4.0)}
    checkpoints.save(1, state, {}, {})
    assert checkpoints.steps() == [1]
    base = {'driver': 'file', 'path': f'{checkpoints.directory}/1/state/'}
    store = tensorstore.KvStore.open({'driver': 'ocdbt', 'base': base}).result()
    store['x/.zarray'] = json.dumps(json.loads(store['x/.zarray']) | changes)
    with pytest.raises(ValueError, match=words):
        checkpoints.restore(1, abstract(state))
    del store['x/.zarray']
    store['x/zarr.json'] = '{}'
    with pytest.raises(ValueError, match="array 'x' is in Zarr 3"):
        checkpoints.restore(1, abstract(state))
    (checkpoints.directory / '1' / 'state' / 'manifest.ocdbt').unlink()
    with pytest.raises(ValueError, match=r'has no manifest\.ocdbt'):
        checkpoints.restore(1, abstract(state))


def damage(folder, kind):
    """Damages the largest file of a checkpoint."""
    path = max((x for x in folder.glob('*/**/*') if x.is_file()), key=lambda x: x.stat().st_size)
    content = bytearray(path.read_bytes())
    if kind == 'missing':
        path.unlink()
        return
    if kind == 'truncated':
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize('kind', ['missing', 'truncated', 'flipped'])
def test_a_damaged_checkpoint_is_set_aside(checkpoints, capsys, kind):
    state = {'x': jnp.arange(1000.0)}
    for step in (1, 2, 3):
        checkpoints.save(step, state, {'step': step}, {})
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.set_damaged_aside()
    assert checkpoints.steps() == [1, 2, 3]
    for step in (2, 3):
        damage(checkpoints.directory / str(step), kind)
    checkpoints.set_damaged_aside()
    assert checkpoints.latest_step() == 1
    assert 'are set aside:\n  3: state/' in capsys.readouterr().err
    assert (checkpoints.directory / 'damaged-3').is_dir()
    _, data = checkpoints.restore(1, abstract(state))
    assert data == {'step': 1}
    # The run goes on, and its checkpoints are as good as any.
    checkpoints.save(2, state, {'step': 2}, {})
    assert checkpoints.latest_step() == 2
    checkpoints.set_damaged_aside()
    assert checkpoints.latest_step() == 2
    damage(checkpoints.directory / '2', kind)
    damage(checkpoints.directory / '1', kind)
    with pytest.raises(ValueError, match=r'No checkpoint in .* is whole:\n  2: .*\n  1: '):
        checkpoints.set_damaged_aside()
    assert checkpoints.steps() == [1, 2]
