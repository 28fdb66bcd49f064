"""Rows of pairs, queries and noise."""

import numpy as np
import pytest

from sa_jax.data.recall import Recall


def test_rows():
    recall = Recall(length=40, pairs=3, query_share=0.5, num_keys=8, num_values=4, num_noise=5)
    batch = recall.batch(np.random.default_rng(0), 300)
    row, query_at = np.nonzero(batch['weights'])
    value_at = query_at - batch['distances'][row, query_at]
    inputs, targets = batch['inputs'], batch['targets']
    np.testing.assert_array_equal(inputs[row, value_at], targets[row, query_at])
    np.testing.assert_array_equal(inputs[row, value_at - 1], inputs[row, query_at])
    assert ((targets[row, query_at] >= 8) & (targets[row, query_at] < 12)).all()
    # Three pairs of different keys, and queries; all else is noise.
    is_value = (inputs >= 8) & (inputs < 12)
    assert (is_value.sum(1) == 3).all()
    keys = inputs[:, :-1][is_value[:, 1:]].reshape(300, 3)
    assert (np.diff(np.sort(keys), axis=1) > 0).all()
    is_query = batch['weights'] == 1
    np.testing.assert_array_equal((inputs < 8).sum(1), 3 + is_query.sum(1))
    assert (inputs[is_query] < 8).all()
    assert inputs.max() == recall.vocab_size - 1
    # Of the tokens behind a pair that belong to none, half ask, each distance somewhere.
    first = is_value.argmax(1)
    others = (np.arange(40) > first[:, None]).sum() - 4 * 300
    assert abs(is_query.sum() / others - 0.5) < 0.03
    assert set(batch['distances'][is_query]) == set(range(1, 39))


def test_pairs_before_a_query_are_as_likely():
    recall = Recall(length=40, pairs=2, query_share=1.0)
    batch = recall.batch(np.random.default_rng(1), 2000)
    is_value = (batch['inputs'] >= 16) & (batch['inputs'] < 32)
    nearest = is_value[:, ::-1].argmax(1)  # tokens from the row's last to its nearest value
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
