"""The masks against the definitions, pair by pair."""

import itertools

import numpy as np
import pytest

from sa_jax.attention import masks, permutation

POSITIONS = np.array([[0, 1, 3, 4, 9, 0, 2, 3, 5, 0, 1]])
SEGMENTS = np.array([[4, 4, 4, 4, 4, 2, 2, 2, 2, 0, 0]])
LENGTH = SEGMENTS.shape[1]


def pairs(visible):
    """The mask of a relation visible(i, j), within segments and over valid keys."""
    mask = np.zeros((LENGTH, LENGTH), bool)
    for i, j in itertools.product(range(LENGTH), repeat=2):
        is_shared = SEGMENTS[0, j] > 0 and SEGMENTS[0, i] == SEGMENTS[0, j]
        mask[i, j] = is_shared and visible(i, j)
    return mask


def rank(j):
    return j - list(SEGMENTS[0]).index(SEGMENTS[0, j])


@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('num_sinks', [0, 2])
@pytest.mark.parametrize('window', [None, 1, 2, 3, 4, 20])
def test_own_order(window, is_causal, num_sinks):
    p = POSITIONS[0]

    def visible(i, j):
        distance = p[i] - p[j]
        if is_causal and distance < 0:
            return False
        if window is None or rank(j) < num_sinks:
            return True
        if is_causal:
            return distance < window
        return -((window - 1) // 2) <= distance <= window // 2

    tokens = (POSITIONS, SEGMENTS)
    mask = masks.own_order(tokens, tokens, window, is_causal, num_sinks)
    np.testing.assert_array_equal(mask[0], pairs(visible))


@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('num_sinks', [0, 2])
@pytest.mark.parametrize('mixes', [True, False])
@pytest.mark.parametrize('chunk_size', [1, 2, 3, 30])
def test_stochastic_partition(chunk_size, mixes, is_causal, num_sinks):
    p = POSITIONS[0]
    order = np.array([8, 5, 7, 6, 3, 0, 4, 1, 2, 9, 10])
    if mixes:
        order = np.array([8, 0, 9, 7, 3, 5, 4, 1, 6, 2, 10])

    def chunk(i):
        peers = [j for j in order if SEGMENTS[0, j] == SEGMENTS[0, i]]
        return peers.index(i) // chunk_size

    def visible(i, j):
        if is_causal and p[j] > p[i]:
            return False
        return rank(j) < num_sinks or chunk(i) == chunk(j)

    mask = masks.stochastic_partition(
        order[None], POSITIONS, SEGMENTS, chunk_size, is_causal, num_sinks
    )
    np.testing.assert_array_equal(mask[0], pairs(visible))


@pytest.mark.parametrize('is_causal', [True, False])
@pytest.mark.parametrize('num_sinks', [0, 2])
@pytest.mark.parametrize('circular', [True, False])
@pytest.mark.parametrize('window', [1, 2, 3, 4, 7, 30])
def test_stochastic(window, is_causal, circular, num_sinks):
    p = POSITIONS[0]
    order = np.array([8, 5, 7, 6, 3, 0, 4, 1, 2, 9, 10])
    slot = np.argsort(order)
    back, ahead = window // 2, (window - 1) // 2

    def visible(i, j):
        if is_causal and p[j] > p[i]:
            return False
        if rank(j) < num_sinks:
            return True
        distance = slot[i] - slot[j]
        if not circular:
            return -ahead <= distance <= back
        length = int((SEGMENTS[0] == SEGMENTS[0, i]).sum())
        distance %= length
        return distance <= back or length - distance <= ahead

    mask = masks.stochastic(
        order[None], POSITIONS, SEGMENTS, window, is_causal, circular, num_sinks
    )
    np.testing.assert_array_equal(mask[0], pairs(visible))


@pytest.mark.parametrize('num_sinks', [0, 2])
@pytest.mark.parametrize(('window', 'local_window'), [(1, 1), (4, 2), (3, 30), (30, 1)])
def test_local_stochastic(window, local_window, num_sinks):
    p = POSITIONS[0]
    order = np.array([8, 5, 7, 6, 3, 0, 4, 1, 2, 9, 10])
    slot = np.argsort(order)

    def visible(i, j):
        if p[j] > p[i]:
            return False
        is_near = p[i] - p[j] < local_window
        is_linked = -((window - 1) // 2) <= slot[i] - slot[j] <= window // 2
        return rank(j) < num_sinks or is_near or is_linked

    mask = masks.local_stochastic(order[None], POSITIONS, SEGMENTS, window, local_window, num_sinks)
    np.testing.assert_array_equal(mask[0], pairs(visible))


@pytest.mark.parametrize('window', [1, 2, 3, 4, 5, 8, 50])
def test_circular_windows_hold_each_key_once(window):
    order = np.random.default_rng(0).permutation(9)[None]
    ones = np.ones((1, 9), int)
    index = np.arange(9)[None]
    mask = masks.stochastic(order, index, ones, window, False, True, 0)
    np.testing.assert_array_equal(mask.sum(-1), min(window, 9))


def test_ranks_starts_and_lengths_of_segments():
    np.testing.assert_array_equal(
        permutation.segment_rank(SEGMENTS)[0], [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]
    )
    np.testing.assert_array_equal(
        permutation.segment_start(SEGMENTS)[0], [0, 0, 0, 0, 0, 5, 5, 5, 5, 9, 9]
    )
    np.testing.assert_array_equal(
        permutation.segment_length(SEGMENTS)[0], [5, 5, 5, 5, 5, 4, 4, 4, 4, 2, 2]
    )
