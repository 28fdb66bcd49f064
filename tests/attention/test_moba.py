"""MoBA against a plain loop over queries, after the official naive implementation."""

import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax import moba_attention
from sa_jax.attention import moba


def naive(q, k, v, block_size, top_k):
    """One head `[T, H]`: the choice and the attention of each query, written out."""
    length, head_dim = q.shape
    output = np.zeros_like(q)
    chosen = []
    for i in range(length):
        own = i // block_size
        gates = {}
        for block in range(own):
            rows = k[block * block_size : (block + 1) * block_size]
            gates[block] = float(q[i] @ rows.mean(0))
        best = sorted(gates, key=lambda block: (-gates[block], block))[: top_k - 1]
        chosen.append({own, *best})
        keys = [j for j in range(i + 1) if j // block_size in chosen[-1]]
        logits = q[i] @ k[keys].T / head_dim**0.5
        weights = np.exp(logits - logits.max())
        output[i] = weights / weights.sum() @ v[keys]
    return output, chosen


@pytest.mark.parametrize(('block_size', 'top_k'), [(5, 1), (8, 3), (16, 2), (64, 2)])
@pytest.mark.parametrize('implementation', ['reference', 'xla'])
def test_against_the_naive_loop(block_size, top_k, implementation):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 83, heads, 8)) for heads in (2, 1, 1))
    found = moba_attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        block_size=block_size,
        top_k=top_k,
        implementation=implementation,
    )
    for head in range(2):
        expected, _ = naive(q[0, :, head], k[0, :, 0], v[0, :, 0], block_size, top_k)
        np.testing.assert_allclose(found[0, :, head], expected, atol=2e-6)


def test_ties_go_to_the_earlier_block():
    q, k = jnp.ones((1, 24, 1, 4)), jnp.ones((1, 24, 1, 4))
    segment_ids = jnp.ones((1, 24), jnp.int32)
    number = moba.block_numbers(segment_ids, 4)
    chosen = np.asarray(moba.choose_blocks(q, k, segment_ids, number, 3))
    np.testing.assert_array_equal(chosen[0, -1, 0], [5, 0, 1])
    np.testing.assert_array_equal(chosen[0, 5, 0], [1, 0, -1])
    mask = moba.mask(q, k, jnp.arange(24)[None], segment_ids, 4, 3, 0)
    np.testing.assert_array_equal(np.flatnonzero(mask[0, 0, -1]), [*range(8), *range(20, 24)])


def test_blocks_are_counted_from_the_start_of_each_segment():
    segment_ids = jnp.asarray([[2] * 5 + [1] * 6 + [0] * 2])
    np.testing.assert_array_equal(
        moba.block_numbers(segment_ids, 4)[0], [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4]
    )
