"""The paper's models, built abstractly."""

import math

import jax
import pytest
from flax import nnx

from configs.pretrain.paper_360m import get_config
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.models.sharding import make_mesh, parameter_shardings


def _parameters(variant: str):
    config = DecoderConfig.from_config_dict(get_config(variant).model)
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def _count(parameters) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


@pytest.mark.parametrize('variant', ['full', 'swa', 'sa'])
def test_one_path_has_the_papers_parameter_count(variant):
    assert _count(_parameters(variant)) == 359_794_688


def test_gates_add_under_half_a_percent():
    gates = _count(_parameters('sa_swa')) - 359_794_688
    assert gates == 24 * 2 * 16 * (1024 + 1)
    assert gates / 359_794_688 < 0.005


def test_parameters_fit_a_mesh_of_data_and_fsdp():
    parameter_shardings(_parameters('sa_swa'), make_mesh(data=2, fsdp=4))


def test_setting():
    config = get_config('sa_swa')
    assert config.model.attention == ('stochastic', 'sliding_window')
    assert {options.window for options in config.model.attention_options.values()} == {256}
    tokens = config.training.steps * config.training.batch_size * config.data.sequence_length
    assert tokens == pytest.approx(15e9, rel=1e-4)
    with pytest.raises(ValueError, match=r'variant .moba. is unknown; choose one of full'):
        get_config('moba')
