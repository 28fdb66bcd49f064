"""Decoding: the neighbours are the rows of the mask, and attention to them is the reference's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax import (
    AttentionContext,
    decode_attention,
    get_attention,
    stochastic_neighbours,
)
from sa_jax.attention import decoding, reference

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 23, 4, 2, 8
KEY = jax.random.key(5)
KEYS = {
    'layer': KEY,
    'example': jax.random.split(KEY, BATCH),
    'head': jax.random.split(KEY, (BATCH, KV_HEADS)),
}
PATTERNS = [
    ('sliding_window', {'window': 6, 'num_sinks': 3}, 'layer'),
    ('sliding_window', {'window': 99, 'num_sinks': 99}, 'layer'),
    ('stochastic', {'window': 1}, 'layer'),
    ('stochastic', {'window': 6}, 'layer'),
    ('stochastic', {'window': 7, 'num_sinks': 2}, 'head'),
    ('stochastic', {'window': 7, 'circular': True}, 'example'),
    ('stochastic', {'window': 22, 'circular': True, 'num_sinks': 1}, 'layer'),
    ('stochastic', {'window': 99, 'circular': True}, 'layer'),
    ('stochastic', {'window': 99}, 'layer'),
    ('local_stochastic', {'window': 7, 'local_window': 3, 'num_sinks': 2}, 'head'),
    ('local_stochastic', {'window': 6, 'local_window': 99}, 'layer'),
    ('stochastic_partition', {'chunk_size': 1}, 'layer'),
    ('stochastic_partition', {'chunk_size': 5, 'num_sinks': 2}, 'head'),
    ('stochastic_partition', {'chunk_size': 99}, 'example'),
]


def random_inputs(dtype=jnp.float32):
    shapes = [(BATCH, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    keys = jax.random.split(jax.random.key(1), 3)
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def seen(neighbours):
    """Neighbours `[..., most]` as a mask `[..., LENGTH]`; each occurs once."""
    counts = (neighbours[..., None] == jnp.arange(LENGTH)).sum(-2)
    assert counts.max() <= 1
    return counts.astype(bool)


@pytest.mark.parametrize(('name', 'options', 'scope'), PATTERNS)
def test_neighbours_are_the_rows_of_the_mask(name, options, scope):
    kind, context = get_attention(name), AttentionContext(key=KEYS[scope])
    query, key, _ = random_inputs()
    mask = jnp.broadcast_to(
        kind.mask(query, key, context, **options), (BATCH, HEADS, LENGTH, LENGTH)
    )[:, :: HEADS // KV_HEADS]
    prepared = kind.decoding.prepare(context, LENGTH, **options)
    neighbours = functools.partial(kind.decoding.neighbours, prepared, **options)
    every = jax.vmap(lambda token: neighbours(token, LENGTH))(jnp.arange(LENGTH))
    counts = ('window', 'local_window', 'chunk_size', 'num_sinks')
    assert every.shape[-1] <= sum(options.get(x, 0) for x in counts)
    np.testing.assert_array_equal(
        jnp.broadcast_to(jnp.moveaxis(seen(every), 0, 2), mask.shape), mask
    )
    # A token per example.
    two = seen(neighbours(jnp.array([4, 20]), LENGTH))
    for example, token in enumerate((4, 20)):
        np.testing.assert_array_equal(
            jnp.broadcast_to(two[example], (KV_HEADS, LENGTH)), mask[example, :, token]
        )


@pytest.mark.parametrize('scope', ['layer', 'head'])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_attends_as_the_reference_does(scope, dtype):
    inputs = random_inputs(dtype)
    kind, context, window = get_attention('stochastic'), AttentionContext(key=KEYS[scope]), 9
    options = {
        'scale': 0.5,
        'logits_soft_cap': 3.0,
        'sink_logits': jnp.linspace(-1, 2, HEADS),
    }
    mask = kind.mask(*inputs[:2], context, window=window)
    expected = reference.masked_attention(*inputs, mask, **options)
    prepared = kind.decoding.prepare(context, LENGTH)
    for token in (0, 11, LENGTH - 1):
        rows = kind.decoding.neighbours(prepared, token, LENGTH, window=window)
        # Nothing else is read.
        query, *cache = inputs
        cache = [x.at[:, token + 1 :].set(jnp.nan) for x in cache]
        output = decode_attention(query[:, token : token + 1], *cache, rows, **options)
        assert output.dtype == dtype
        np.testing.assert_allclose(
            output[:, 0].astype(jnp.float32),
            expected[:, token].astype(jnp.float32),
            atol=1e-5 if dtype == jnp.float32 else 2e-2,
        )


def test_without_neighbours_all_tokens_so_far_are_seen(monkeypatch):
    monkeypatch.setattr(decoding, '_BLOCK', 5)
    query, key, value = random_inputs()
    kind = get_attention('full')
    assert kind.decoding.neighbours is None
    mask = kind.mask(query, key, AttentionContext())
    expected = reference.masked_attention(query, key, value, mask, scale=HEAD_DIM**-0.5)
    tokens = jnp.array([7, 22])
    one = jnp.take_along_axis(query, tokens[:, None, None, None], axis=1)
    # Behind and before rows that are another layer's.
    cache = [
        jnp.pad(x, ((0, 0), (3, 4), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (key, value)
    ]
    output = decode_attention(one, *cache, token=tokens, offset=3)[:, 0]
    np.testing.assert_allclose(output, expected[jnp.arange(BATCH), tokens], atol=1e-5)
    same = decode_attention(one, *cache, jnp.arange(8)[None, None], offset=3)[0, 0]
    np.testing.assert_allclose(output[0], same, atol=1e-6)
    nothing = decode_attention(one, key, value, jnp.full((1, 1, 3), -1))
    np.testing.assert_array_equal(nothing, 0)


def test_bad_arguments_are_named():
    query, key, value = random_inputs()
    one, rows = query[:, :1], jnp.zeros((1, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match='expected one token'):
        decode_attention(query, key, value, rows)
    with pytest.raises(ValueError, match='neither of neighbours and token'):
        decode_attention(one, key, value)
    with pytest.raises(ValueError, match=r'\(1, 4, 3\); expected \[2 or 1, 2 or 1, most\]'):
        decode_attention(one, key, value, jnp.zeros((1, 4, 3), jnp.int32))
    with pytest.raises(ValueError, match='window=0'):
        stochastic_neighbours(jnp.arange(4), jnp.arange(4), 1, window=0)
    packed = AttentionContext(segment_ids=jnp.ones((1, 4), jnp.int32), key=KEY)
    with pytest.raises(ValueError, match='one document'):
        get_attention('stochastic').decoding.prepare(packed, 4)
