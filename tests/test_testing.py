"""The conformance suite passes our functions and catches faulty ones."""

import jax
import jax.numpy as jnp
import pytest

import sa_jax
from sa_jax.attention import AttentionContext
from sa_jax.testing import check_attention

KINDS = {
    'full': {},
    'sliding_window': {'window': 9},
    'stochastic': {'window': 9},
    'stochastic_partition': {'chunk_size': 9},
    'local_stochastic': {'window': 9, 'local_window': 4},
    'moba': {'block_size': 4, 'top_k': 3},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', KINDS)
def test_our_functions_conform(name):
    assert 'agreement_with_the_reference' in check_attention(name, **KINDS[name])


def sees_the_future(query, key, value, context):
    return sa_jax.full_attention(
        query, key, value, is_causal=False, segment_ids=context.segment_ids
    )


def ignores_documents(query, key, value, context):
    del context
    return sa_jax.full_attention(query, key, value)


def forgets_padding(query, key, value, context):
    del context
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def quadratic(query, key, value, context):
    return sa_jax.full_attention(
        query, key, value, segment_ids=context.segment_ids, implementation='reference'
    )


def changes_the_dtype(query, key, value, context: AttentionContext):
    return quadratic(query, key, value, context).astype(jnp.float32)


@pytest.mark.parametrize(
    ('function', 'message'),
    [
        (sees_the_future, 'gradient of output 0 by later'),
        (ignores_documents, 'outputs of padding queries'),
        (forgets_padding, 'outputs of padding queries'),
        (changes_the_dtype, 'gave .* float32; expected the same'),
        (quadratic, 'temporary memory grows'),
    ],
)
def test_faults_are_found(function, message):
    with pytest.raises(AssertionError, match=message):
        check_attention(function)
