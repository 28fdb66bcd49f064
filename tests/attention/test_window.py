"""Effective windows against the masks themselves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax import effective_window
from sa_jax.attention import masks, moba

INDEX, ONES = np.arange(6)[None], np.ones((1, 6), int)


@pytest.mark.parametrize('num_sinks', [0, 2, 9])
@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('window', [1, 2, 3, 5, 20])
def test_windows_are_the_masks_means(window, is_causal, num_sinks):
    options = {'is_causal': is_causal, 'num_sinks': num_sinks}
    tokens = (INDEX, ONES)
    mask = masks.own_order(tokens, tokens, window, **options)
    found = effective_window('sliding_window', 6, window=window, **options)
    assert found == pytest.approx(np.asarray(mask).sum() / 6)
    orders = np.array(list(itertools.permutations(range(6))))
    for circular in (False, True):
        mask = masks.stochastic(orders, INDEX, ONES, window, circular=circular, **options)
        found = effective_window('stochastic', 6, window=window, circular=circular, **options)
        assert found == pytest.approx(np.asarray(mask).mean(0).sum() / 6)


@pytest.mark.parametrize('num_sinks', [0, 2, 9])
@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('chunk_size', [1, 2, 3, 4, 20])
def test_partitions_are_the_masks_means(chunk_size, is_causal, num_sinks):
    orders = np.array(list(itertools.permutations(range(6))))
    options = {'is_causal': is_causal, 'num_sinks': num_sinks}
    mask = masks.stochastic_partition(orders, INDEX, ONES, chunk_size, **options)
    found = effective_window('stochastic_partition', 6, chunk_size=chunk_size, **options)
    assert found == pytest.approx(np.asarray(mask).mean(0).sum() / 6)
    nominal = effective_window('stochastic_partition', 6, chunk_size=3, nominal=True)
    assert nominal == effective_window('stochastic_partition', 6, chunk_size=3) == 2


@pytest.mark.parametrize('num_sinks', [0, 2, 9])
@pytest.mark.parametrize(('window', 'local_window'), [(1, 1), (4, 2), (5, 3), (20, 1), (3, 20)])
def test_unions_are_the_masks_means(window, local_window, num_sinks):
    orders = np.array(list(itertools.permutations(range(6))))
    mask = masks.local_stochastic(orders, INDEX, ONES, window, local_window, num_sinks)
    options = {'window': window, 'local_window': local_window}
    found = effective_window('local_stochastic', 6, num_sinks=num_sinks, **options)
    assert found == pytest.approx(np.asarray(mask).mean(0).sum() / 6)
    nominal = effective_window('local_stochastic', 6, nominal=True, window=9, local_window=4)
    assert nominal == 8


def test_full():
    assert effective_window('full', 9) == 5
    assert effective_window('full', 9, is_causal=False) == 9


@pytest.mark.parametrize(('n', 'block_size', 'top_k'), [(50, 8, 3), (7, 8, 2), (64, 16, 1)])
def test_moba_counts_what_the_mask_shows(n, block_size, top_k):
    q, k = (jax.random.normal(jax.random.key(i), (1, n, 1, 4)) for i in range(2))
    mask = moba.mask(q, k, jnp.arange(n)[None], jnp.ones((1, n), int), block_size, top_k, 0)
    found = effective_window('moba', n, block_size=block_size, top_k=top_k)
    assert found == pytest.approx(np.asarray(mask).sum() / n)
    assert effective_window('moba', n, block_size=8, top_k=2, nominal=True) == 16


@pytest.mark.parametrize('n', [1, 2, 10, 1000])
@pytest.mark.parametrize('w', [1, 3, 8, 64])
def test_stochastic_with_a_doubled_window_matches_sliding_exactly(n, w):
    wide = 2 * w - 1
    assert effective_window('stochastic', n, window=wide) == pytest.approx(
        effective_window('sliding_window', n, window=w), rel=1e-12
    )
    assert effective_window('stochastic', n, window=wide, nominal=True) == w


def test_errors():
    with pytest.raises(ValueError, match='unknown kind'):
        effective_window('sliding', 8, window=3)
    with pytest.raises(ValueError, match='window=None'):
        effective_window('stochastic', 8)
    with pytest.raises(ValueError, match='causally'):
        effective_window('moba', 8, block_size=2, top_k=2, is_causal=False)
