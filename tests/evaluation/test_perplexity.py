"""Means and spreads of held-out losses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.evaluation.perplexity import draw_keys, evaluate, row_losses

TOKEN_BYTES = np.array([0, 1, 3, 2])


def batches():
    """Three rows of text in two batches, and a row of padding."""
    targets = np.array([[[1, 2, 3], [2, 2, 0]], [[3, 1, 0], [0, 0, 0]]])
    weights = np.array([[[1, 1, 1], [1, 1, 0]], [[1, 0, 0], [0, 0, 0]]], np.float32)
    for index in range(2):
        yield {'targets': targets[index], 'weights': weights[index]}


def test_mean_and_spread_over_draws():
    drawn = []

    def losses(batch, key):
        drawn.append(float(jax.random.uniform(key)))
        return drawn[-1] * batch['weights'].sum(axis=-1)

    result = evaluate(losses, batches, token_bytes=TOKEN_BYTES, keys=draw_keys(3))
    tokens = np.array([5, 1])
    means = np.array(drawn).reshape(3, 2) @ tokens / 6
    assert len(set(drawn)) == 3
    assert result['draws'] == 3
    assert result['tokens'] == 6
    assert result['loss'] == pytest.approx(means.mean())
    assert result['loss_std'] == pytest.approx(means.std(ddof=1))
    assert result['perplexity'] == pytest.approx(np.exp(means).mean())
    assert result['perplexity_std'] == pytest.approx(np.exp(means).std(ddof=1))
    # Bytes are those of the counted targets: 1 + 3 + 2, 3 + 3, 2.
    assert result['bytes'] == 14
    assert result['bits_per_byte'] == pytest.approx(means.mean() * 6 / math.log(2) / 14)


def test_draws_are_the_same_in_every_evaluation():
    keys = []

    def losses(batch, key):
        keys.append(jax.random.key_data(key).tolist())
        return jax.random.uniform(key, batch['weights'].shape[:1])

    evaluate(losses, batches, token_bytes=TOKEN_BYTES, keys=draw_keys(2))
    evaluate(losses, batches, token_bytes=TOKEN_BYTES, keys=draw_keys(2))
    assert keys[:4] == keys[4:]


def test_without_permutations_there_is_no_spread_and_no_waste():
    calls = []

    def losses(batch, key):
        calls.append(key)
        return batch['weights'].sum(axis=-1)

    result = evaluate(losses, batches, token_bytes=TOKEN_BYTES, keys=draw_keys(5))
    assert len(calls) == 4
    assert (result['loss'], result['loss_std'], result['perplexity_std']) == (1.0, 0.0, 0.0)


def test_one_draw_has_no_spread():
    result = evaluate(
        lambda batch, key: batch['weights'].sum(axis=-1),
        batches,
        token_bytes=TOKEN_BYTES,
        keys=draw_keys(1),
    )
    assert result['loss_std'] == 0.0


def test_errors():
    with pytest.raises(ValueError, match='permutation_draws is 0'):
        draw_keys(0)
    with pytest.raises(ValueError, match='no held-out token'):
        evaluate(None, list, token_bytes=TOKEN_BYTES, keys=draw_keys(1))


def test_row_losses_ignore_padding_even_if_it_is_nan():
    logits = jnp.zeros((2, 3, 4)).at[0, 2].set(jnp.nan)
    batch = {
        'targets': jnp.array([[1, 2, 0], [3, 0, 0]]),
        'weights': jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
    }
    losses = row_losses({}, batch, None, forward=lambda *_: (logits, None))
    np.testing.assert_allclose(losses, [2 * math.log(4), math.log(4)], rtol=1e-6)
