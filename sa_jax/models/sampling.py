"""Continuing a text with a decoder."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from sa_jax.models import decoding
from sa_jax.models.decoder import Decoder


def sample(
    model: Decoder,
    tokens: Array,
    steps: int,
    *,
    key: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    permutation_key: Array | None = None,
    length: int | None = None,
) -> Array:
    """Draws tokens behind a prompt, one at a time.

    A sparse path sees what it saw in training: the permutations are those of a sequence of fixed
    length, held over the steps. Every step appends a token to the cache of `decoding`; for a model
    with a path that has none it runs the whole sequence, whose unwritten tail causality keeps from
    having any effect. Either way there is one compilation for prompts of any length.

    Args:
      model: The decoder.
      tokens: `[B, S]` prompts of one length S >= 1.
      steps: Number of tokens to draw.
      key: A typed key; the same key draws the same tokens.
      temperature: Divides the logits; 0 takes the likeliest token.
      top_k: Draw among the k likeliest tokens only; all by default.
      permutation_key: A typed key for the permutations; by default derived from `key`.
      length: Length of the sequence in tokens, such as the training sequence length; by default
        `S + steps`.

    Returns:
      `[B, S + steps]` int32: the prompts and what was drawn.

    Raises:
      ValueError: An argument is out of range or the buffer too short.
    """
    batch, prompt_length = _check_prompt(tokens)
    total = prompt_length + steps
    length = total if length is None else length
    if steps < 0:
        raise ValueError(f'steps must be at least 0, got {steps}.')
    if length < total:
        raise ValueError(
            f'length = {length} is too short for {prompt_length} prompt tokens and {steps} drawn '
            f'ones; use at least {total}.'
        )
    if temperature < 0:
        raise ValueError(f'temperature must be at least 0, got {temperature}.')
    if top_k is not None and not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(
            f'top_k must be between 1 and the vocabulary, {model.config.vocab_size}; got {top_k}.'
        )
    key, default_permutation_key = jax.random.split(key)
    if permutation_key is None:
        permutation_key = default_permutation_key
    buffer = jnp.zeros((batch, length), jnp.int32).at[:, :prompt_length].set(tokens)
    graph, state = nnx.split(model)
    buffer = _continue(
        graph, state, buffer, prompt_length, total, key, permutation_key, temperature, top_k
    )
    return buffer[:, :total]


def _check_prompt(tokens: Array) -> tuple[int, int]:
    if tokens.ndim != 2 or tokens.shape[1] < 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            'tokens must be whole numbers [B, S] with at least one token per prompt, got '
            f'{tokens.dtype} of shape {tokens.shape}; start from the document separator.'
        )
    return tokens.shape


@functools.partial(jax.jit, static_argnames=('graph', 'temperature', 'top_k'))
def _continue(graph, state, buffer, start, stop, key, permutation_key, temperature, top_k) -> Array:
    model = nnx.merge(graph, state)
    example_ids = jnp.arange(buffer.shape[0])
    cache = None
    if decoding.can_decode(model.config):
        cache = decoding.empty_cache(
            model.config,
            buffer.shape[0],
            length=buffer.shape[1],
            permutation_key=permutation_key,
            example_ids=example_ids,
        )
        _, cache = decoding.read_prompts(
            model, buffer, cache, permutation_key=permutation_key, example_ids=example_ids
        )
        # The last prompt token is decoded once more, so that all draws begin alike.
        cache = cache._replace(count=start - 1)

    def draw(position, buffer_and_cache):
        buffer, cache = buffer_and_cache
        if cache is None:
            output = model(buffer, permutation_key=permutation_key, example_ids=example_ids)
            logits = jax.lax.dynamic_index_in_dim(output.logits, position - 1, 1, keepdims=False)
        else:
            last = jax.lax.dynamic_index_in_dim(buffer, position - 1, 1, keepdims=False)
            logits, cache = decoding.step(model, cache, last)
        if top_k is not None:
            smallest_kept = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < smallest_kept, -jnp.inf, logits)
        if temperature == 0:
            drawn = jnp.argmax(logits, axis=-1)
        else:
            step_key = jax.random.fold_in(key, position)
            drawn = jax.random.categorical(step_key, logits / temperature)
        buffer = buffer.at[:, position].set(drawn.astype(jnp.int32))
        return buffer, cache

    return jax.lax.fori_loop(start, stop, draw, (buffer, cache))[0]
