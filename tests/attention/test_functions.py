"""Every fast path against the dense reference, and what ties the functions together."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sa_jax
from sa_jax import (
    full_attention,
    local_stochastic_attention,
    moba_attention,
    sliding_window_attention,
    stochastic_attention,
    stochastic_partition_attention,
)


def random_inputs(seed, batch, length, kv_heads, group, head_dim, dtype=jnp.float32, keys=None):
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, length, kv_heads * group, head_dim),
        *2 * [(batch, keys or length, kv_heads, head_dim)],
    ]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def relative_error(found, expected):
    """In the norm; arrays that ought to vanish are held against entries of 0.01."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    smallest = 0.01 * np.sqrt(expected.size)
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), smallest)


def run(function, inputs, sink_logits, weights):
    """The output and its gradients by q, k, v and, if there are any, sink logits."""

    def loss(inputs, sink_logits):
        output = function(*inputs, sink_logits=sink_logits)
        return jnp.sum(output.astype(jnp.float32) * weights), output

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, output), gradients = gradient(inputs, sink_logits)
    return output, jax.tree.leaves(gradients)


def compare(function, inputs, sink_logits=None, values=1e-5, gradients=1e-4, implementation='xla'):
    """Holds an implementation against 'reference' on float32 copies of the inputs."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=inputs[0].shape), jnp.float32)
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    expected, expected_gradients = run(
        functools.partial(function, implementation='reference'), exact, sink_logits, weights
    )
    found, found_gradients = run(
        functools.partial(function, implementation=implementation), inputs, sink_logits, weights
    )
    assert found.dtype == inputs[0].dtype
    assert relative_error(found, expected) <= values
    for a, b in zip(found_gradients, expected_gradients, strict=True):
        assert relative_error(a, b) <= gradients


@st.composite
def rows(draw, batch, length):
    """Segment ids and positions `[batch, length]`: documents in any order of numbers, padding."""
    segment_ids, positions = np.zeros((2, batch, length), np.int32)
    for row in range(batch):
        cuts = sorted(draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4)))
        bounds = [0, *(c for c in cuts if c < length), length]
        numbers = draw(st.permutations(range(1, len(bounds))))
        stride = draw(st.integers(1, 3))
        for number, (a, b) in zip(numbers, itertools.pairwise(bounds), strict=True):
            segment_ids[row, a:b] = number
            positions[row, a:b] = np.arange(b - a) * stride
        if draw(st.booleans()) and len(bounds) > 2:
            segment_ids[row, bounds[-2] :] = 0
    return jnp.asarray(segment_ids), jnp.asarray(positions)


@st.composite
def calls(draw):
    """Inputs and options that all functions share."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    group = draw(st.sampled_from([1, 2, 3]))
    length = draw(st.one_of(st.integers(1, 90), st.integers(91, 700)))
    head_dim = draw(st.sampled_from([4, 8, 16]))
    inputs = random_inputs(draw(st.integers(0, 99)), batch, length, kv_heads, group, head_dim)
    options = {'num_sinks': draw(st.sampled_from([0, 0, 1, 4]))}
    options['logits_soft_cap'] = draw(st.sampled_from([None, None, 1.5]))
    if draw(st.booleans()):
        options['segment_ids'], options['positions'] = draw(rows(batch, length))
    sinks = jnp.linspace(-1.0, 2.0, kv_heads * group) if draw(st.booleans()) else None
    return inputs, sinks, options


@given(calls(), st.booleans())
def test_full(call, is_causal):
    inputs, sinks, options = call
    compare(functools.partial(full_attention, is_causal=is_causal, **options), inputs, sinks)


@given(calls(), st.booleans(), st.integers(1, 150))
def test_sliding_window(call, is_causal, window):
    inputs, sinks, options = call
    options |= {'is_causal': is_causal, 'window': window}
    compare(functools.partial(sliding_window_attention, **options), inputs, sinks)


@given(
    calls(),
    st.booleans(),
    st.integers(1, 150),
    st.booleans(),
    st.sampled_from(['layer', 'example', 'head']),
)
def test_stochastic(call, is_causal, window, circular, scope):
    inputs, sinks, options = call
    batch, _, kv_heads, _ = inputs[1].shape
    shape = {'layer': (), 'example': (batch,), 'head': (batch, kv_heads)}[scope]
    key = jax.random.split(jax.random.key(window), shape) if shape else jax.random.key(window)
    options |= {'is_causal': is_causal, 'window': window, 'circular': circular}
    compare(functools.partial(stochastic_attention, permutation_key=key, **options), inputs, sinks)


