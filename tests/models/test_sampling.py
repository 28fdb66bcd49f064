"""Sampling keeps the prompt and follows the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.models.sampling import sample

KEY = jax.random.key(0)


@pytest.fixture
def prompt():
    return jnp.array([[1, 2, 3], [4, 5, 6]])


def test_keeps_the_prompt_and_is_determined_by_the_key(make_model, prompt):
    model = make_model()
    first = sample(model, prompt, 6, key=KEY)
    assert first.shape == (2, 9)
    np.testing.assert_array_equal(first[:, :3], prompt)
    assert ((first >= 0) & (first < 32)).all()
    np.testing.assert_array_equal(first, sample(model, prompt, 6, key=jax.random.key(0)))
    assert (first != sample(model, prompt, 6, key=jax.random.key(1))).any()


@pytest.mark.parametrize(
    ('attention', 'options'),
    [
        (('stochastic', 'sliding_window'), {'temperature': 0}),
        # MoBA has no cache: every step runs the whole sequence.
        (('stochastic', 'moba'), {'top_k': 1}),
    ],
)
def test_greedy_takes_the_likeliest_token_each_time(make_model, run, prompt, attention, options):
    model, length = make_model(attention), 12
    tokens = sample(
        model, prompt, 4, key=KEY, permutation_key=jax.random.key(5), length=length, **options
    )
    buffer = jnp.zeros((2, length), jnp.int32).at[:, :7].set(tokens)
    logits = run(model, buffer, permutation_key=jax.random.key(5)).logits
    np.testing.assert_array_equal(tokens[:, 3:], logits[:, 2:6].argmax(-1))


def test_draws_follow_the_distribution(make_model, run):
    model = make_model(('full',), vocab_size=4)
    prompts = jnp.zeros((4000, 1), jnp.int32)
    drawn = sample(model, prompts, 1, key=KEY, temperature=2.0)[:, 1]
    expected = jax.nn.softmax(run(model, prompts[:1]).logits[0, 0] / 2.0)
    frequencies = np.bincount(drawn, minlength=4) / len(prompts)
    np.testing.assert_allclose(frequencies, expected, atol=0.03)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'steps': -1}, 'steps must be at least 0'),
        ({'length': 4}, 'length = 4 is too short.*at least 5'),
        ({'temperature': -1.0}, 'temperature'),
        ({'top_k': 33}, 'between 1 and the vocabulary, 32'),
        ({'tokens': jnp.zeros((2, 0), int)}, 'at least one token'),
    ],
)
def test_bad_arguments_are_named(make_model, prompt, arguments, message):
    defaults = {'tokens': prompt, 'steps': 2, 'key': KEY}
    with pytest.raises(ValueError, match=message):
        sample(make_model(), **(defaults | arguments))
