"""Scores against single forward passes without padding."""

import functools
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from sa_jax.evaluation.batches import plan_batches
from sa_jax.evaluation.requests import Request, rolling_requests
from sa_jax.evaluation.scoring import Scorer
from sa_jax.models import decoding
from sa_jax.models.sharding import make_mesh

PATTERNS = ('full', 'sliding_window', 'stochastic', 'moba')


@functools.partial(jax.jit, static_argnames='graph')
def forward(graph, state, tokens, key):
    return nnx.merge(graph, state)(tokens, permutation_key=key).logits


def naive(model, request, draw=0):
    """One request by itself: its log probability and whether it is greedy."""
    key = jax.random.fold_in(jax.random.key(0), draw)
    tokens = np.array([[*request.context, *request.continuation]])
    logits = np.asarray(forward(*nnx.split(model), tokens[:, :-1], key), np.float64)[0]
    logits, targets = logits[len(request.context) - 1 :], np.array(request.continuation)
    chosen = logits[np.arange(len(targets)), targets]
    total = (chosen - np.log(np.exp(logits).sum(-1))).sum()
    return total, bool((logits.argmax(-1) == targets).all())


@pytest.fixture(scope='module')
def requests():
    draw = np.random.default_rng(1)
    sizes = [(1, 1), (20, 1), (10, 4), (1, 20), (20, 1), (13, 8), (11, 3), (12, 2)]
    made = [Request(*(draw.integers(0, 260, size).tolist() for size in pair)) for pair in sizes]
    # The same input tokens behind different last ones, and split elsewhere.
    context, (*first, _) = made[2]
    return [*made, Request(context, [*first, 7]), Request([*context, *first], [7])]


@pytest.mark.parametrize('pattern', PATTERNS)
def test_scores_equal_single_forward_passes_in_any_batches(make_model, requests, pattern):
    model = make_model(pattern)
    scores = {
        rows: Scorer(model, max_length=24, tokens_per_batch=rows * 24).score(
            requests, progress=False
        )
        for rows in (1, 8)
    }
    for index, request in enumerate(requests):
        expected, is_greedy = naive(model, request)
        for score in (scores[1][index], scores[8][index]):
            assert score.log_probability == pytest.approx(expected, abs=1e-4)
            assert score.is_greedy == is_greedy
            assert score.num_scored == len(request.continuation)
            assert score.num_dropped == 0
        assert scores[1][index].log_probability == pytest.approx(
            scores[8][index].log_probability, abs=1e-4
        )


def test_greedy_continuations_are_recognised(make_model):
    model = make_model()
    tokens = [5, 6, 7]
    for _ in range(4):
        padded = np.array([tokens + [0] * (8 - len(tokens))])
        logits = np.asarray(forward(*nnx.split(model), padded, None))[0, len(tokens) - 1]
        tokens.append(int(logits.argmax()))
    greedy, wrong_end, wrong_start = Scorer(model, max_length=24).score(
        [
            Request(tokens[:3], tokens[3:]),
            Request(tokens[:3], [*tokens[3:6], tokens[6] ^ 1]),
            Request(tokens[:3], [tokens[3] ^ 1, *tokens[4:]]),
        ],
        progress=False,
    )
    assert (greedy.is_greedy, wrong_end.is_greedy, wrong_start.is_greedy) == (True, False, False)


@pytest.mark.parametrize('pattern', ['full', 'stochastic'])
def test_decoded_continuations_attend_to_the_whole_cache(make_model, requests, pattern):
    reader, model = make_model(pattern), make_model('full')
    chosen = [requests[i] for i in (2, 2, 5, 1)]
    key = jax.random.fold_in(jax.random.key(0), 0)
    scorer = Scorer(reader, max_length=24, continuation='decode')
    scores = scorer.score(chosen, progress=False)
    for (context, continuation), score in zip(chosen, scores, strict=True):
        # Read the prompt, then token by token.
        logits, cache = decoding.start(
            model,
            np.array([context]),
            length=24,
            prefill=reader,
            permutation_key=key,
        )
        expected = 0.0
        for token in continuation:
            log_probabilities = np.asarray(logits[0], np.float64)
            log_probabilities -= np.log(np.exp(log_probabilities).sum())
            expected += log_probabilities[token]
            logits, cache = decoding.step(model, cache, np.array([token]))
        assert score.log_probability == pytest.approx(expected, abs=1e-4)
    as_one_text = Scorer(reader, max_length=24).score(chosen, progress=False)
    assert as_one_text[3] == scores[3]
    is_same = as_one_text[2].log_probability == pytest.approx(scores[2].log_probability, abs=1e-4)
    assert is_same == (pattern == 'full')


def test_draws_differ_where_the_pattern_permutes(make_model, requests):
    def scores(pattern, draw):
        scorer = Scorer(make_model(pattern), max_length=24, draw=draw)
        return [score.log_probability for score in scorer.score(requests[:5], progress=False)]

    assert scores('stochastic', 0) != scores('stochastic', 1)
    assert scores('stochastic', 1)[2] == pytest.approx(
        naive(make_model('stochastic'), requests[2], draw=1)[0], abs=1e-4
    )
    assert scores('moba', 0) == scores('moba', 1)