@given(
    calls(),
    st.integers(1, 150),
    st.integers(1, 60),
    st.sampled_from(['layer', 'example', 'head']),
)
def test_local_stochastic(call, window, local_window, scope):
    inputs, sinks, options = call
    batch, _, kv_heads, _ = inputs[1].shape
    shape = {'layer': (), 'example': (batch,), 'head': (batch, kv_heads)}[scope]
    key = jax.random.split(jax.random.key(window), shape) if shape else jax.random.key(window)
    options |= {'window': window, 'local_window': local_window, 'permutation_key': key}
    compare(functools.partial(local_stochastic_attention, **options), inputs, sinks)


@given(
    calls(),
    st.booleans(),
    st.integers(1, 150),
    st.sampled_from(['layer', 'example', 'head']),
)
def test_stochastic_partition(call, is_causal, chunk_size, scope):
    inputs, sinks, options = call
    batch, _, kv_heads, _ = inputs[1].shape
    shape = {'layer': (), 'example': (batch,), 'head': (batch, kv_heads)}[scope]
    key = jax.random.split(jax.random.key(chunk_size), shape) if shape else KEY
    options |= {'is_causal': is_causal, 'chunk_size': chunk_size, 'permutation_key': key}
    compare(functools.partial(stochastic_partition_attention, **options), inputs, sinks)


@pytest.mark.parametrize(
    ('length', 'chunk_size', 'options'),
    [
        (600, 256, {}),
        (257, 256, {'num_sinks': 4}),
        (700, 300, {'logits_soft_cap': 1.5}),
        (600, 511, {'num_sinks': 4}),
        (600, 257, {'is_causal': False}),
    ],
)
def test_large_chunks(length, chunk_size, options):
    # Later queries of a chunk see more of its keys: the fast path computes it in stairs.
    options = options | {'chunk_size': chunk_size, 'permutation_key': KEY}
    inputs = random_inputs(0, 2, length, 2, 2, 8)
    compare(functools.partial(stochastic_partition_attention, **options), inputs)


def test_large_sink_logits():
    # Far above all logits, with lanes that hold no token in the last block.
    inputs, sinks = random_inputs(0, 1, 258, 1, 2, 8), jnp.asarray([100.0, -3.0])
    options = {'chunk_size': 256, 'permutation_key': KEY}
    compare(functools.partial(stochastic_partition_attention, **options), inputs, sinks)


@given(calls(), st.integers(1, 40), st.integers(1, 4))
def test_moba(call, block_size, top_k):
    inputs, sinks, options = call
    options |= {'block_size': block_size, 'top_k': top_k}
    compare(functools.partial(moba_attention, **options), inputs, sinks)


@given(st.data(), st.booleans(), st.sampled_from([None, 1, 5, 64]))
def test_queries_and_keys_of_their_own(data, is_causal, window):
    batch, queries, keys = 2, data.draw(st.integers(1, 150)), data.draw(st.integers(1, 300))
    inputs = random_inputs(3, batch, queries, 2, 2, 8, keys=keys)
    query_segment_ids, query_positions = data.draw(rows(batch, queries))
    key_segment_ids, key_positions = data.draw(rows(batch, keys))
    function = full_attention if window is None else sliding_window_attention
    options = {} if window is None else {'window': window}
    compare(
        functools.partial(
            function,
            is_causal=is_causal,
            query_positions=query_positions,
            key_positions=key_positions,
            query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids,
            num_sinks=data.draw(st.sampled_from([0, 2])),
            **options,
        ),
        inputs,
    )


