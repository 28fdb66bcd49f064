"""Drawing permutations and moving rows through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa_jax import draw_permutation, inverse_permutation, permute

KEY = jax.random.key(7)


def relative_order(permutation, part):
    """The order in which the tokens of a slice stand, counted from its first token."""
    permutation = np.asarray(permutation)
    inside = (permutation >= part.start) & (permutation < part.stop)
    return permutation[inside] - part.start


@given(st.permutations([1, 7, 40]), st.sampled_from([0, 13]))
def test_a_document_is_permuted_alike_alone_padded_and_packed(lengths, padding):
    numbers = np.repeat(np.arange(len(lengths), 0, -1), lengths)
    segments = jnp.asarray(np.pad(numbers, (0, padding)))
    packed = jax.jit(draw_permutation)(KEY, segment_ids=segments)
    np.testing.assert_array_equal(np.sort(packed), np.arange(len(segments)))
    np.testing.assert_array_equal(segments[packed][len(numbers) :], 0)
    stops = np.cumsum(lengths)
    for length, stop in zip(lengths, stops, strict=True):
        alone = draw_permutation(KEY, length=length)
        inside = relative_order(packed, slice(stop - length, stop))
        np.testing.assert_array_equal(inside, alone)
        # Its slots are a run of their own.
        slots = np.flatnonzero(np.asarray(segments)[np.asarray(packed)] == numbers[stop - 1])
        np.testing.assert_array_equal(slots, np.arange(slots[0], slots[0] + length))


def test_all_permutations_are_equally_likely():
    draws = jax.jit(jax.vmap(lambda key: draw_permutation(key, length=4)))(
        jax.random.split(KEY, 12_000)
    )
    _, counts = np.unique(np.asarray(draws), axis=0, return_counts=True)
    assert len(counts) == 24
    # Chi-squared with 23 degrees of freedom: 49.7 has probability 0.001.
    assert ((counts - 500) ** 2 / 500).sum() < 49.7


def test_scopes():
    segments = jnp.ones((3, 50), jnp.int32)
    shared = draw_permutation(KEY, segment_ids=segments)
    assert (np.asarray(shared) == np.asarray(shared[0])).all()
    by_example = draw_permutation(jax.random.split(KEY, 3), segment_ids=segments)
    assert by_example.shape == (3, 50)
    assert (by_example[0] != by_example[1]).any()
    by_head = draw_permutation(jax.random.split(KEY, (3, 2)), segment_ids=segments)
    assert by_head.shape == (3, 2, 50)
    assert (by_head[0, 0] != by_head[0, 1]).any()
    alone = draw_permutation(jax.random.split(KEY, 3)[1], length=50)
    np.testing.assert_array_equal(by_example[1], alone)


def test_permuting_there_and_back():
    x = jax.random.normal(KEY, (2, 33, 3))
    order = draw_permutation(jax.random.split(KEY, 2), segment_ids=jnp.ones((2, 33), jnp.int32))
    inverse = inverse_permutation(order)
    moved = permute(x, order, inverse)
    np.testing.assert_array_equal(moved[1, 5], x[1, order[1, 5]])
    np.testing.assert_array_equal(permute(moved, inverse, order), x)


def test_the_gradient_of_permuting_is_the_inverse_gather():
    x = jax.random.normal(KEY, (2, 33, 3))
    order = draw_permutation(KEY, length=33)
    inverse = inverse_permutation(order)
    weights = jax.random.normal(KEY, x.shape)
    gradient = jax.grad(lambda x: (permute(x, order, inverse) * weights).sum())
    expected = jax.grad(lambda x: (x[:, order] * weights).sum())
    np.testing.assert_array_equal(gradient(x), expected(x))
    assert 'scatter' not in jax.jit(gradient).lower(x).as_text()


def test_errors():
    with pytest.raises(TypeError, match='typed key'):
        draw_permutation(jax.random.PRNGKey(0), length=3)
    with pytest.raises(ValueError, match='exactly one'):
        draw_permutation(KEY)
    with pytest.raises(ValueError, match='split into several runs'):
        draw_permutation(KEY, segment_ids=jnp.asarray([1, 2, 1]))
    with pytest.raises(ValueError, match='one key per example'):
        draw_permutation(jax.random.split(KEY, 2), segment_ids=jnp.ones((3, 5), jnp.int32))
