"""The GPU kernels: their numbers in Pallas' interpreter, their lowering, and who gets them."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_functions import calls, compare, random_inputs, relative_error, run

from sa_jax import (
    full_attention,
    moba_attention,
    sliding_window_attention,
    stochastic_attention,
    stochastic_partition_attention,
)
from sa_jax.attention import dispatch, launch, pallas_gpu
from sa_jax.attention.launch import Launch, Tile

KEY = jax.random.key(5)

compare = functools.partial(compare, implementation='pallas_interpret')


@pytest.mark.slow
@given(calls(), st.booleans())
@settings(max_examples=4)
def test_full(call, is_causal):
    inputs, sinks, options = call
    compare(functools.partial(full_attention, is_causal=is_causal, **options), inputs, sinks)


@pytest.mark.slow
@given(calls(), st.booleans(), st.integers(1, 150))
@settings(max_examples=6)
def test_sliding_window(call, is_causal, window):
    inputs, sinks, options = call
    options |= {'is_causal': is_causal, 'window': window}
    compare(functools.partial(sliding_window_attention, **options), inputs, sinks)


def draws(inputs, scope, seed):
    """Keys for a permutation per layer, example or key/value head."""
    batch, _, kv_heads, _ = inputs[1].shape
    shape = {'layer': (), 'example': (batch,), 'head': (batch, kv_heads)}[scope]
    return jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(seed)


SCOPES = st.sampled_from(['layer', 'example', 'head'])


@pytest.mark.slow
@given(calls(), st.booleans(), st.integers(1, 150), SCOPES)
@settings(max_examples=8)
def test_stochastic(call, is_causal, window, scope):
    inputs, sinks, options = call
    options |= {'is_causal': is_causal, 'window': window}
    options['permutation_key'] = draws(inputs, scope, window)
    compare(functools.partial(stochastic_attention, **options), inputs, sinks)


@pytest.mark.slow
@given(calls(), st.booleans(), st.sampled_from([1, 7, 32, 64, 150]), SCOPES)
@settings(max_examples=6)
def test_stochastic_partition(call, is_causal, chunk_size, scope):
    inputs, sinks, options = call
    options |= {'is_causal': is_causal, 'chunk_size': chunk_size}
    options['permutation_key'] = draws(inputs, scope, chunk_size)
    compare(functools.partial(stochastic_partition_attention, **options), inputs, sinks)


FUNCTIONS = {
    'full': full_attention,
    'sliding_window': functools.partial(sliding_window_attention, window=33),
    'stochastic': functools.partial(stochastic_attention, window=33, permutation_key=KEY),
    'partition': functools.partial(
        stochastic_partition_attention, chunk_size=32, permutation_key=KEY
    ),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_bfloat16(name):
    inputs = random_inputs(5, 1, 101, 1, 2, 16, jnp.bfloat16)
    compare(FUNCTIONS[name], inputs, values=2e-2, gradients=2e-2)


def test_a_head_dim_that_is_no_power_of_two():
    compare(FUNCTIONS['stochastic'], random_inputs(5, 1, 64, 1, 1, 20))


@pytest.mark.parametrize('shape', [(77,), (2, 77), (2, 2, 77)])
def test_a_callers_permutation_may_mix_segments(shape):
    inputs = random_inputs(0, 2, 77, 2, 1, 16)
    segment_ids = jnp.asarray(np.repeat([[1, 2, 3, 0]], [30, 20, 20, 7], axis=1).repeat(2, 0))
    rng = np.random.default_rng(0)
    permutation = jnp.asarray(rng.permuted(np.broadcast_to(np.arange(77), shape), axis=-1))
    function = functools.partial(
        stochastic_attention, window=20, permutation=permutation, segment_ids=segment_ids
    )
    compare(function, inputs)


@pytest.mark.parametrize('scale', [-0.7, 0.0])
def test_any_scale(scale):
    inputs = random_inputs(0, 1, 40, 1, 2, 16)
    compare(functools.partial(FUNCTIONS['stochastic'], scale=scale, num_sinks=2), inputs)


SINKS = jnp.asarray([0.5, -1.0])


@pytest.mark.parametrize(
    ('written', 'sink_logits'),
    [
        (Launch(Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(64, 32, 4, 1)), SINKS),
        (Launch(Tile(64, 16, 4, 1), Tile(16, 64, 4, 1), Tile(16, 64, 4, 1), fused=False), SINKS),
        (Launch(*3 * [Tile(16, 16, 4, 1)], fused=False), None),
    ],
)
def test_tiles_and_copies_change_nothing(written, sink_logits):
    """Whole blocks or not; rows read through the permutation, or permuted copies."""
    inputs = random_inputs(2, 1, 80, 1, 2, 16)
    permutation = jax.random.permutation(KEY, 80)
    call = {'window': 40, 'segment_ids': None}
    options = pallas_gpu.Options(is_causal=True, scale=0.25, launch=written, interpret=True)

    def by_launch(*inputs, sink_logits):
        arrays = {'permutation': permutation[None], 'sink_logits': sink_logits}
        return pallas_gpu.stochastic(
            *inputs, options=options, mixes_segments=False, **arrays, **call
        )

    function = functools.partial(
        stochastic_attention, permutation=permutation, implementation='reference', **call
    )
    found, expected = (run(x, inputs, sink_logits, inputs[0]) for x in (by_launch, function))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('name', FUNCTIONS)
def test_padding_reaches_nothing(name):
    function = functools.partial(
        FUNCTIONS[name], num_sinks=2, logits_soft_cap=3.0, implementation='pallas_interpret'
    )
    inputs = random_inputs(0, 1, 40, 1, 2, 16)
    padded = tuple(
        jnp.pad(x, ((0, 0), (6, 30), (0, 0), (0, 0)), constant_values=jnp.nan) for x in inputs
    )
    segment_ids = jnp.asarray([[0] * 6 + [4] * 40 + [0] * 30])
    weights = jnp.where(segment_ids[..., None, None] > 0, 1.0, jnp.nan)

    def output_and_gradients(inputs, weights, **options):
        output, pull_back = jax.vjp(lambda inputs: function(*inputs, **options), inputs)
        return output, *pull_back(jnp.broadcast_to(weights, output.shape))[0]

    alone = output_and_gradients(inputs, jnp.float32(1.0))
    found = output_and_gradients(padded, weights, segment_ids=segment_ids)
    for a, b in zip(found, alone, strict=True):
        assert (jnp.delete(a, jnp.arange(6, 46), axis=1) == 0).all()
        assert relative_error(a[:, 6:46], b) <= 1e-5


def test_a_row_of_padding_alone():
    inputs = random_inputs(0, 2, 40, 1, 1, 16)
    inputs = tuple(x.at[0].set(jnp.nan) for x in inputs)
    segment_ids = jnp.asarray([[0] * 40, [1] * 40])
    for function in FUNCTIONS.values():
        found = function(*inputs, segment_ids=segment_ids, implementation='pallas_interpret')
        assert (found[0] == 0).all()
        assert jnp.isfinite(found[1]).all()


def test_vmap():
    inputs = [jnp.stack([x, 2 * x]) for x in random_inputs(0, 1, 40, 1, 2, 16)]
    function = functools.partial(FUNCTIONS['stochastic'], implementation='pallas_interpret')
    found = jax.vmap(function)(*inputs)
    expected = jnp.stack([function(*(x[i] for x in inputs)) for i in range(2)])
    assert relative_error(found, expected) <= 1e-6


def described_gpu():
    """Lets kernels be lowered where there is no GPU."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind='NVIDIA H200', num_cores=None, platform='gpu')
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def kernels_lowered_for_cuda(function, *arguments):
    """How many kernels `function` and its gradients by three arguments take."""

    def loss(query, key, value, *rest):
        return function(query, key, value, *rest).astype(jnp.float32).sum()

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    with described_gpu():
        lowered = gradient.trace(*arguments).lower(lowering_platforms=('cuda',))
    return lowered.as_text().count('xla.gpu.triton')