KEY = jax.random.key(11)
FUNCTIONS = {
    'full': full_attention,
    'sliding_window': functools.partial(sliding_window_attention, window=33),
    'stochastic': functools.partial(stochastic_attention, window=33, permutation_key=KEY),
    'stochastic_partition': functools.partial(
        stochastic_partition_attention, chunk_size=33, permutation_key=KEY
    ),
    'local_stochastic': functools.partial(
        local_stochastic_attention, window=33, local_window=9, permutation_key=KEY
    ),
    'moba': functools.partial(moba_attention, block_size=16, top_k=3),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_bfloat16(name):
    # The choice of MoBA's blocks is made in float32 of the same rounded inputs.
    inputs = random_inputs(5, 2, 203, 2, 2, 16, jnp.bfloat16)
    compare(FUNCTIONS[name], inputs, values=2e-2, gradients=2e-2)


@pytest.mark.parametrize('shape', [(77,), (2, 77), (2, 2, 77)])
def test_a_callers_permutation_may_mix_segments(shape):
    inputs = random_inputs(0, 2, 77, 2, 1, 8)
    segment_ids = jnp.asarray(np.repeat([[1, 2, 3, 0]], [30, 20, 20, 7], axis=1).repeat(2, 0))
    rng = np.random.default_rng(0)
    permutation = jnp.asarray(rng.permuted(np.broadcast_to(np.arange(77), shape), axis=-1))
    options = {'permutation': permutation, 'segment_ids': segment_ids}
    compare(functools.partial(stochastic_attention, window=20, **options), inputs)
    compare(functools.partial(stochastic_partition_attention, chunk_size=9, **options), inputs)


@pytest.mark.parametrize('length', [1, 2, 65, 130])
def test_a_wide_stochastic_window_is_full_attention(length):
    inputs = random_inputs(0, 2, length, 2, 2, 8)
    wide = stochastic_attention(*inputs, window=2 * length - 1, permutation_key=KEY)
    assert relative_error(wide, full_attention(*inputs)) <= 1e-6


def test_a_union_with_a_window_of_one_is_the_other_window():
    inputs = random_inputs(0, 2, 130, 2, 2, 8)
    options = {'permutation_key': KEY, 'num_sinks': 3}
    found = local_stochastic_attention(*inputs, window=1, local_window=12, **options)
    near = sliding_window_attention(*inputs, window=12, num_sinks=3)
    assert relative_error(found, near) <= 1e-6
    found = local_stochastic_attention(*inputs, window=24, local_window=1, **options)
    assert relative_error(found, stochastic_attention(*inputs, window=24, **options)) <= 1e-6


@pytest.mark.parametrize('length', [1, 2, 65, 130])
def test_a_single_chunk_is_full_attention(length):
    inputs = random_inputs(0, 2, length, 2, 2, 8)
    found = stochastic_partition_attention(*inputs, chunk_size=length, permutation_key=KEY)
    assert relative_error(found, full_attention(*inputs)) <= 1e-6


def test_the_identity_partition_is_full_attention_to_blocks():
    inputs = random_inputs(0, 2, 130, 2, 2, 8)
    found = stochastic_partition_attention(*inputs, chunk_size=26, permutation=jnp.arange(130))
    blocks = jnp.repeat(jnp.arange(1, 6), 26)[None].repeat(2, axis=0)
    assert relative_error(found, full_attention(*inputs, segment_ids=blocks)) <= 1e-6


def test_the_identity_permutation_is_a_sliding_window():
    inputs = random_inputs(0, 2, 130, 2, 2, 8)
    options = {'window': 24, 'is_causal': False}
    found = stochastic_attention(*inputs, permutation=jnp.arange(130), **options)
    assert relative_error(found, sliding_window_attention(*inputs, **options)) <= 1e-6


def test_moba_with_every_block_is_full_attention():
    inputs = random_inputs(0, 2, 130, 2, 2, 8)
    found = moba_attention(*inputs, block_size=26, top_k=5)
    assert relative_error(found, full_attention(*inputs)) <= 1e-6


def test_the_window_counts_one_more_than_jax():
    inputs = random_inputs(0, 1, 90, 2, 2, 8)
    found = sliding_window_attention(*inputs, window=10)
    expected = jax.nn.dot_product_attention(*inputs, is_causal=True, local_window_size=(9, 0))
    assert relative_error(found, expected) <= 1e-6


def test_keys_draw_the_permutations_of_draw_permutation():
    inputs = random_inputs(0, 2, 50, 2, 2, 8)
    segment_ids = jnp.asarray([[3] * 20 + [1] * 25 + [0] * 5, [1] * 50])
    drawn = sa_jax.draw_permutation(KEY, segment_ids=segment_ids)
    by_key, given_ = (
        stochastic_attention(*inputs, window=9, segment_ids=segment_ids, **draw)
        for draw in ({'permutation_key': KEY}, {'permutation': drawn})
    )
    np.testing.assert_array_equal(by_key, given_)


def test_left_padding():
    inputs = random_inputs(0, 1, 40, 1, 2, 8)
    padded = tuple(jnp.pad(x, ((0, 0), (6, 0), (0, 0), (0, 0))) for x in inputs)
    segment_ids = jnp.asarray([[0] * 6 + [1] * 40])
    for function in FUNCTIONS.values():
        found = function(*padded, segment_ids=segment_ids)
        assert (found[:, :6] == 0).all()
        assert relative_error(found[:, 6:], function(*inputs)) <= 1e-6


Q, K, V = random_inputs(0, 2, 12, 2, 2, 8)
SHORT = tuple(x[:, :5] for x in (K, V))


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: sliding_window_attention(Q, K, V, window=0), 'window=0; expected'),
        (lambda: stochastic_attention(Q, K, V, window=2.5, permutation_key=KEY), 'window=2.5'),
        (
            lambda: stochastic_partition_attention(Q, K, V, chunk_size=0, permutation_key=KEY),
            'chunk_size=0; expected',
        ),
        (lambda: moba_attention(Q, K, V, block_size=0, top_k=1), 'block_size=0'),
        (lambda: moba_attention(Q, K, V, block_size=4, top_k=0), 'top_k=0'),
        (lambda: moba_attention(Q, K, V, block_size=4, top_k=1, is_causal=False), 'causal'),
        (lambda: full_attention(Q[:, :, :3], K, V), '3 query heads cannot share 2'),
        (lambda: full_attention(Q, K, V[:, :, :1]), 'differ; expected one shape'),
        (lambda: full_attention(Q[..., :4], K, V), 'batch or head_dim'),
        (lambda: full_attention(Q[0], K, V), r'expected \[batch, length, heads, head_dim\]'),
        (lambda: full_attention(Q, *SHORT), 'query_positions, key_positions'),
        (lambda: stochastic_attention(Q, *SHORT, window=3, permutation_key=KEY), 'as many queries'),
        (lambda: moba_attention(Q, *SHORT, block_size=2, top_k=1), 'as many queries'),
        (
            lambda: full_attention(Q, *SHORT, query_positions=jnp.zeros((2, 12), int)),
            'need all four',
        ),
        (lambda: stochastic_attention(Q, K, V, window=3), 'got neither'),
        (
            lambda: stochastic_attention(
                Q, K, V, window=3, permutation=jnp.arange(12), permutation_key=KEY
            ),
            'got both',
        ),
        (
            lambda: stochastic_attention(Q, K, V, window=3, permutation=jnp.zeros(12, int)),
            'token 0 stands in 12 slots',
        ),
        (
            lambda: stochastic_attention(Q, K, V, window=3, permutation=jnp.arange(11)),
            r'shape \(11,\); expected \[T\]',
        ),
        (
            lambda: stochastic_attention(
                Q, K, V, window=3, permutation_key=jax.random.split(KEY, 3)
            ),
            r'permutation_key has shape \(3,\)',
        ),
        (
            lambda: full_attention(Q, K, V, segment_ids=jnp.asarray([[1, 2, 1] * 4] * 2)),
            'segment 1 is split into several runs',
        ),
        (lambda: full_attention(Q, K, V, segment_ids=-jnp.ones((2, 12), int)), 'holds -1'),
        (
            lambda: full_attention(Q, K, V, positions=jnp.asarray([[0, 1, 1] + [5] * 9] * 2)),
            'go from 1 to 1 at token 2',
        ),
        (
            lambda: stochastic_attention(
                Q,
                K,
                V,
                window=3,
                circular=True,
                permutation=jnp.asarray([0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]),
                segment_ids=jnp.asarray([[1] * 6 + [2] * 6] * 2),
            ),
            'mixes segments',
        ),
        (
            lambda: full_attention(Q, K, V, segment_ids=np.array([[1] * 6 + [2**32 + 1] * 6] * 2)),
            'holds 4294967297',
        ),
        (
            lambda: full_attention(Q, K, V, positions=np.array([[*range(11), 2**30]] * 2)),
            'holds 1073741824',
        ),
        (
            lambda: full_attention(
                Q, K, V, positions=np.arange(12, 0, -1, np.uint32)[None].repeat(2, 0)
            ),
            'go from 12 to 11',
        ),
        (lambda: full_attention(Q[:0], K[:0], V[:0]), 'no axis of size 0'),
        (lambda: full_attention(Q, K, V, logits_soft_cap=0.0), 'positive finite number'),
        (lambda: full_attention(Q, K, V, logits_soft_cap=np.inf), 'positive finite number'),
        (lambda: full_attention(Q, K, V, sink_logits=jnp.zeros(3)), 'one logit per query head'),
        (lambda: full_attention(Q, K, V, num_sinks=-1), 'num_sinks=-1'),
        (lambda: full_attention(Q, K, V, implementation='cuda'), "expected None or one of 'ref"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match='typed key'):
        stochastic_attention(Q, K, V, window=3, permutation_key=jax.random.PRNGKey(0))
    with pytest.raises(TypeError, match='expected integers'):
        stochastic_attention(Q, K, V, window=3, permutation=jnp.arange(12.0))
    with pytest.raises(TypeError, match='floating'):
        full_attention(Q.astype(int), K, V)
    with pytest.raises(TypeError, match='query is a list; expected an array'):
        full_attention([Q], K, V)
    with pytest.raises(TypeError, match='segment_ids is a list'):
        full_attention(Q, K, V, segment_ids=[[1] * 12] * 2)


@pytest.mark.parametrize('name', FUNCTIONS)
def test_mixed_dtypes(name):
    """The output is like the query, each gradient like its input."""
    inputs = [
        x.astype(t) for x, t in zip((Q, K, V), ('float32', 'bfloat16', 'float16'), strict=True)
    ]
    function = FUNCTIONS[name]
    assert function(*inputs).dtype == jnp.float32
    gradients = jax.grad(lambda x: function(*x).sum())(inputs)
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]
