"""Models out of a run's checkpoints, and into a new run."""

import jax
import numpy as np
import pytest
from flax import nnx

from sa_jax.models.pretrained import load_pretrained, save_pretrained
from sa_jax.training.restore import begin_run, is_run, load_run
from sa_jax.training.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def bpe(text_dir):
    """Changes that give a run a tokenizer that can be saved."""
    return {
        'training__steps': 4,
        'training__checkpoint_every': 2,
        'evaluation__every': 0,
        'model__vocab_size': 300,
        'data__tokenizer__kind': 'bpe',
        'data__tokenizer__vocab_size': 300,
        'data__path': str(text_dir),
    }


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model))


def test_there_and_back(tiny, bpe, data_dir, tmp_path, one_device):
    run = train(tiny(**bpe), tmp_path / 'run', data_dir, devices=one_device)
    assert is_run(tmp_path / 'run')
    loaded = load_run(tmp_path / 'run', data_dir)
    jax.tree.map(np.testing.assert_array_equal, params_of(loaded.model), run.state.params)
    assert loaded.context_length == 64
    earlier = load_run(tmp_path / 'run', data_dir, step=2)
    differences = jax.tree.map(
        lambda x, y: np.abs(x - y).max(), params_of(earlier.model), run.state.params
    )
    assert max(jax.tree.leaves(differences)) > 0
    with pytest.raises(ValueError, match='no checkpoint of step 3; it has 2, 4'):
        load_run(tmp_path / 'run', data_dir, step=3)
    with pytest.raises(ValueError, match='no workdir of a run'):
        load_run(tmp_path, data_dir)
    (tmp_path / 'run' / 'checkpoints' / '2' / 'state' / 'manifest.ocdbt').write_bytes(b'')
    with pytest.raises(ValueError, match='2 is damaged: state'):
        load_run(tmp_path / 'run', data_dir, step=2)

    saved = tmp_path / 'run' / 'config.json'
    whole = saved.read_text()
    saved.write_text(whole.replace('"sequence_length"', '"length"'))
    with pytest.raises(ValueError, match=r'config\.json: it is damaged .*sequence_length'):
        load_run(tmp_path / 'run', data_dir)
    saved.write_text(whole)

    save_pretrained(loaded, tmp_path / 'files')
    from_files = load_pretrained(tmp_path / 'files', dtype='float32')
    jax.tree.map(np.testing.assert_array_equal, params_of(from_files.model), run.state.params)
    file = {'data__tokenizer__kind': 'file', 'data__tokenizer__path': str(tmp_path / 'files')}
    config = tiny(**bpe | file)
    begin_run(from_files, config, tmp_path / 'next', data_dir)
    with pytest.raises(ValueError, match='holds a run already'):
        begin_run(from_files, config, tmp_path / 'next', data_dir)
    begun = load_run(tmp_path / 'next', data_dir)
    jax.tree.map(np.testing.assert_array_equal, params_of(begun.model), run.state.params)
    further = train(config, tmp_path / 'next', data_dir, devices=one_device)
    assert further.finished
    assert int(further.state.step) == 4

    other = tiny(**bpe | file | {'model__intermediate_size': 32})
    with pytest.raises(ValueError, match=r"don't fit the configuration: .*feed_forward"):
        begin_run(from_files, other, tmp_path / 'other', data_dir)
    with pytest.raises(ValueError, match="tokenizer is not the configuration's"):
        begin_run(from_files._replace(tokenizer=None), config, tmp_path / 'other', data_dir)