def shapes(length, head_dim, dtype):
    query = jax.ShapeDtypeStruct((2, length, 4, head_dim), dtype)
    key = jax.ShapeDtypeStruct((2, length, 2, head_dim), dtype)
    segment_ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    return (query, key, key), segment_ids


WRITTEN = {(d, h, written) for (_, d, h), written in launch.read_table().items()}


@pytest.mark.parametrize(('dtype', 'head_dim', 'written'), sorted(WRITTEN, key=str))
def test_every_launch_lowers_for_cuda(dtype, head_dim, written):
    cap = 30.0 if dtype == 'bfloat16' else None
    options = pallas_gpu.Options(is_causal=True, scale=0.1, logits_soft_cap=cap, launch=written)
    inputs, segment_ids = shapes(300, head_dim, dtype)
    permutation = jax.ShapeDtypeStruct((2, 2, 300), jnp.int32)

    def stochastic(query, key, value, permutation, segment_ids):
        sink_logits = jnp.zeros(4)
        arrays = (query, key, value, permutation, segment_ids, sink_logits)
        return pallas_gpu.stochastic(*arrays, options, window=128, mixes_segments=True)

    def sliding_window(query, key, value):
        return pallas_gpu.own_order(query, key, value, *3 * [None], options, window=128)

    assert kernels_lowered_for_cuda(stochastic, *inputs, permutation, segment_ids) == 3
    assert kernels_lowered_for_cuda(sliding_window, *shapes(512, head_dim, dtype)[0]) == 3


