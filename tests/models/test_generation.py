"""Generation against whole forward passes: any mix of lengths, any pattern for the prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sa_jax.models import decoding, generation
from sa_jax.models.buckets import bucket
from sa_jax.models.generation import continuation_text, generate
from sa_jax.tokenization.tokenizers import ByteTokenizer, Tokenizer

KEY = jax.random.key(5)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [30, 2, 2, 4, 8, 16, 3, 5, 7, 1, 0, 11]]


def _greedy(run, model, prompt, steps, **inputs):
    """The oracle: a forward pass without a cache for every token."""
    tokens = list(prompt)
    for _ in range(steps):
        # One length, so that one program is compiled; causality hides the rest.
        row = jnp.array([tokens + [0] * (24 - len(tokens))])
        logits = run(model, row, **inputs).logits[0, len(tokens) - 1]
        tokens.append(int(jnp.argmax(logits)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize('prefill', [None, 'full'])
def test_full_attention_equals_forward_passes(make_model, run, prefill):
    model = make_model(('full',))
    found = generate(model, PROMPTS, max_new_tokens=8, prefill_attention=prefill)
    assert found == [_greedy(run, model, prompt, 8) for prompt in PROMPTS]


def test_a_window_of_the_model_s_own_holds_for_new_tokens_too(make_model, run):
    model = make_model(('sliding_window',))
    found = generate(model, PROMPTS, max_new_tokens=8)
    assert found == [_greedy(run, model, prompt, 8) for prompt in PROMPTS]


def test_permutations_of_the_model_s_own_are_those_of_the_trained_length(make_model, run):
    model = make_model(('stochastic',))
    found = generate(model, PROMPTS, max_new_tokens=8, permutation_key=KEY, length=24)
    assert found == [_greedy(run, model, prompt, 8, permutation_key=KEY) for prompt in PROMPTS]


def test_permutations_of_the_model_s_own_need_the_trained_length(make_model):
    model = make_model(('stochastic',))
    with pytest.raises(ValueError, match='give their length'):
        generate(model, PROMPTS, max_new_tokens=8, permutation_key=KEY)
    found = generate(model, PROMPTS, max_new_tokens=8, permutation_key=KEY, length=24)
    alone = [
        generate(model, [prompt], max_new_tokens=8, permutation_key=KEY, length=24)[0]
        for prompt in PROMPTS
    ]
    assert found == alone


def test_many_tokens_are_decoded_from_separate_layers(make_model, monkeypatch):
    model = make_model(('full',))
    expected = generate(model, PROMPTS, max_new_tokens=8)
    step, given = decoding.step, []

    def recorded(model, cache, tokens, *, layers):
        given.append(layers)
        return step(model, cache, tokens, layers=layers)

    monkeypatch.setattr(decoding, 'step', recorded)
    monkeypatch.setattr(generation, '_MANY_TOKENS', 8)
    assert generate(model, PROMPTS, max_new_tokens=8) == expected
    assert all(layers is not None for layers in given)


@pytest.mark.parametrize('name', ['stochastic', 'sliding_window', 'moba'])
def test_prompts_read_under_a_pattern_get_what_they_get_alone(make_model, name):
    options = {
        'stochastic': {'window': 5},
        'sliding_window': {'window': 3},
        'moba': {'block_size': 2, 'top_k': 2},
    }[name]
    prefill = {'attention': (name,), 'attention_options': {name: options}}
    model = make_model(('full',))
    inputs = {'max_new_tokens': 8, 'prefill_attention': prefill, 'permutation_key': KEY}
    together = generate(model, PROMPTS, **inputs)
    assert together == [generate(model, [prompt], **inputs)[0] for prompt in PROMPTS]
    # The first new token is the pattern's, and the pattern matters.
    sparse = model.with_config(**prefill)
    for prompt, found in zip(PROMPTS, together, strict=True):
        logits = sparse(jnp.array([prompt]), permutation_key=KEY).logits[0, -1]
        assert found[0] == int(jnp.argmax(logits))
    assert together != generate(model, PROMPTS, max_new_tokens=8)


def test_new_tokens_attend_to_the_whole_cache(make_model, run):
    model = make_model(('full',), num_layers=1)
    prefill = {
        'attention': ('sliding_window',),
        'attention_options': {'sliding_window': {'window': 1}},
    }
    first, second = generate(model, [PROMPTS[0]], max_new_tokens=2, prefill_attention=prefill)[0]
    # With one layer the keys and values of the prompt don't depend on how it attended.
    assert [second] == _greedy(run, model, [*PROMPTS[0], first], 1)


def test_layers_may_have_patterns_of_their_own(make_model):
    model = make_model(('full',), num_layers=3)
    sparse = {
        'attention': ('sliding_window',),
        'attention_options': {'sliding_window': {'window': 2}},
    }
    first = sparse | {'layer_attention': {'0': {'attention': ('full',)}}}
    every = first | {'layer_attention': {':': {'attention': ('full',)}}}
    full, some, none, all_layers = (
        generate(model, PROMPTS, max_new_tokens=8, prefill_attention=prefill)
        for prefill in ('full', first, sparse, every)
    )
    assert all_layers == full
    assert some != full
    assert some != none


def test_top_p_keeps_the_likeliest_and_draws_like_the_softmax(make_model):
    model = make_model(('full',))
    greedy = generate(model, PROMPTS, max_new_tokens=4)
    narrow = generate(model, PROMPTS, max_new_tokens=4, temperature=1.0, top_p=1e-6, key=KEY)
    assert narrow == greedy
    logits = model(jnp.array([PROMPTS[0]])).logits[0, -1]
    drawn = generate(
        model, [PROMPTS[0]] * 512, max_new_tokens=1, temperature=1.0, top_p=0.7, key=KEY
    )
    counts = np.bincount([tokens[0] for tokens in drawn], minlength=32) / 512
    order = np.argsort(-logits)
    probabilities = np.asarray(jax.nn.softmax(logits))[order]
    kept = order[: np.searchsorted(np.cumsum(probabilities), 0.7) + 1]
    assert counts[kept].sum() == 1
    expected = np.zeros(32)
    expected[kept] = np.asarray(jax.nn.softmax(logits[kept]))
    assert np.abs(counts - expected).sum() < 0.2  # about 5 standard errors


def test_stops_at_tokens_and_texts(make_model):
    model = make_model(('full',), vocab_size=257)
    tokenizer = ByteTokenizer()
    (whole,) = generate(model, [[104, 105]], max_new_tokens=12)
    # Stop at the first token that hasn't come before, and don't keep it.
    place = next(i for i in range(1, 12) if whole[i] not in whole[:i])
    found = generate(model, [[104, 105]], max_new_tokens=12, stop_tokens=[whole[place]])
    assert found == [whole[:place]]
    (text,) = generate(model, ['hi'], max_new_tokens=12, tokenizer=tokenizer, stop_tokens=[])
    assert text == tokenizer.decode(whole)
    stop = text[2:4]
    (found,) = generate(
        model, ['hi'], max_new_tokens=12, tokenizer=tokenizer, stop=[stop], stop_tokens=[]
    )
    assert found == text[: text.find(stop)]


class Spaced(Tokenizer):
    """Bytes, but of a text's first token the space is left out, as SentencePiece does."""

    bos_id = eos_id = 256

    def encode(self, text):
        return list(f' {text}'.encode())

    def decode(self, ids):
        return ByteTokenizer().decode(ids).removeprefix(' ')


