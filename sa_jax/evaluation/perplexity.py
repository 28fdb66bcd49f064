"""Perplexity of held-out text, per token, and bits per byte."""

import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

# Held-out text is always read under the same permutations: draw d folds d into this key.
_DRAWS_SEED = 0


def token_losses(logits: Array, targets: Array) -> Array:
    """Returns the negative log probability of each target.

    Args:
      logits: [B, T, V].
      targets: [B, T], whole numbers below V.

    Returns:
      [B, T] float32, in nats.
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def row_losses(params: dict, batch: dict[str, Array], key: Array, *, forward: Callable) -> Array:
    """Returns the summed loss of each row's weighted tokens.

    Args:
      params: the model's parameters.
      batch: inputs, targets, segment_ids, positions and weights [B, T], example_ids [B].
      key: the typed permutation key of the draw.
      forward: maps (params, batch, key) to logits [B, T, V] and gates.

    Returns:
      [B] float32, in nats.
    """
    logits, _ = forward(params, batch, key)
    # A row of padding may hold anything, so its losses are dropped rather than multiplied by 0.
    losses = jnp.where(batch['weights'] > 0, token_losses(logits, batch['targets']), 0.0)
    return jnp.sum(losses * batch['weights'], axis=-1)


def draw_keys(draws: int) -> list[Array]:
    """Returns the permutation key of each draw, the same ones in every evaluation.

    Raises:
      ValueError: if there are no draws.
    """
    if draws < 1:
        raise ValueError(f'evaluation.permutation_draws is {draws}; expected 1 or more.')
    return [jax.random.fold_in(jax.random.key(_DRAWS_SEED), draw) for draw in range(draws)]


def evaluate(
    row_losses_of: Callable[[dict, Array], np.ndarray],
    batches: Callable[[], Iterable[dict]],
    *,
    token_bytes: np.ndarray,
    keys: Sequence[Array],
) -> dict[str, float]:
    """Evaluates a model on held-out batches under several draws of its permutations.

    A model whose losses are the same under the second draw uses no permutations: its further
    draws are not computed, being the same.

    Args:
      row_losses_of: maps (batch, permutation key) to the summed loss [B] of each row, in nats.
      batches: returns the batches, host arrays, anew at each call.
      token_bytes: the number of bytes each token stands for [V].
      keys: the permutation keys to average over, of `draw_keys`.

    Returns:
      The mean over the draws of loss (nats per token), perplexity and bits_per_byte, the sample
      standard deviation of the first two as loss_std and perplexity_std, and the counts tokens,
      bytes and draws.

    Raises:
      ValueError: if there are no tokens.
    """
    totals, previous = [], None
    for draw, key in enumerate(keys):
        rows, tokens, num_bytes = [], 0, 0
        for batch in batches():
            rows.append(np.asarray(row_losses_of(batch, key), np.float64))
            counted = batch['weights'] > 0
            tokens += int(counted.sum())
            num_bytes += int(token_bytes[batch['targets'][counted]].sum())
        if not tokens:
            raise ValueError('There is no held-out token to evaluate; check the split.')
        rows = np.concatenate(rows)
        totals.append(rows.sum())
        if draw == 1 and np.array_equal(rows, previous):
            totals = totals[:1] * len(keys)
            break
        previous = rows
    losses = np.array(totals) / tokens
    perplexities = np.exp(losses)
    spread = {'ddof': 1} if len(keys) > 1 else {}
    return {
        'loss': float(losses.mean()),
        'loss_std': float(losses.std(**spread)),
        'perplexity': float(perplexities.mean()),
        'perplexity_std': float(perplexities.std(**spread)),
        'bits_per_byte': float(np.mean(totals) / math.log(2) / num_bytes),
        'tokens': tokens,
        'bytes': num_bytes,
        'draws': len(keys),
    }
