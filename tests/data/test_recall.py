"""Rows of pairs, queries and noise."""

import numpy as np
import pytest

from sa_jax.data.recall import Recall


def test_rows():
    recall = Recall(length=40, pairs=3, num_keys=8, num_values=4, num_noise=5)
    batch = recall.batch(np.random.default_rng(0), 300)
    row, query_at = np.nonzero(batch['weights'])
    value_at = query_at - batch['distances'][row, query_at]
    assert len(row) == 3 * 300
    inputs, targets = batch['inputs'], batch['targets']
    np.testing.assert_array_equal(inputs[row, value_at], targets[row, query_at])
    np.testing.assert_array_equal(inputs[row, value_at - 1], inputs[row, query_at])
    assert (inputs[row, query_at] < 8).all()
    assert ((targets[row, query_at] >= 8) & (targets[row, query_at] < 12)).all()
    # A key comes twice in a row, a value has a place of its own, all else is noise.
    assert (np.sum(inputs < 8, axis=1) == 6).all()
    assert (np.sum((inputs >= 8) & (inputs < 12), axis=1) == 3).all()
    assert inputs.max() == recall.vocab_size - 1
    for keys in np.split(inputs[row, query_at], 300):
        assert len(set(keys)) == 3
    # Every distance comes up, near ones no more often than others.
    distances = batch['distances'][row, query_at]
    assert set(distances) == set(range(1, 39))
    near = np.mean(distances <= 19)
    assert abs(near - 0.5) < 0.1


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'pairs': 0}, 'pairs=0; expected at least 1'),
        ({'length': 20}, 'length=20 for pairs=4'),
        ({'num_keys': 3}, 'at most num_keys=3'),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Recall(**changes)
