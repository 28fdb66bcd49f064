"""The n-gram baselines against brute force."""

import collections
import math

import numpy as np
import pytest

from sa_jax.evaluation.ngram import NgramCounts

VOCABULARY = 6


def batches(seed, count):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        shape = (2, 7)
        yield {
            # Token 5 is never trained on, as a context or otherwise.
            'inputs': draw.integers(0, 5 + seed, shape),
            'targets': draw.integers(0, 5 + seed, shape),
            'weights': draw.integers(0, 2, shape).astype(np.float32),
        }


def pairs(batches):
    for batch in batches:
        for row in zip(
            *(batch[name].flat for name in ('inputs', 'targets', 'weights')), strict=True
        ):
            if row[2]:
                yield int(row[0]), int(row[1])


@pytest.fixture
def models():
    counts = NgramCounts(batches(0, 5), VOCABULARY)
    training = list(pairs(batches(0, 5)))
    tokens = collections.Counter(target for _, target in training)
    bigrams = collections.Counter(training)

    def unigram(token):
        return (tokens[token] + 1) / (len(training) + VOCABULARY)

    def bigram(context, token):
        seen = sum(n for (c, _), n in bigrams.items() if c == context)
        different = sum(1 for c, _ in bigrams if c == context)
        if not seen:
            return unigram(token)
        # Witten and Bell: (c(context, token) + t(context) P(token)) / (c(context) + t(context))
        return (bigrams[context, token] + different * unigram(token)) / (seen + different)

    return counts, unigram, bigram


def test_probabilities_equal_brute_force_and_sum_to_one(models):
    counts, unigram, bigram = models
    tokens = np.arange(VOCABULARY)
    np.testing.assert_allclose(counts.unigram(tokens), [unigram(t) for t in tokens], rtol=1e-12)
    for context in tokens:
        probabilities = counts.bigram(np.full(VOCABULARY, context), tokens)
        np.testing.assert_allclose(probabilities, [bigram(context, t) for t in tokens], rtol=1e-12)
        assert probabilities.sum() == pytest.approx(1)


def test_losses_equal_brute_force(models):
    counts, unigram, bigram = models
    held_out = list(pairs(batches(1, 3)))
    assert 5 in {context for context, _ in held_out}
    losses = counts.losses(batches(1, 3))
    assert losses['unigram'] == pytest.approx(
        -sum(math.log(unigram(t)) for _, t in held_out) / len(held_out)
    )
    assert losses['bigram'] == pytest.approx(
        -sum(math.log(bigram(*pair)) for pair in held_out) / len(held_out)
    )


def test_nothing_to_count_is_an_error():
    empty = {name: np.zeros((1, 2), np.int32) for name in ('inputs', 'targets', 'weights')}
    with pytest.raises(ValueError, match='No training tokens'):
        NgramCounts([empty], VOCABULARY)