def test_permutations_per_example_do_not_depend_on_the_batches(make_model, requests):
    model = make_model('stochastic', permutation_scope='example')
    alone, together = (
        [
            s.log_probability
            for s in Scorer(model, max_length=24, tokens_per_batch=n).score(requests)
        ]
        for n in (1, 4096)
    )
    np.testing.assert_allclose(alone, together, atol=1e-4)


@pytest.mark.parametrize('pattern', ['full', 'stochastic'])
def test_what_is_too_long_loses_its_left(make_model, pattern):
    model = make_model(pattern)
    tokens = np.random.default_rng(2).integers(0, 260, 30).tolist()
    fits, cut, long = Scorer(model, max_length=20).score(
        [
            # 21 tokens, the last of which isn't read.
            Request(tokens[9:25], tokens[25:]),
            Request(tokens[:25], tokens[25:]),
            Request(tokens[:1], tokens[1:]),
        ],
        progress=False,
    )
    assert (fits.num_dropped, cut.num_dropped, long.num_dropped) == (0, 9, 9)
    assert (fits.num_read, cut.num_read, long.num_read) == (20, 20, 20)
    assert (fits.num_scored, cut.num_scored, long.num_scored) == (5, 5, 20)
    assert fits.log_probability == pytest.approx(cut.log_probability, abs=1e-5)
    expected, _ = naive(model, Request(tokens[9:10], tokens[10:]))
    assert long.log_probability == pytest.approx(expected, abs=1e-4)


def test_rolling_windows_are_those_of_the_harness():
    utils = pytest.importorskip('lm_eval.utils')
    for length in (0, 1, 5, 7, 8, 14, 15, 20):
        ids = list(range(100, 100 + length))
        windows = utils.get_rolling_token_windows(ids, prefix_token=3, max_seq_len=7, context_len=1)
        expected = [utils.make_disjoint_window(window) for window in windows]
        found = rolling_requests(ids, prefix=3, max_length=7)
        assert [tuple(request) for request in found] == expected
        assert list(itertools.chain(*(request.continuation for request in found))) == ids


def test_batches_hold_every_text_once_in_few_shapes():
    lengths = np.random.default_rng(3).integers(1, 300, 500).tolist()
    batches = list(plan_batches(lengths, tokens_per_batch=1024, longest=400))
    assert sorted(itertools.chain(*(batch.members for batch in batches))) == list(range(500))
    for batch in batches:
        assert max(lengths[member] for member in batch.members) <= batch.length
        assert len(batch.members) <= batch.rows
        assert batch.rows * batch.length <= 1024
    assert all(len(batch.members) == batch.rows for batch in batches[:-1])
    assert len({(batch.rows, batch.length) for batch in batches}) < 12
    used = sum(batch.rows * batch.length for batch in batches)
    assert used < 1.3 * sum(lengths)


@pytest.mark.parametrize('sizes', [(2, 2, 2), (8, 1, 1)])
def test_devices_share_the_work(make_model, requests, sizes):
    model = make_model('stochastic')
    alone, shared = (
        [s.log_probability for s in Scorer(model, max_length=24, mesh=mesh).score(requests)]
        for mesh in (None, make_mesh(*sizes))
    )
    np.testing.assert_allclose(alone, shared, atol=1e-4)


def test_any_number_of_devices_shares_the_logits(make_model, requests):
    # 128 rows of logits are no multiple of three.
    mesh = make_mesh(3, 1, 1, devices=jax.devices()[:3])
    model = make_model()
    alone, shared = (
        [s.log_probability for s in Scorer(model, max_length=24, mesh=of).score(requests)]
        for of in (None, mesh)
    )
    np.testing.assert_allclose(alone, shared, atol=1e-4)


def test_bad_requests_and_numbers_are_named(make_model):
    scorer = Scorer(make_model(), max_length=8)
    with pytest.raises(ValueError, match='Request 1 has 0 tokens of context'):
        scorer.score([Request([1], [2]), Request([], [2])])
    with pytest.raises(ValueError, match='0 of continuation'):
        scorer.score([Request([1], [])])
    with pytest.raises(FloatingPointError, match='request 1 is no number'):
        scorer.score([Request([1], [2]), Request([999], [2])])
    with pytest.raises(ValueError, match='max_length must be at least 1, got 0'):
        Scorer(make_model(), max_length=0)
    assert scorer.score([]) == []
    with pytest.raises(ValueError, match=r"continuation must be one of .* got 'cache'"):
        Scorer(make_model(), max_length=8, continuation='cache')
    gated = SimpleNamespace(config=SimpleNamespace(attention=('stochastic', 'sliding_window')))
    with pytest.raises(ValueError, match='the model has gates'):
        Scorer(gated, max_length=8, continuation='decode')
