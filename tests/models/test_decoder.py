"""The decoder: causal, gated, permuted per layer, the same packed or alone, in any precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.models import rope
from sa_jax.models.decoder import Decoder, run_layers, unembed
from sa_jax.models.layers import (
    join_paths,
    path_gates,
    rms_norm,
    swiglu,
)

KEY = jax.random.key(3)
BOTH = ('stochastic', 'sliding_window')


def _loss(model, tokens, **inputs):
    """A scalar that depends on every logit, as a function of the parameters."""
    graph, state = nnx.split(model)

    def loss(state):
        logits = nnx.merge(graph, state)(tokens, permutation_key=KEY, **inputs).logits
        return jnp.mean(jnp.sin(logits))

    return loss, state


def _assert_close(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize('attention', [('full',), BOTH, ('moba', 'stochastic')])
def test_no_logit_depends_on_a_later_token(make_model, attention):
    length = 13
    model = make_model(attention, vocab_size=length, tie_embeddings=False)
    graph, state = nnx.split(model)
    tokens = jnp.arange(length)[None]  # Token t has row t of the embedding to itself.

    @jax.jit
    @jax.grad
    def gradient(embedding, position):
        state['embedding'] = embedding
        output = nnx.merge(graph, state)(tokens, permutation_key=KEY)
        return output.logits[0, position].sum()

    embedding = state['embedding']
    gradients = [gradient(embedding, position)[...] for position in range(length)]
    influence = np.abs(np.stack(gradients)).max(-1)
    assert (influence[np.triu_indices(length, 1)] == 0).all()
    assert (np.diagonal(influence) > 0).all()
    if attention == ('full',):
        assert (influence[np.tril_indices(length)] > 0).all()


@pytest.mark.parametrize(
    ('attention', 'gate'),
    [(BOTH, 'head'), (BOTH, 'channel'), (BOTH, 'softmax'), (BOTH, 'none'), (BOTH[:1], 'head')],
)
def test_scan_equals_an_unrolled_loop(make_model, run, tokens, attention, gate):
    gate_single_path = len(attention) == 1
    model = make_model(
        attention, gate=gate, gate_single_path=gate_single_path, qk_norm=True, tie_embeddings=False
    )
    if gate != 'none':  # away from where all gates are equal
        kernel = model.layers.attention.path_gate_kernel
        kernel[...] = jax.random.normal(jax.random.key(5), kernel.shape)
    config = model.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    tables = rope.tables(positions, config.head_dim, config.rope_theta)

    x = model.embedding[...][tokens]
    stacked = nnx.to_pure_dict(nnx.state(model.layers))
    for layer in range(config.num_layers):
        p = jax.tree.map(lambda a, layer=layer: a[layer], stacked)
        a, f = p['attention'], p['feed_forward']
        y = rms_norm(x, p['attention_norm'], config.norm_eps)
        q, k, v = (jnp.tensordot(y, a[name], 1) for name in ('query', 'key', 'value'))
        q = rope.rotate(rms_norm(q, a['query_norm'], config.norm_eps), *tables)
        k = rope.rotate(rms_norm(k, a['key_norm'], config.norm_eps), *tables)
        outputs = []
        for path, name in enumerate(config.attention):
            key = jax.random.fold_in(jax.random.fold_in(KEY, layer), path)
            context = AttentionContext(key=key, layer=layer)
            options = config.attention_options[name]
            outputs.append(get_attention(name).function(q, k, v, context, **options))
        if gate == 'none':
            heads = sum(outputs)
        else:
            gates = path_gates(
                y, a['path_gate_kernel'], a['path_gate_bias'], are_shares=gate == 'softmax'
            )
            heads = join_paths(outputs, gates)
        x += jnp.tensordot(heads, a['output'], 2)
        y = rms_norm(x, p['feed_forward_norm'], config.norm_eps)
        x += swiglu(y, f['gate'], f['up']) @ f['down']
    expected = rms_norm(x, model.final_norm[...], config.norm_eps) @ model.unembedding[...].T

    logits = run(model, tokens, permutation_key=KEY).logits
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


def test_permutation_key_matters_and_determines(make_model, run, tokens):
    model = make_model()
    first = run(model, tokens, permutation_key=KEY).logits
    again = run(model, tokens, permutation_key=jax.random.key(3)).logits
    other = run(model, tokens, permutation_key=jax.random.key(4)).logits
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2


@pytest.mark.parametrize('path', [0, 1])
def test_both_paths_contribute(make_model, run, tokens, path):
    model = make_model()
    before = run(model, tokens, permutation_key=KEY)
    bias = model.layers.attention.path_gate_bias
    bias[...] = bias[...].at[:, path].set(-1e9)
    after = run(model, tokens, permutation_key=KEY)
    np.testing.assert_array_equal(after.gate_means[:, path], 0)
    assert np.abs(before.logits - after.logits).max() > 1e-2


def test_initial_values(make_config, run, tokens):
    model = Decoder(make_config(), rngs=nnx.Rngs(0))
    attention, feed_forward = model.layers.attention, model.layers.feed_forward
    np.testing.assert_allclose(np.std(attention.query[...]), 0.02, rtol=0.1)
    for residual in (attention.output, feed_forward.down):
        np.testing.assert_allclose(np.std(residual[...]), 0.02 / np.sqrt(2 * 2), rtol=0.1)
    assert np.abs(attention.query[0] - attention.query[1]).max() > 0
    np.testing.assert_array_equal(run(model, tokens, permutation_key=KEY).gate_means, 0.5)

    # Both gates learn from the start.
    loss, state = _loss(model, tokens)
    gradient = jax.jit(jax.grad(loss))(state)['layers']['attention']
    for name, paths_axis in (('path_gate_kernel', 2), ('path_gate_bias', 1)):
        per_path = np.moveaxis(np.asarray(gradient[name][...]), paths_axis, 0)
        assert (np.abs(per_path).max(axis=tuple(range(1, per_path.ndim))) > 0).all()


def test_gate_means_are_over_valid_tokens(make_model, run, tokens):
    assert run(make_model(('full',)), tokens).gate_means.shape == (2, 0)
    model, valid = make_model(), 8
    segment_ids = jnp.broadcast_to(jnp.arange(13) < valid, tokens.shape).astype(jnp.int32)
    padded = run(model, tokens, segment_ids=segment_ids, permutation_key=KEY).gate_means
    alone = run(model, tokens[:, :valid], permutation_key=KEY).gate_means
    np.testing.assert_allclose(padded, alone, rtol=1e-5)


@pytest.mark.parametrize('name', BOTH)
def test_a_wide_window_is_full_attention(make_model, run, tokens, name):
    full = make_model(('full',))
    window = 2 * tokens.shape[1] - 1
    sparse = make_model((name,), attention_options={name: {'window': window}})
    expected = run(full, tokens).logits
    np.testing.assert_allclose(
        run(sparse, tokens, permutation_key=KEY).logits,
        expected,
        atol=1e-5 * np.abs(expected).max(),
    )


@pytest.mark.parametrize('scope', ['layer', 'head'])
def test_a_document_is_the_same_alone_packed_and_padded(make_model, run, tokens, scope):
    model = make_model(permutation_scope=scope)
    lengths = (5, 6)
    documents = jnp.split(tokens[:1, : sum(lengths)], [lengths[0]], axis=1)
    alone = [run(model, document, permutation_key=KEY).logits for document in documents]

    segment_ids = jnp.array([[1] * 5 + [2] * 6 + [0] * 2])
    positions = jnp.array([[*range(5), *range(6), 0, 1]])
    packed = run(
        model,
        tokens[:1],
        segment_ids=segment_ids,
        positions=positions,
        permutation_key=KEY,
    ).logits
    expected = np.concatenate(alone, axis=1)
    np.testing.assert_allclose(
        packed[:, : sum(lengths)], expected, atol=1e-5 * np.abs(expected).max()
    )
    assert np.isfinite(packed).all()


def test_examples_keep_their_permutations_in_any_order(make_model, run, tokens):
    model = make_model(permutation_scope='example')
    ids = jnp.array([7, 11, 2, 3])
    logits = run(model, tokens, permutation_key=KEY, example_ids=ids).logits
    order = jnp.array([2, 0, 3, 1])
    moved = run(model, tokens[order], permutation_key=KEY, example_ids=ids[order]).logits
    np.testing.assert_allclose(moved, logits[order], atol=1e-5)
    renamed = run(model, tokens, permutation_key=KEY, example_ids=ids + 1).logits
    assert np.abs(logits - renamed).max() > 1e-2


def test_bfloat16_computes_in_bfloat16_and_gives_float32(make_model, run, tokens):
    exact = run(make_model(), tokens, permutation_key=KEY).logits
    graph, state = nnx.split(make_model(compute_dtype='bfloat16'))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_logits(state):
        logits = nnx.merge(graph, state)(tokens, permutation_key=KEY).logits
        return jnp.mean(jnp.sin(logits)), logits

    gradient, logits = gradient_and_logits(state)
    assert logits.dtype == jnp.float32
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 0 < error < 3e-2
    assert all(g.dtype == jnp.float32 and np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_remat_changes_no_gradient(make_model, tokens):
    gradients = {}
    for policy in ('none', 'full', 'dots'):
        loss, state = _loss(make_model(remat=policy), tokens)
        gradients[policy] = jax.jit(jax.grad(loss))(state)
    for policy in ('full', 'dots'):
        jax.tree.map(_assert_close, gradients[policy], gradients['none'])


def test_unknown_tokens_are_loud(make_model, run):
    assert np.isnan(run(make_model(('full',)), jnp.array([[0, 32]])).logits).any()


@pytest.mark.parametrize(
    ('inputs', 'message'),
    [
        ({'positions': jnp.zeros((4, 12), int)}, r'positions.*\(4, 13\).*\(4, 12\)'),
        ({'segment_ids': jnp.zeros(13, int)}, r'segment_ids.*\(4, 13\).*\(13,\)'),
        ({'permutation_key': jax.random.PRNGKey(0)}, 'typed key'),
        ({'permutation_key': jax.random.split(KEY, 2)}, r'single typed key.*\(2,\)'),
        ({'permutation_key': KEY}, r'needs example_ids of shape \(4,\)'),
    ],
)
def test_bad_inputs_are_named(make_model, tokens, inputs, message):
    model = make_model(permutation_scope='example')
    with pytest.raises(ValueError, match=message):
        model(tokens, **inputs)
    with pytest.raises(ValueError, match='whole numbers'):
        model(tokens.astype(jnp.float32))


def _mixed(make_model, **changes):
    """Three layers: stochastic, a window, full."""
    exceptions = {
        '1': {'attention': ('sliding_window',), 'attention_options': {'sliding_window': OWN}},
        '2:': {'attention': ('full',), 'attention_options': {'full': REFERENCE}},
    }
    return make_model(('stochastic',), num_layers=3, layer_attention=exceptions, **changes)


REFERENCE = {'implementation': 'reference'}
OWN = {'window': 4} | REFERENCE


@pytest.mark.slow
def test_layers_with_patterns_of_their_own_equal_an_unrolled_loop(make_model, run, tokens):
    model = _mixed(make_model)

    def attend(query, key, value, layer, memory):
        pattern = model.config.layer_patterns[layer]
        ((name, options),) = pattern.paths
        permutation_key = jax.random.fold_in(jax.random.fold_in(KEY, layer), 0)
        context = AttentionContext(key=permutation_key, layer=layer)
        return (get_attention(name).function(query, key, value, context, **options),), memory

    with jax.disable_jit():
        x, _, _ = run_layers(model, tokens, attend)
        expected = unembed(model, x)
    found = run(model, tokens, permutation_key=KEY).logits
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_another_configuration_shares_the_parameters(make_model, run, tokens):
    model = make_model(('full',))
    sparse = model.with_config(
        attention=('sliding_window',), attention_options={'sliding_window': OWN}
    )
    assert sparse.embedding[...] is model.embedding[...]
    assert model.config.attention == ('full',)
    expected = make_model(('sliding_window',))
    np.testing.assert_array_equal(run(sparse, tokens).logits, run(expected, tokens).logits)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'hidden_size': 3}, r"\['hidden_size'\] cannot be changed.*attention"),
        ({'attention': ('full', 'full')}, 'has 2 paths, but the model has gates for 1'),
        ({'attention': ('stochastic',)}, 'window'),
    ],
)
def test_a_configuration_for_other_parameters_is_refused(make_model, changes, message):
    with pytest.raises(ValueError, match=message):
        make_model(('full',)).with_config(**changes)