def test_a_continuation_keeps_the_space_it_begins_with(make_model):
    tokenizer = Spaced()
    assert continuation_text(tokenizer, tokenizer.encode('def f():'), b'  return') == '  return'
    assert continuation_text(tokenizer, tokenizer.encode('a'), b' b, c', stop=[',', 'b, ']) == ' '
    model = make_model(('full',), vocab_size=257)
    ids = tokenizer.encode('hi')
    (tokens,) = generate(model, [ids], max_new_tokens=6)
    settings = {'max_new_tokens': 6, 'tokenizer': tokenizer, 'stop_tokens': []}
    (text,) = generate(model, ['hi'], **settings)
    assert text == tokenizer.decode([*ids, *tokens])[2:]


def test_stop_texts_end_lists_of_tokens_with_the_one_that_completes_them(make_model):
    model = make_model(('full',), vocab_size=257)
    settings = {'max_new_tokens': 12, 'tokenizer': ByteTokenizer(), 'stop_tokens': []}
    (text,) = generate(model, ['hi'], **settings)
    (whole,) = generate(model, [[104, 105]], **settings)
    stop = text[2:4]
    (found,) = generate(model, [[104, 105]], stop=[stop], **settings)
    ends = [n for n in range(13) if stop in ByteTokenizer().decode(whole[:n])]
    assert found == whole[: ends[0]]


@pytest.mark.parametrize('drawn', [{'temperature': 1.0, 'key': KEY}, {'permutation_key': KEY}])
def test_what_is_drawn_depends_on_the_number_of_a_prompt_only(make_model, drawn):
    model = make_model(('full',), permutation_scope='example')
    prefill = {'attention': ('stochastic',), 'attention_options': {'stochastic': {'window': 5}}}
    settings = {'max_new_tokens': 8, 'prefill_attention': prefill, 'permutation_key': KEY} | drawn
    prompts = [PROMPTS[2]] * 4
    together = generate(model, prompts, **settings)
    assert len(set(map(tuple, together))) > 1
    for first, last in ((0, 1), (1, 4)):
        numbers = range(first, last)
        found = generate(model, prompts[first:last], example_ids=numbers, **settings)
        assert found == together[first:last]
    with pytest.raises(ValueError, match='1 example_ids for 4 prompts'):
        generate(model, prompts, example_ids=[0], **settings)


def test_few_programs_for_many_lengths(make_model):
    assert sorted({bucket(n) for n in range(1, 400)}) == [
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
    ]
    assert [bucket(n, smallest=1) for n in (1, 2, 3, 4, 5, 7)] == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize(
    ('prompts', 'changes', 'message'),
    [
        ([[1], []], {}, 'Prompt 1 is empty'),
        (['text'], {}, 'need a tokenizer'),
        ([[1]], {'max_new_tokens': -1}, 'max_new_tokens.*-1'),
        ([[1]], {'temperature': -1.0}, 'temperature.*-1'),
        ([[1]], {'temperature': 1.0}, 'needs a key'),
        ([[1]], {'top_p': 0.0}, 'top_p.*0.0'),
        ([[1]], {'stop': ['a']}, 'need a tokenizer'),
        ([[1]], {'stop': 'a'}, 'list of texts'),
        ([[1] * 20], {'length': 21}, 'use at least 22'),
        ([[1]], {'prefill_attention': 'stochastik'}, 'stochastic'),
        ([[1]], {'example_ids': [1, 2]}, '2 example_ids for 1'),
        ([[1]], {'prefill_attention': {'hidden_size': 3}}, 'hidden_size'),
    ],
)
def test_bad_arguments_are_named(make_model, prompts, changes, message):
    with pytest.raises(ValueError, match=message):
        generate(make_model(('full',)), prompts, **({'max_new_tokens': 2} | changes))
