"""Decoding token by token gives the logits of the whole sequence, at a cost that doesn't grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sa_jax.models.decoder import separate_layers
from sa_jax.models.decoding import _step, can_decode, start, step

KEY = jax.random.key(3)
BOTH = ('stochastic', 'sliding_window')


@pytest.mark.parametrize(
    ('attention', 'changes'),
    [
        (BOTH, {'qk_norm': True, 'tie_embeddings': False, 'permutation_scope': 'head'}),
        pytest.param(
            BOTH, {'gate': 'channel', 'permutation_scope': 'example'}, marks=pytest.mark.slow
        ),
        pytest.param(('stochastic',), {}, marks=pytest.mark.slow),
        (('full', 'sliding_window'), {'remat': 'full'}),
        (
            ('stochastic',),
            {
                'num_layers': 3,
                'layer_attention': {
                    '1': {'attention': ('full',)},
                    '2': {
                        'attention': ('sliding_window',),
                        'attention_options': {'sliding_window': {'window': 2}},
                    },
                },
            },
        ),
        (('full',), {'num_experts': 5, 'num_experts_per_token': 2}),
    ],
)
def test_logits_are_those_of_the_whole_sequence(make_model, run, tokens, attention, changes):
    model, length, prompt_length = make_model(attention, **changes), tokens.shape[1], 5
    inputs = {'permutation_key': KEY}
    if model.config.permutation_scope == 'example':
        inputs['example_ids'] = jnp.array([7, 11, 2, 3])
    expected = run(model, tokens, **inputs).logits
    logits, cache = start(model, tokens[:, :prompt_length], length=length, **inputs)
    found, compiled = [logits], []
    for token in range(prompt_length, length):
        logits, cache = step(model, cache, tokens[:, token])
        found.append(logits)
        compiled.append(_step._cache_size())
    assert max(compiled) == compiled[0], 'a token after the first was compiled for'
    np.testing.assert_allclose(
        jnp.stack(found, axis=1), expected[:, prompt_length - 1 :], atol=1e-4, rtol=0
    )
    # The permutations are those of as many tokens as the cache can hold, and of this key.
    if 'stochastic' in attention:
        inputs['permutation_key'] = jax.random.key(4)
        other, _ = start(model, tokens, length=length, **inputs)
        assert np.abs(other - found[-1]).max() > 1e-2


@pytest.mark.parametrize('experts', [{}, {'num_experts': 5, 'num_experts_per_token': 2}])
def test_separate_layers_give_the_same(make_model, tokens, experts):
    model = make_model(('stochastic',), **experts)
    layers = separate_layers(model)
    held = sum(x.nbytes for x in jax.tree.leaves(layers))
    of_experts = 3 * 5 * model.config.hidden_size * model.config.intermediate_size * 4
    assert held == sum(x.nbytes for x in jax.tree.leaves(nnx.state(model.layers))) - (
        model.config.num_layers * of_experts if experts else 0
    )
    logits = []
    for given in (None, layers):
        _, cache = start(model, tokens[:, :5], length=13, permutation_key=KEY)
        _, cache = step(model, cache, tokens[:, 5], layers=given)
        logits.append(step(model, cache, tokens[:, 6], layers=given)[0])
    np.testing.assert_allclose(*logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize('lengths', [[0, 5, 5, 5], [5, 6, 5, 5]])
def test_lengths_out_of_range_are_named(make_model, tokens, lengths):
    with pytest.raises(ValueError, match=r'numbers from \d to \d; expected 1 to 5'):
        start(make_model(('full',)), tokens[:, :5], length=13, lengths=jnp.array(lengths))


def test_bfloat16_is_kept_in_the_cache(make_model, run, tokens):
    model = make_model(compute_dtype='bfloat16')
    expected = run(model, tokens, permutation_key=KEY).logits[:, -1]
    _, cache = start(model, tokens[:, :-1], length=tokens.shape[1], permutation_key=KEY)
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    logits, _ = step(model, cache, tokens[:, -1])
    assert logits.dtype == jnp.float32
    assert np.linalg.norm(logits - expected) < 3e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ('attention', 'scope'), [(BOTH, 'layer'), (BOTH, 'head'), (('full',), 'layer')]
)
def test_a_step_needs_the_same_memory_however_long_the_cache(make_model, attention, scope):
    model = make_model(attention, permutation_scope=scope)
    costs = []
    for length in (1024, 8192):
        prompt = jnp.zeros((2, 1), jnp.int32)
        _, cache = jax.eval_shape(
            lambda prompt, length=length: start(model, prompt, length=length, permutation_key=KEY),
            prompt,
        )
        compiled = _step.lower(*nnx.split(model), None, cache, prompt[:, 0]).compile()
        costs.append((compiled.memory_analysis(), compiled.cost_analysis()['flops']))
        cache_bytes = sum(x.size * x.dtype.itemsize for x in (cache.keys, cache.values))
        # Updated where it is, not copied.
        assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    (short, short_flops), (long, long_flops) = costs
    assert long.temp_size_in_bytes == short.temp_size_in_bytes
    # What a loop over blocks of full attention costs isn't known when compiling.
    if attention == BOTH:
        assert long_flops == short_flops


def test_a_full_cache_is_an_error_or_nan(make_model, tokens):
    model = make_model()
    _, cache = start(model, tokens, length=tokens.shape[1], permutation_key=KEY)
    logits, _ = jax.jit(lambda cache: step(model, cache, tokens[:, 0]))(cache)
    assert np.isnan(logits).all()
    with pytest.raises(ValueError, match='cache is full: it holds 13 tokens'):
        step(model, cache, tokens[:, 0])


def test_bad_inputs_are_named(make_model, tokens):
    model = make_model()
    with pytest.raises(ValueError, match=r'has 13 tokens and the cache length = 12'):
        start(model, tokens, length=12, permutation_key=KEY)
    with pytest.raises(ValueError, match='without a key'):
        start(model, tokens, length=13)
    with pytest.raises(ValueError, match='needs example_ids'):
        start(make_model(permutation_scope='example'), tokens, length=13, permutation_key=KEY)
    unsupported = make_model(('moba', 'stochastic'))
    assert not can_decode(unsupported.config)
    with pytest.raises(ValueError, match="path 'moba' cannot be decoded"):
        start(unsupported, tokens, length=13, permutation_key=KEY)
    _, cache = start(model, tokens[:, :1], length=2, permutation_key=KEY)
    with pytest.raises(ValueError, match=r'one per example, \(4,\)'):
        step(model, cache, tokens[:2, 0])
