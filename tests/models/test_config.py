"""Configurations are read, validated and hashable."""

import pytest
from ml_collections import ConfigDict

from sa_jax.models.config import DecoderConfig

_BOTH = {
    'attention': ('full', 'sliding_window'),
    'attention_options': {'sliding_window': {'window': 3}},
}


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


def test_layers_may_have_patterns_of_their_own(make_config):
    config = make_config(('stochastic', 'sliding_window'), num_layers=4)
    assert config.patterns == (config.layer_patterns[0],)
    config = make_config(
        ('stochastic', 'sliding_window'),
        num_layers=4,
        layer_attention={'1:': _BOTH, '-1': {'attention': ('full', 'full')}},
    )
    first, second, third, fourth = config.layer_patterns
    assert first.attention == ('stochastic', 'sliding_window')
    assert second == third
    assert second.options['sliding_window']['window'] == 3
    assert fourth.paths == [('full', {}), ('full', {})]
    assert config.patterns == (first, second, fourth)
    assert hash(config) is not None


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'hidden_size': 0}, 'hidden_size.*at least 1, got 0'),
        ({'num_heads': 2.0}, 'num_heads.*got 2.0'),
        ({'num_kv_heads': 3}, 'got 4 and 3'),
        ({'head_dim': 7}, 'head_dim must be even.*got 7'),
        ({'norm_eps': 0.0}, 'norm_eps must be positive'),
        ({'gate': 'token'}, "gate must be one of.*got 'token'"),
        ({'gate': 'softmax', 'gate_single_path': True}, 'shares of one path are 1'),
        ({'remat': None}, 'remat must be one of'),
        ({'compute_dtype': 'float16'}, 'compute_dtype must be one of'),
        ({'attention': ()}, 'at least one path'),
        ({'attention': 'full'}, r"write \('full',\)"),
        ({'attention': ('stochastik',), 'attention_options': {}}, 'stochastic'),
        ({'attention': ('full',)}, "options for .*'sliding_window'"),
        ({'attention_options': {'stochastic': {'window': 3}}}, 'window'),
        ({'attention_options': {'stochastic': {'wndow': 3}}}, 'wndow'),
        ({'attention_options': {'stochastic': 3}}, 'mapping of its options'),
        ({'num_experts_per_token': 2}, 'num_experts_per_token.*got 2 of 0'),
        ({'num_experts': 4}, 'num_experts_per_token.*got 0 of 4'),
        ({'num_experts': 4.0, 'num_experts_per_token': 2}, 'whole number.*got 2 of 4.0'),
        ({'layer_attention': {'0': 'full'}}, "'0'.*'full'; expected fields"),
        ({'rope_scaling': {'rope_type': 'ntk'}}, "rope_type 'ntk'.*'yarn'"),
        ({'rope_scaling': {'rope_type': 'factors', 'factors': [1.0]}}, '1 factors; expected 4'),
        ({'layer_attention': {'2': _BOTH}}, "layers '2'.*slice of 2 layers"),
        ({'layer_attention': {'5:': _BOTH}}, "layers '5:'"),
        ({'layer_attention': {'last': _BOTH}}, "layers 'last'"),
        ({'layer_attention': {'0': {'attention': ('full',)}}}, 'as many paths as elsewhere, 2'),
        ({'layer_attention': {'0': _BOTH | {'gate': 'head'}}}, 'gate'),
        (
            {'layer_attention': {'0': {'attention': ('full', 'stochastic')}}},
            'window',
        ),
    ],
)
def test_bad_values_are_named(make_config, changes, message):
    attention = changes.pop('attention', ('stochastic', 'sliding_window'))
    default = {'stochastic': {'window': 7}, 'sliding_window': {'window': 4}}
    with pytest.raises(ValueError, match=message):
        make_config(attention, **({'attention_options': default} | changes))
