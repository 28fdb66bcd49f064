"""Patterns matched on the effective window, against the functions' own masks."""

import jax
import numpy as np
import pytest

from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.attention.window import effective_window
from sa_jax.evaluation.patterns import PATTERNS, matched_pattern, mean_visible_keys


def mask_of(name, window, n, key):
    changes = matched_pattern(name, window)
    (attention,) = changes['attention']
    options = changes.get('attention_options', {}).get(attention, {})
    query = jax.random.normal(key, (1, n, 1, 4))
    context = AttentionContext(key=key)
    return get_attention(attention).mask(query, query, context, **options)[0, 0]


@pytest.mark.parametrize('window', [2, 8, 62])
def test_all_patterns_are_matched_on_the_nominal_window(window):
    for name in set(PATTERNS) - {'full'}:
        changes = matched_pattern(name, window)
        (attention,) = changes['attention']
        options = changes['attention_options'][attention]
        assert effective_window(attention, 100, nominal=True, **options) == window


@pytest.mark.parametrize('n', [5, 40, 200])
def test_stochastic_attention_sees_as_many_pairs_as_the_sliding_window(n):
    for window in (1, 8, 64):
        expected = mean_visible_keys('swa', window, n)
        assert mean_visible_keys('sa', window, n) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize('name', sorted(set(PATTERNS) - {'local_sa'}))
def test_mean_keys_are_those_of_the_mask(name):
    # Of two tokens that share a window, one is causal: no permutation has more pairs than another.
    for seed in range(3):
        mask = mask_of(name, 6, 45, jax.random.key(seed))
        assert float(mask.sum() / 45) == pytest.approx(mean_visible_keys(name, 6, 45))


def test_windows_of_a_union_overlap():
    keys = jax.random.split(jax.random.key(1), 100)
    counts = np.array(jax.vmap(lambda key: mask_of('local_sa', 6, 45, key).sum() / 45)(keys))
    expected = mean_visible_keys('local_sa', 6, 45)
    assert expected < mean_visible_keys('sa', 6, 45)
    assert abs(counts.mean() - expected) < 4 * counts.std() / 10


def test_mobas_mean_is_below_its_nominal_window():
    # One and a half blocks of 32, and a half for the query itself.
    assert mean_visible_keys('moba', 64, 1 << 20) == pytest.approx(1.5 * 32 + 0.5, abs=0.01)


def test_a_decoder_takes_sinks_layers_and_scope(make_model):
    changes = matched_pattern('sa', 4, num_sinks=1, full_layers=['-1:'], permutation_scope='head')
    config = make_model().with_config(**changes).config
    first, last = config.layer_patterns
    assert first.paths == [('stochastic', {'window': 7, 'num_sinks': 1})]
    assert last.paths == [('full', {})]
    assert config.permutation_scope == 'head'


def test_what_cannot_be_matched_is_named():
    with pytest.raises(ValueError, match=r'effective_window = 33 for moba.* an even number'):
        matched_pattern('moba', 33)
    with pytest.raises(ValueError, match="unknown pattern 'sb'; expected one of full, swa"):
        matched_pattern('sb', 32)
    with pytest.raises(ValueError, match='effective_window = None for swa'):
        matched_pattern('swa')
    with pytest.raises(ValueError, match='effective_window = 0 for sa'):
        mean_visible_keys('sa', 0, 10)
