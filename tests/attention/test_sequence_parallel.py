"""Attention over a sequence on several devices, beside the same on one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import sa_jax
from sa_jax.attention import sequence_parallel
from sa_jax.report.collectives import collectives, totals

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
FUNCTIONS = {
    'stochastic': (sequence_parallel.stochastic_attention, sa_jax.stochastic_attention),
    'sliding_window': (
        sequence_parallel.sliding_window_attention,
        sa_jax.sliding_window_attention,
    ),
}


def sharded(kind, devices, **options):
    """The function of a kind over a mesh with an axis `sequence`."""
    mesh = jax.make_mesh(
        (devices,), ('sequence',), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    spec = PartitionSpec(None, 'sequence')

    def attend(query, key, value):
        function, _ = FUNCTIONS[kind]
        return function(query, key, value, axis_name='sequence', **options)

    return jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)


def heads(length, dtype=np.float32, seed=0):
    generator = np.random.default_rng(seed)
    shapes = [(BATCH, length, count, HEAD_DIM) for count in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def documents(length):
    """Three documents and padding in the first row, one document in the second."""
    ids = np.ones((BATCH, length), np.int32)
    ids[0, length // 3 :] = 4
    ids[0, length // 2 :] = 2
    ids[0, length - length // 8 :] = 0
    return jnp.asarray(ids)


def permutation_of(name, length):
    index = np.arange(length)
    if name == 'identity':
        return jnp.asarray(index)
    if name == 'reversal':
        return jnp.asarray(index[::-1].copy())
    generator = np.random.default_rng(3)
    return jnp.asarray(np.stack([generator.permutation(length) for _ in range(BATCH)]))


def assert_alike(kind, devices, length, dtype=np.float32, sent=None, **options):
    *qkv, weights = heads(length, dtype)

    def both(function):
        def loss(*qkv):
            output = function(*qkv)
            return (output * weights).astype(jnp.float32).sum(), output

        (_, output), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
            *qkv
        )
        return output, *gradients

    _, whole = FUNCTIONS[kind]
    expected = both(lambda *qkv: whole(*qkv, **options))
    found = both(sharded(kind, devices, **options | (sent or {})))
    tolerance = 3e-2 if dtype == jnp.bfloat16 else 1e-5
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('stochastic', {'window': 33}),
        ('stochastic', {'window': 32, 'is_causal': False}),
        ('stochastic', {'window': 300}),  # half of it exceeds a device's tokens
        ('stochastic', {'window': 1}),
        ('stochastic', {'window': 10_000}),
        ('sliding_window', {'window': 33}),
        ('sliding_window', {'window': 100, 'is_causal': False}),
        ('sliding_window', {'window': 200}),
        ('sliding_window', {'window': 10_000}),
    ],
)
@pytest.mark.parametrize('packed', [pytest.param(False, marks=pytest.mark.slow), True])
def test_values_and_gradients_are_those_of_one_device(kind, options, packed):
    length = 8 * 53
    options = dict(options)
    if kind == 'stochastic':
        options['permutation_key'] = jax.random.key(1)
    if packed:
        options['segment_ids'] = documents(length)
    assert_alike(kind, 8, length, **options)


@pytest.mark.parametrize('name', ['identity', 'reversal', 'random'])
@pytest.mark.parametrize('capacity', [None, pytest.param(1, marks=pytest.mark.slow)])
def test_a_permutation_that_moves_too_much_is_exact_all_the_same(name, capacity):
    length = 4 * 60
    permutation = permutation_of(name, length)
    sent = {} if capacity is None else {'capacity': capacity}
    assert_alike('stochastic', 4, length, sent=sent, window=17, permutation=permutation)


def test_options_of_the_logits_and_keys_for_each_example():
    keys = jax.random.split(jax.random.key(2), BATCH)
    options = {'logits_soft_cap': 5.0, 'sink_logits': jnp.arange(HEADS, dtype=jnp.float32)}
    assert_alike('stochastic', 2, 90, window=21, permutation_key=keys, **options)
    positions = jnp.arange(90)[None] * jnp.array([[1], [2]])
    assert_alike('sliding_window', 2, 90, window=21, positions=positions, **options)


def test_bfloat16():
    assert_alike('stochastic', 2, 128, jnp.bfloat16, window=31, permutation_key=jax.random.key(0))


def test_rows_on_other_devices_that_move_less_take_the_same_way():
    # One way for a device and another for its peers would wait for each other for ever.
    length = 4 * 256
    ids = np.ones((BATCH, length), np.int32)
    ids[1, length // 2 :] = 2  # too much for a pair of devices; the first row is not
    options = {'window': 17, 'permutation_key': jax.random.key(1)}
    axes = ('data', 'sequence')
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    tokens = PartitionSpec(*axes)

    def attend(query, key, value, segment_ids):
        return sequence_parallel.stochastic_attention(
            query, key, value, axis_name='sequence', segment_ids=segment_ids, **options
        )

    attend = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, PartitionSpec('data')),
        out_specs=tokens,
        check_vma=False,
    )
    *qkv, _ = heads(length)
    expected = sa_jax.stochastic_attention(*qkv, segment_ids=jnp.asarray(ids), **options)
    np.testing.assert_allclose(jax.jit(attend)(*qkv, ids), expected, rtol=1e-5, atol=1e-5)


def test_what_is_sent():
    devices, length, window = 8, 8 * 512, 65
    *qkv, _ = heads(length)
    attend = sharded('stochastic', devices, window=window, permutation_key=jax.random.key(0))
    sent = totals(collectives(jax.jit(attend).lower(*qkv).compile().as_text()))
    row = BATCH * HEAD_DIM * 4
    capacity = sequence_parallel.pair_capacity(length, devices)
    assert capacity == math.ceil(64 + 6 * 8)
    # There with queries, keys and values, back with outputs.
    rows = devices * capacity * (HEADS + 2 * KV_HEADS + HEADS)
    assert sent['all-to-all'] == (2, row * rows)
    halo = row * 2 * KV_HEADS * (window - 1)
    # That is O(n·d/P): twice the tokens of a device, not all of them.
    shard = length // devices
    assert rows < 2 * shard * (2 * HEADS + 2 * KV_HEADS)
    # What exceeds the capacity visits all devices instead, in a branch of its own.
    visits = devices * row * shard * (2 * HEADS + 2 * KV_HEADS)
    assert sent['collective-permute'] == (2 + 2 * devices, halo + visits)
    assert sent['all-reduce'] == (1, 4)  # whether to: alike on all devices
    assert len(sent) == 3

    attend = sharded('sliding_window', devices, window=window)
    sent = totals(collectives(jax.jit(attend).lower(*qkv).compile().as_text()))
    assert sent == {'collective-permute': (1, halo)}


@pytest.mark.slow
def test_long_sequences_need_less_memory_on_more_devices():
    length = 2**18
    options = {'window': 257, 'permutation_key': jax.random.key(0)}

    def memory(devices):
        attend = sharded('stochastic', devices, **options)

        def gradients(*qkv):
            return jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))(*qkv)

        qkv = [jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)] * 3
        return jax.jit(gradients).lower(*qkv).compile().memory_analysis().temp_size_in_bytes

    two, eight = memory(2), memory(8)
    assert eight < 0.35 * two
    generator = np.random.default_rng(0)
    qkv = [jnp.asarray(generator.normal(size=(1, length, 1, 16)), jnp.float32) for _ in range(3)]
    found = jax.jit(sharded('stochastic', 8, **options))(*qkv)
    expected = jax.jit(lambda *x: sa_jax.stochastic_attention(*x, **options))(*qkv)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_errors():
    *qkv, _ = heads(80)
    with pytest.raises(ValueError, match='either permutation or permutation_key'):
        sharded('stochastic', 8, window=3)(*qkv)
    with pytest.raises(ValueError, match=r'shape \(10,\); expected \(80,\)'):
        sharded('stochastic', 8, window=3, permutation=jnp.arange(10))(*qkv)
    with pytest.raises(ValueError, match=r'segment_ids has shape \(2, 10\)'):
        sharded('sliding_window', 8, window=3, segment_ids=jnp.ones((2, 10), int))(*qkv)
    with pytest.raises(ValueError, match='capacity=0'):
        sharded('stochastic', 8, window=3, permutation=jnp.arange(80), capacity=0)(*qkv)