@pytest.mark.parametrize('name', FUNCTIONS)
def test_functions_lower_for_cuda(name):
    inputs, segment_ids = shapes(100, 64, 'bfloat16')
    function = functools.partial(FUNCTIONS[name], implementation='pallas')

    def packed(query, key, value, segment_ids):
        return jax.vmap(function)(
            *(x[:, None] for x in (query, key, value)), segment_ids=segment_ids[:, None]
        )

    assert kernels_lowered_for_cuda(function, *inputs) == 3
    assert kernels_lowered_for_cuda(packed, *inputs, segment_ids) == 3


def pick(implementation=None, obstacle=None, is_plain=False, head_dim=64, dtype='bfloat16'):
    x = jax.ShapeDtypeStruct((1, 8, 1, head_dim), dtype)
    return dispatch.pick(implementation, x, x, x, obstacle=obstacle, is_plain=is_plain)


def test_picks_the_best_for_the_device(monkeypatch):
    assert pick() == 'xla'  # on the CPU
    device = types.SimpleNamespace(platform='gpu', compute_capability='9.0')
    monkeypatch.setattr(launch, 'default_device', lambda: device)
    assert pick() == 'xla'  # one of eight devices, nobody knows which
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    assert pick() == 'pallas'
    assert pick(is_plain=True) == 'pallas'  # compiled elsewhere, without cuDNN
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert pick(is_plain=True) == 'cudnn'
    assert pick(is_plain=True, head_dim=256) == pick(is_plain=True, dtype='float32') == 'pallas'
    assert pick(obstacle='it is circular') == pick(head_dim=512) == 'xla'
    assert pick(dtype=jnp.float8_e4m3fn) == 'xla'
    device.compute_capability = '7.5'
    assert pick() == 'xla'


def test_runs_the_kernels_on_each_device_of_a_mesh(monkeypatch):
    device = types.SimpleNamespace(platform='gpu', compute_capability='8.0')
    monkeypatch.setattr(launch, 'default_device', lambda: device)
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec('data')
    picked = []

    def attention(x):
        picked.append(dispatch.pick(None, x, x, x, obstacle=None, is_plain=False))
        return x

    x = jnp.ones((8, 8, 1, 64))
    jax.jit(attention)(x)
    jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    assert picked == ['xla', 'pallas']


Q, K, V = random_inputs(0, 1, 12, 1, 1, 16)
SEPARATE = {f'{x}_positions': jnp.arange(12)[None] for x in ('query', 'key')} | {
    f'{x}_segment_ids': jnp.ones((1, 12), int) for x in ('query', 'key')
}


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: full_attention(Q, K, V, implementation='pallas'), 'the arrays are on'),
        (
            lambda: moba_attention(Q, K, V, block_size=4, top_k=2, implementation='pallas'),
            'MoBA has no GPU kernel',
        ),
        (
            lambda: stochastic_attention(
                Q, K, V, window=3, permutation_key=KEY, circular=True, implementation='pallas'
            ),
            'the window is circular',
        ),
        (
            lambda: full_attention(Q, K, V, implementation='pallas_interpret', **SEPARATE),
            'tokens of their own',
        ),
        (
            lambda: full_attention(
                *(jnp.repeat(x, 20, axis=-1) for x in (Q, K, V)), implementation='pallas_interpret'
            ),
            'head_dim 320; the GPU kernel runs up to 256',
        ),
    ],
)
def test_says_why_it_cannot_run(call, message):
    with pytest.raises(ValueError, match=message):
        call()
