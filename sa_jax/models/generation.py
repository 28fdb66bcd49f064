"""Continuing prompts of different lengths with a decoder."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sa_jax.models import decoding
from sa_jax.models.buckets import bucket
from sa_jax.models.decoder import Decoder, separate_layers
from sa_jax.tokenization.tokenizers import Tokenizer

Prompt = str | Sequence[int]

_MANY_TOKENS = 512  # for which decoding pays for a longer compilation


def generate(
    model: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    tokenizer: Tokenizer | None = None,
    prefill_attention: str | Mapping[str, Any] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Collection[str] = (),
    stop_tokens: Collection[int] | None = None,
    key: Array | None = None,
    permutation_key: Array | None = None,
    example_ids: Sequence[int] | None = None,
    length: int | None = None,
) -> list[str] | list[list[int]]:
    """Continues prompts, each until it stops.

    With `prefill_attention` the prompt is read under that pattern and each new token attends to
    the whole cache: the paper's protocol for models that were trained with full attention. What a
    prompt gets doesn't depend on the others, but for what is drawn for its number. Lengths are
    padded to a few sizes, so that few programs are compiled.

    Args:
      model: The decoder.
      prompts: Texts, or lists of token ids; none may be empty.
      max_new_tokens: Tokens to add to each prompt at most.
      tokenizer: Needed for texts and for `stop`.
      prefill_attention: The pattern of the prompts: the name of an attention function, or fields
        of the configuration as `Decoder.with_config` takes them, such as `{'attention':
        ('stochastic',), 'attention_options': {'stochastic': {'window': 63}}}`. By default the
        model's own pattern, for prompts and new tokens alike.
      temperature: Divides the logits; 0 takes the likeliest token.
      top_p: Draw among the likeliest tokens that together have this probability (Holtzman et al.,
        arXiv 1904.09751).
      stop: Texts that end a continuation: a text ends before them, a list of token ids with the
        token that completes one.
      stop_tokens: Tokens that do; by default the tokenizer's `eos_id`, if there is a tokenizer.
      key: A typed key for the draws; needed if `temperature` isn't 0.
      permutation_key: A typed key for the permutations; needed by paths that permute.
      example_ids: Numbers of the prompts, which decide what is drawn for each; by default its place
        in the list.
      length: For a model whose own paths permute, the length of the sequences that it was trained
        on, in tokens; not needed for others.

    Returns:
      The continuations: texts for texts (what the tokenizer's text of the prompt is continued by),
        token ids for token ids.

    Raises:
      ValueError: An argument is out of range, a prompt is empty, or something is missing.
    """
    tokens = [_encode(prompt, tokenizer, place) for place, prompt in enumerate(prompts)]
    _check(max_new_tokens, temperature, top_p, stop, key, tokenizer)
    example_ids = list(range(len(tokens)) if example_ids is None else example_ids)
    if len(example_ids) != len(tokens):
        raise ValueError(
            f'{len(example_ids)} example_ids for {len(tokens)} prompts; give one each.'
        )
    if not tokens or not max_new_tokens:
        return ['' if isinstance(prompt, str) else [] for prompt in prompts]
    if stop_tokens is None:
        stop_tokens = () if tokenizer is None else (tokenizer.eos_id,)
    reader, model = _reader_and_decoder(model, prefill_attention)
    if reader is None and length is None and decoding.draws(model.config):
        raise ValueError(
            'The model has paths of its own that permute, over sequences as long as in training: '
            'give their length, or a prefill_attention.'
        )
    needed = max(map(len, tokens)) + max_new_tokens
    if length is not None and length < needed:
        raise ValueError(
            f'length = {length} is too short for a prompt of {needed - max_new_tokens} tokens and '
            f'{max_new_tokens} new ones; use at least {needed}.'
        )
    buffer, lengths = _pad(tokens)
    example_ids = jnp.array(example_ids + [0] * (len(buffer) - len(tokens)), jnp.int32)
    logits, cache = decoding.start(
        model,
        buffer,
        length=length or bucket(buffer.shape[1] + max_new_tokens),
        lengths=lengths,
        prefill=reader,
        permutation_key=permutation_key,
        example_ids=example_ids,
    )
    endings = [_Ending(tokenizer, prompt, stop, stop_tokens) for prompt in tokens]
    draw = functools.partial(
        _draw,
        key=jax.random.key(0) if key is None else key,
        example_ids=example_ids,
        temperature=temperature,
        top_p=top_p,
    )
    layers = separate_layers(model) if max_new_tokens >= _MANY_TOKENS else None
    for step in range(max_new_tokens):
        new = draw(logits, step)
        # The tokens are needed here, to see where to stop.
        for ending, token in zip(endings, np.asarray(new)[: len(tokens)], strict=True):
            ending.add(int(token))
        if step == max_new_tokens - 1 or all(ending.is_reached for ending in endings):
            break
        logits, cache = decoding.step(model, cache, new, layers=layers)
    return [
        ending.text() if isinstance(prompt, str) else ending.tokens
        for ending, prompt in zip(endings, prompts, strict=True)
    ]


def continuation_text(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], stop: Collection[str] = ()
) -> str:
    """The text of new tokens behind those of a prompt, up to the first of the stop texts.

    By themselves the new tokens may stand for another text: of the first token of a text some
    tokenizers leave out the space.
    """
    text = tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]
    return text[: _first(stop, text)]


def _first(stop, text):
    """Where the first of the stop texts begins; None if there is none."""
    found = [place for place in map(text.find, stop) if place >= 0]
    return min(found, default=None)


class _Ending:
    """A continuation, and whether it has come to its end."""

    def __init__(self, tokenizer, prompt, stop, stop_tokens):
        self.tokens = []
        self.is_reached = False
        self._tokenizer, self._prompt = tokenizer, prompt
        self._stop, self._stop_tokens = stop, stop_tokens

    def add(self, token):
        if self.is_reached:
            return
        if token in self._stop_tokens:
            self.is_reached = True
            return
        self.tokens.append(token)
        if self._stop:
            text = continuation_text(self._tokenizer, self._prompt, self.tokens)
            self.is_reached = _first(self._stop, text) is not None

    def text(self):
        return continuation_text(self._tokenizer, self._prompt, self.tokens, self._stop)


@functools.partial(jax.jit, static_argnames=('temperature', 'top_p'))
def _draw(logits, step, *, key, example_ids, temperature, top_p):
    """The next tokens, int32 `[B]`."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        before = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)
        before -= jax.nn.softmax(descending, axis=-1)
        # The likeliest is kept whatever top_p.
        smallest = jnp.where(before < top_p, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, example_ids)
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _reader_and_decoder(model, prefill_attention):
    """The decoder as it reads the prompts, None if as it decodes, and as it decodes."""
    if prefill_attention is None:
        return None, model
    if isinstance(prefill_attention, str):
        prefill_attention = {'attention': (prefill_attention,)}
    return model.with_config(**prefill_attention), model.with_config(attention=('full',))


def _pad(tokens):
    """Prompts in a buffer `[B, S]` of sizes out of a few, and their lengths `[B]`."""
    rows, width = bucket(len(tokens), smallest=1), bucket(max(map(len, tokens)))
    buffer = np.zeros((rows, width), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, prompt in enumerate(tokens):
        buffer[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return jnp.asarray(buffer), jnp.asarray(lengths)


def _encode(prompt, tokenizer, place):
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError('Prompts that are texts need a tokenizer; pass one, or token ids.')
        prompt = tokenizer.encode(prompt)
    if not len(prompt):
        raise ValueError(
            f'Prompt {place} is empty; begin it with the token before a document, such as '
            '[tokenizer.bos_id].'
        )
    return prompt


def _check(max_new_tokens, temperature, top_p, stop, key, tokenizer):
    if max_new_tokens < 0:
        raise ValueError(f'max_new_tokens must be at least 0, got {max_new_tokens}.')
    if temperature < 0:
        raise ValueError(f'temperature must be at least 0, got {temperature}.')
    if not 0 < top_p <= 1:
        raise ValueError(f'top_p must be above 0 and at most 1, got {top_p}.')
    if isinstance(stop, str) or '' in stop:
        raise ValueError(f'stop must be a list of texts, none of them empty, got {stop!r}.')
    if stop and tokenizer is None:
        raise ValueError('Stop texts need a tokenizer; pass one, or stop_tokens.')
    if temperature > 0 and key is None:
        raise ValueError('Drawing tokens needs a key such as jax.random.key(0); or temperature=0.')
