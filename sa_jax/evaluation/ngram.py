"""Unigram and bigram baselines: how far counting gets on the same tokens."""

from collections.abc import Iterable

import numpy as np


class NgramCounts:
    """Counts of tokens and of adjacent pairs, taken from batches of training text.

    The unigram model is smoothed by adding one to every count. The bigram model is interpolated
    with it by Witten and Bell's rule: a context seen c times with t different continuations
    gives the unigram model the share t / (c + t), so that it trusts itself the more the better
    it knows the context, and no parameter is left to tune.

    Args:
      batches: dicts with inputs, targets and weights [B, T]; a pair is an input and its target.
      vocab_size: the number of different tokens.

    Raises:
      ValueError: if the batches hold no weighted token.
    """

    def __init__(self, batches: Iterable[dict], vocab_size: int):
        self.vocab_size = vocab_size
        kept = [_weighted_pairs(batch) for batch in batches]
        if not any(len(target) for _, target in kept):
            raise ValueError('No training tokens to count; expected at least one weighted token.')
        contexts, targets = (np.concatenate(tokens) for tokens in zip(*kept, strict=True))
        self._unigrams = np.bincount(targets, minlength=vocab_size)
        self._pairs, self._pair_counts = np.unique(
            contexts * vocab_size + targets, return_counts=True
        )
        self._context_counts = np.bincount(contexts, minlength=vocab_size)
        self._continuations = np.bincount(self._pairs // vocab_size, minlength=vocab_size)

    def unigram(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the unigram probability of each token."""
        return (self._unigrams[tokens] + 1) / (self._unigrams.sum() + self.vocab_size)

    def bigram(self, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the interpolated probability of each token after its context."""
        codes = contexts.astype(np.int64) * self.vocab_size + tokens
        index = np.minimum(np.searchsorted(self._pairs, codes), len(self._pairs) - 1)
        counts = np.where(self._pairs[index] == codes, self._pair_counts[index], 0)
        seen, different = self._context_counts[contexts], self._continuations[contexts]
        unigram = self.unigram(tokens)
        # A context never seen leaves everything to the unigram model.
        share = np.where(seen > 0, different / np.maximum(seen + different, 1), 1.0)
        return (1 - share) * counts / np.maximum(seen, 1) + share * unigram

    def losses(self, batches: Iterable[dict]) -> dict[str, float]:
        """Returns the mean loss, nats per token, of both models on held-out batches."""
        totals, tokens = np.zeros(2), 0
        for context, target in map(_weighted_pairs, batches):
            totals -= [
                np.log(self.unigram(target)).sum(),
                np.log(self.bigram(context, target)).sum(),
            ]
            tokens += len(target)
        return dict(zip(('unigram', 'bigram'), (totals / tokens).tolist(), strict=True))


def _weighted_pairs(batch: dict) -> tuple[np.ndarray, np.ndarray]:
    keep = np.asarray(batch['weights']) > 0
    return batch['inputs'][keep].astype(np.int64), batch['targets'][keep].astype(np.int64)
