"""FLOP counts against counts by hand."""

import pytest

from sa_jax.attention import registry
from sa_jax.models.flops import forward_flops_per_token, training_flops_per_token


def test_hand_count(make_config):
    # Hidden 16, two layers, 4 query heads and 2 key/value heads of 8, SwiGLU 24, vocabulary 32.
    config = make_config(('full', 'sliding_window'))
    flops = forward_flops_per_token(config, 8)
    assert flops.pop('projections') == 2 * 2 * (16 * 32 + 16 * 16 + 16 * 16 + 32 * 16)
    assert flops.pop('path_gates') == 2 * 2 * 16 * 2 * 4
    assert flops.pop('feed_forward') == 2 * 2 * 3 * 16 * 24
    assert flops.pop('unembedding') == 2 * 16 * 32
    # Pairs in a sequence of 8: 1 + 2 + ... + 8 = 36; with 4 keys each at most, 1 + 2 + 3 + 5 * 4.
    # Each costs a product of length 8 twice (scores, values) in 4 heads of 2 layers.
    assert flops.pop('attention/0_full') == pytest.approx(2 * 2 * 2 * 4 * 8 * 36 / 8)
    assert flops.pop('attention/1_sliding_window') == pytest.approx(2 * 2 * 2 * 4 * 8 * 26 / 8)
    assert not flops


def test_training_is_three_times_forward(make_config):
    config = make_config(('full',))
    flops = forward_flops_per_token(config, 16)
    assert flops['path_gates'] == 0
    assert training_flops_per_token(config, 16) == 3 * sum(flops.values())


def test_channel_gates_cost_a_product_per_channel(make_config):
    per_head = forward_flops_per_token(make_config(), 8)['path_gates']
    assert forward_flops_per_token(make_config(gate='channel'), 8)['path_gates'] == 8 * per_head


def test_a_kind_that_does_not_say_counts_as_full(make_config, monkeypatch):
    monkeypatch.setattr(registry, '_KINDS', dict(registry._KINDS))
    registry.register_attention('unknown_cost', lambda query, key, value, context, **_: query)
    flops = forward_flops_per_token(make_config(('full', 'unknown_cost')), 9)
    assert flops['attention/1_unknown_cost'] == flops['attention/0_full']


def test_experts_count_where_a_token_goes_through_them(make_config):
    config = make_config(('full',), num_experts=5, num_experts_per_token=2)
    # The router is a product of 16 by 5.
    assert forward_flops_per_token(config, 8)['feed_forward'] == 2 * 2 * (2 * 3 * 16 * 24 + 16 * 5)


def test_layers_count_with_their_own_patterns(make_config):
    exceptions = {'1': {'attention': ('sliding_window',)}}
    exceptions['1']['attention_options'] = {'sliding_window': {'window': 4}}
    config = make_config(('full',), layer_attention=exceptions)
    flops = forward_flops_per_token(config, 8)
    assert flops['attention/0_full'] == pytest.approx(2 * 2 * 4 * 8 * 36 / 8)
    assert flops['attention/0_sliding_window'] == pytest.approx(2 * 2 * 4 * 8 * 26 / 8)
