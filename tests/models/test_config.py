"""Configurations are read, validated and hashable."""

import pytest
from ml_collections import ConfigDict

from sa_jax.models.config import DecoderConfig


def test_equal_configs_hash_alike(make_config):
    assert make_config() == make_config()
    assert hash(make_config()) == hash(make_config())
    assert make_config() != make_config(gate='channel')


def test_reads_a_config_section():
    section = ConfigDict(
        {
            'vocab_size': 8,
            'hidden_size': 4,
            'num_layers': 1,
            'num_heads': 2,
            'num_kv_heads': 1,
            'head_dim': 2,
            'intermediate_size': 8,
            'attention': ['stochastic'],
            'attention_options': {'stochastic': {'window': 3}},
        }
    )
    config = DecoderConfig.from_config_dict(section)
    assert config.attention == ('stochastic',)
    assert config.attention_options['stochastic']['window'] == 3
    assert hash(config) is not None


def test_names_the_nearest_field_and_missing_ones():
    with pytest.raises(ValueError, match=r"'hiden_size'.*Did you mean 'hidden_size'"):
        DecoderConfig.from_config_dict({'hiden_size': 4})
    with pytest.raises(ValueError, match='lacks vocab_size'):
        DecoderConfig.from_config_dict({'hidden_size': 4})


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'hidden_size': 0}, 'hidden_size.*at least 1, got 0'),
        ({'num_heads': 2.0}, 'num_heads.*got 2.0'),
        ({'num_kv_heads': 3}, 'got 4 and 3'),
        ({'head_dim': 7}, 'head_dim must be even.*got 7'),
        ({'norm_eps': 0.0}, 'norm_eps must be positive'),
        ({'gate': 'token'}, "gate must be one of.*got 'token'"),
        ({'remat': None}, 'remat must be one of'),
        ({'compute_dtype': 'float16'}, 'compute_dtype must be one of'),
        ({'attention': ()}, 'at least one path'),
        ({'attention': 'full'}, r"write \('full',\)"),
        ({'attention': ('stochastik',), 'attention_options': {}}, 'stochastic'),
        ({'attention': ('full',)}, "options for .*'sliding_window'"),
        ({'attention_options': {'stochastic': {'window': 3}}}, 'window'),
        ({'attention_options': {'stochastic': {'wndow': 3}}}, 'wndow'),
        ({'attention_options': {'stochastic': 3}}, 'mapping of its options'),
    ],
)
def test_bad_values_are_named(make_config, changes, message):
    attention = changes.pop('attention', ('stochastic', 'sliding_window'))
    default = {'stochastic': {'window': 7}, 'sliding_window': {'window': 4}}
    with pytest.raises(ValueError, match=message):
        make_config(attention, **({'attention_options': default} | changes))
