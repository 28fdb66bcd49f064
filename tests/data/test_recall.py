"""Rows of pairs, queries and noise."""

import numpy as np
import pytest

from sa_jax.data.recall import Recall


def test_rows():
    recall = Recall(length=40, pairs=3, query_share=0.5, num_keys=8, num_values=4, num_noise=5)
    batch = recall.batch(np.random.default_rng(0), 300)
    row, query_at = np.nonzero(batch['weights'])
    pair_at = query_at - batch['distances'][row, query_at]
    inputs, targets = batch['inputs'], batch['targets']
    pairs = inputs[row, pair_at] - 17  # behind 8 keys, 4 values and 5 kinds of noise
    np.testing.assert_array_equal(pairs // 4, inputs[row, query_at])
    np.testing.assert_array_equal(8 + pairs % 4, targets[row, query_at])
    # Three pairs of different keys, and queries; all else is noise.
    is_pair, is_query = inputs >= 17, batch['weights'] == 1
    assert (is_pair.sum(1) == 3).all()
    keys = np.sort((inputs[is_pair].reshape(300, 3) - 17) // 4)
    assert (np.diff(keys) > 0).all()
    np.testing.assert_array_equal(inputs < 8, is_query)
    assert set(inputs[~is_pair & ~is_query]) == set(range(12, 17))
    assert inputs.max() < recall.vocab_size == 17 + 8 * 4
    # Of the tokens behind a pair that are none, half ask, each distance somewhere.
    others = (np.arange(40) > is_pair.argmax(1)[:, None]).sum() - 2 * 300
    assert abs(is_query.sum() / others - 0.5) < 0.03
    assert set(batch['distances'][is_query]) == set(range(1, 40))


def test_pairs_before_a_query_are_as_likely():
    recall = Recall(length=40, pairs=2, query_share=1.0)
    batch = recall.batch(np.random.default_rng(1), 2000)
    is_pair = batch['inputs'] >= 48
    nearest = is_pair[:, ::-1].argmax(1)  # tokens from the row's last to its nearest pair
    asks = batch['weights'][:, -1] == 1
    asks_nearest = batch['distances'][asks, -1] == nearest[asks]
    assert abs(asks_nearest.mean() - 0.5) < 0.06


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'pairs': 0}, 'pairs=0; expected at least 1'),
        ({'length': 7}, 'length=7 for pairs=2'),
        ({'query_share': 0.0}, 'query_share=0.0; expected more than 0'),
        ({'num_keys': 1}, 'at most num_keys=1'),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Recall(**changes)
