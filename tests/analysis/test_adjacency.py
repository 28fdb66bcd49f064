"""The sparse visibility of every pattern against the dense masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa_jax.analysis.adjacency import KINDS, layer_adjacency, layer_permutation
from sa_jax.attention import masks
from sa_jax.models.attending import path_keys
from sa_jax.models.config import DecoderConfig


def dense(kind, n, window, causal, circular, permutation):
    """The union of the specification's masks."""
    positions, segments = jnp.arange(n)[None], jnp.ones((1, n), jnp.int32)
    tokens = (positions, segments)
    own = jnp.arange(n)[None]
    if kind == 'partition':
        return masks.stochastic_partition(permutation[None], *tokens, window, causal, 0)[0]
    mask = jnp.zeros((1, n, n), bool)
    if kind in ('swa', 'sa_swa'):
        if circular and not causal:
            mask |= masks.stochastic(own, *tokens, window, False, True, 0)
        else:
            mask |= masks.own_order(tokens, tokens, window, causal, 0)
    if kind in ('sa', 'sa_swa'):
        mask |= masks.stochastic(permutation[None], *tokens, window, causal, circular, 0)
    return mask[0]


@pytest.mark.parametrize('circular', [False, True])
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(('n', 'window'), [(1, 3), *((13, w) for w in (1, 2, 5, 6, 13, 40))])
def test_every_kind_is_its_mask(n, window, kind, causal, circular):
    if kind == 'partition' and circular:
        pytest.skip('chunks have no circle')
    permutation = None if kind == 'swa' else layer_permutation(jax.random.key(window), 3, n)
    options = {'window': window, 'causal': causal, 'circular': circular}
    adjacency = layer_adjacency(kind, n, **options, permutation=permutation)
    assert adjacency.dtype == bool
    assert adjacency.has_canonical_format
    assert adjacency.data.all()
    expected = dense(kind, n, window, causal, circular, permutation)
    np.testing.assert_array_equal(adjacency.toarray(), expected)


def test_causal_local_stochastic_attention_sees_the_union():
    permutation = layer_permutation(jax.random.key(0), 0, 50)
    tokens = (jnp.arange(50)[None], jnp.ones((1, 50), jnp.int32))
    mask = masks.local_stochastic(permutation[None], *tokens, 7, 7, 0)[0]
    adjacency = layer_adjacency('sa_swa', 50, window=7, causal=True, permutation=permutation)
    np.testing.assert_array_equal(adjacency.toarray(), mask)


def test_permutations_are_the_decoders():
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        num_layers=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        attention=('sliding_window', 'stochastic'),
        attention_options={'sliding_window': {'window': 3}, 'stochastic': {'window': 3}},
    )
    key = jax.random.key(5)
    for layer in range(4):
        keys = path_keys(config, key, layer, None, batch=1)
        for path, path_key in enumerate(keys):
            bits = np.asarray(jax.random.bits(path_key, (200,), 'uint32'))
            drawn = layer_permutation(key, layer, 200, path=path)
            np.testing.assert_array_equal(drawn, np.argsort(bits, kind='stable'))


@settings(max_examples=60)
@given(st.sampled_from([1, 7, 60]), st.integers(1, 80), st.booleans())
def test_every_token_sees_itself_and_causally_nothing_later(n, window, circular):
    permutation = layer_permutation(jax.random.key(window), 0, n)
    adjacency = layer_adjacency(
        'sa', n, window=window, causal=True, circular=circular, permutation=permutation
    )
    rows, columns = adjacency.nonzero()
    assert adjacency.diagonal().all()
    assert (columns <= rows).all()


def test_a_large_layer_stays_sparse():
    n, window = 131_072, 16
    permutation = layer_permutation(jax.random.key(0), 0, n)
    adjacency = layer_adjacency('sa', n, window=window, causal=False, permutation=permutation)
    # A window of 16 slots loses 8 + 7 + … + 1 and 7 + … + 1 of them at the ends.
    assert adjacency.nnz == n * window - 36 - 28


@pytest.mark.parametrize(
    ('kind', 'n', 'options', 'message'),
    [
        ('moba', 8, {}, "kind='moba'; expected one of swa, sa, sa_swa, partition"),
        ('swa', 0, {}, 'n=0; expected a Python integer >= 1'),
        ('swa', 8, {'window': 0}, 'window=0; expected'),
        ('swa', 8, {'permutation': np.arange(8)}, 'takes no permutation'),
        ('sa', 8, {}, "kind='sa' needs a permutation"),
        ('sa', 8, {'permutation': np.arange(7)}, r'shape \(7,\); expected the numbers 0 to 7'),
        ('sa', 8, {'permutation': np.zeros(8, int)}, 'expected the numbers 0 to 7'),
        ('partition', 8, {'permutation': np.arange(8), 'circular': True}, 'circular=True'),
    ],
)
def test_bad_arguments_are_named(kind, n, options, message):
    with pytest.raises(ValueError, match=message):
        layer_adjacency(kind, n, **{'window': 3, 'causal': True} | options)
