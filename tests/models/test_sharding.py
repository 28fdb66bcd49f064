"""Meshes, placements, and equality with one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from sa_jax.models.sharding import batch_sharding, make_mesh, parameter_shardings

KEY = jax.random.key(3)


def test_mesh_sizes():
    assert dict(make_mesh().shape) == {'data': 8, 'fsdp': 1, 'tensor': 1, 'sequence': 1}
    shape = dict(make_mesh(data=2, fsdp=-1, sequence=2).shape)
    assert shape == {'data': 2, 'fsdp': 2, 'tensor': 1, 'sequence': 2}
    assert make_mesh(devices=jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ({'data': 3}, 'needs 3 devices, but there are 8'),
        ({'tensor': 3}, '3 does not divide 8'),
        ({'fsdp': -1}, 'Only one mesh size can be -1'),
        ({'fsdp': 0}, 'at least 1'),
    ],
)
def test_impossible_meshes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def test_optimizer_state_follows_the_parameters(make_model):
    mesh = make_mesh(2, 2, 2)
    params = nnx.to_pure_dict(nnx.state(make_model(qk_norm=True, tie_embeddings=False)))
    state = {'params': params, 'optimizer': optax.adamw(1e-3).init(params), 'key': KEY}
    shardings = parameter_shardings(jax.eval_shape(lambda: state), mesh)
    assert shardings['optimizer'][0].mu == shardings['params']
    assert shardings['optimizer'][0].nu == shardings['params']
    assert shardings['optimizer'][0].count.spec == PartitionSpec()
    query = shardings['params']['layers']['attention']['query']
    assert query.spec == PartitionSpec(None, 'fsdp', 'tensor', None)


def test_unplaceable_parameters_are_named(make_model):
    mesh = make_mesh(2, 1, 4)
    with pytest.raises(ValueError, match=r"'layers/attention/key': axis 'kv_heads' = 2 cannot be"):
        parameter_shardings(nnx.to_pure_dict(nnx.state(make_model())), mesh)
    with pytest.raises(ValueError, match="No axes are known for 'router'"):
        parameter_shardings({'router': jnp.zeros((4, 4))}, mesh)
    with pytest.raises(ValueError, match="'embedding' should have the axes"):
        parameter_shardings({'embedding': jnp.zeros(4)}, mesh)


def test_indivisible_batch_and_heads_are_named(make_model, tokens):
    model = make_model()
    with pytest.raises(ValueError, match='batch = 4 cannot be split'):
        model(tokens, permutation_key=KEY, mesh=make_mesh())
    with pytest.raises(ValueError, match='num_kv_heads = 2 cannot be split'):
        model(tokens, permutation_key=KEY, mesh=make_mesh(2, 1, 4))


def test_what_a_sequence_axis_cannot_split_is_named(make_model, tokens):
    mesh = make_mesh(2, 1, 1, 4)
    with pytest.raises(ValueError, match='the length of a row = 13 cannot be split'):
        make_model()(tokens, permutation_key=KEY, mesh=mesh)
    with pytest.raises(ValueError, match="attention 'full' needs all tokens of a row"):
        make_model(('full',))(tokens[:, :12], mesh=mesh)


def _assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.fixture
def inputs(tokens):
    return {
        'tokens': tokens,
        'segment_ids': jnp.array([[1] * 6 + [2] * 7, [1] * 11 + [0] * 2] * 2),
        'positions': jnp.array([[*range(6), *range(7)], [*range(13)]] * 2),
        'example_ids': jnp.arange(4) + 5,
    }


@pytest.mark.parametrize('scope', ['example', 'head'])
def test_a_mesh_draws_the_permutations_one_device_does(make_model, run, inputs, scope):
    mesh = make_mesh(2, 2, 2)
    graph, state = nnx.split(make_model(permutation_scope=scope))
    one = run(nnx.merge(graph, state), permutation_key=KEY, **inputs)
    placed = nnx.merge(graph, jax.device_put(state, parameter_shardings(state, mesh)))
    inputs = jax.device_put(inputs, batch_sharding(mesh))
    many = run(placed, permutation_key=KEY, mesh=mesh, **inputs)
    jax.tree.map(_assert_close, many, one)


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {
            'num_experts': 4,
            'num_experts_per_token': 2,
            'layer_attention': {'0': {'attention': ('full', 'full')}},
        },
    ],
)
def test_a_mesh_computes_what_one_device_does(make_model, inputs, changes):
    graph, state = nnx.split(make_model(implementation=None, **changes))
    state = jax.device_put(state, parameter_shardings(state, make_mesh(2, 2, 2)))
    query = state['layers']['attention']['query'][...]
    assert len(query.addressable_shards) == 8
    assert {shard.data.shape for shard in query.addressable_shards} == {(2, 8, 2, 8)}
    _check_mesh(graph, state, inputs, make_mesh(2, 2, 2))


@pytest.mark.parametrize('sizes', [(2, 1, 2, 2), (1, 2, 1, 4)])
def test_a_mesh_splits_rows_too(make_model, inputs, sizes):
    inputs = {name: x[:, :12] if x.ndim == 2 else x for name, x in inputs.items()}
    graph, state = nnx.split(make_model(implementation=None, permutation_scope='example'))
    _check_mesh(graph, state, inputs, make_mesh(*sizes))


def _check_mesh(graph, state, inputs, mesh):
    """Output and gradients on a mesh are those on one device."""

    def loss(state, inputs, mesh):
        output = nnx.merge(graph, state)(permutation_key=KEY, mesh=mesh, **inputs)
        return jnp.mean(jnp.sin(output.logits)), output

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnames='mesh')
    one = run(jax.device_put(state, jax.devices()[0]), inputs, mesh=None)
    state = jax.device_put(state, parameter_shardings(state, mesh))
    many = run(state, jax.device_put(inputs, batch_sharding(mesh)), mesh=mesh)
    jax.tree.map(_assert_close, many, one)
