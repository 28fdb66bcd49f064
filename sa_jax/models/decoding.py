"""Decoding with a cache: each new token attends, in every layer, to what its paths let it see.

A decoder trained on sequences of N tokens keeps their pattern. The permutations over all N tokens
are drawn beforehand, and token t reads the at most w tokens that share its window and precede it:
the logits are those of a forward pass over all N tokens, and a step costs O(w), however long the
context.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from sa_jax.attention.decoding import decode_attention
from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.models.attending import attend_to_sequence, by_pattern, path_keys
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder, check_inputs, run_layers, unembed

# Of a path's options, those of the softmax rather than of the pattern.
_LOGITS_OPTIONS = ('scale', 'logits_soft_cap', 'sink_logits')


class Cache(NamedTuple):
    """What the next token needs of those before it.

    Attributes:
      keys: `[B, L·N, K, H]`, of N tokens at most. Layer l has the rows from l·N on: rows of any
        layer are read without cutting it out.
      values: `[B, L·N, K, H]`.
      prepared: For each pattern of the layers and each of its paths, what it drew over N tokens,
        stacked along `[L]`.
      count: int32, the tokens so far: `[]`, or `[B]` where the prompts differ in length.
    """

    keys: Array
    values: Array
    prepared: tuple[Any, ...]
    count: Array


def can_decode(config: DecoderConfig) -> bool:
    """Whether all attention paths of a decoder can be decoded with a cache."""
    return all(get_attention(name).decoding is not None for name in _names(config))


def draws(config: DecoderConfig) -> bool:
    """Whether decoding draws something over the whole sequence beforehand, as permutations are."""
    cache = jax.eval_shape(
        lambda: empty_cache(
            config,
            1,
            length=1,
            permutation_key=jax.random.key(0),
            example_ids=jnp.zeros(1, jnp.int32),
        )
    )
    return bool(jax.tree.leaves(cache.prepared))


def empty_cache(
    config: DecoderConfig,
    batch: int,
    *,
    length: int,
    permutation_key: Array | None = None,
    example_ids: Array | None = None,
) -> Cache:
    """A cache without tokens, its permutations drawn.

    Args:
      config: The architecture.
      batch: B, the number of examples.
      length: N, the tokens that it can hold.
      permutation_key: A typed key, as for the decoder; needed by paths that permute.
      example_ids: `[B]`; needed (only) if `permutation_scope` is 'example'.

    Returns:
      The cache, in the decoder's `compute_dtype`.

    Raises:
      ValueError: A path can't be decoded, or the key is missing.
    """
    _check_paths(config)

    def prepare(layer):
        keys = path_keys(config, permutation_key, layer, example_ids, batch=batch)
        return tuple(
            tuple(
                decoding.prepare(AttentionContext(key=key, layer=layer), length, **options)
                for (decoding, options), key in zip(_paths(pattern), keys, strict=True)
            )
            for pattern in config.patterns
        )

    shape = (batch, config.num_layers * length, config.num_kv_heads, config.head_dim)
    # Two arrays: each is donated by itself.
    keys, values = (jnp.zeros(shape, config.compute_dtype) for _ in range(2))
    prepared = jax.lax.map(prepare, jnp.arange(config.num_layers))
    return Cache(keys, values, prepared, jnp.int32(0))


def start(
    model: Decoder,
    prompt: Array,
    *,
    length: int,
    lengths: Array | None = None,
    prefill: Decoder | None = None,
    permutation_key: Array | None = None,
    example_ids: Array | None = None,
) -> tuple[Array, Cache]:
    """Runs the prompts and keeps their keys and values.

    Args:
      model: The decoder, as it decodes.
      prompt: `[B, S]`, S >= 1.
      length: N, the tokens that the cache can hold, prompt included. For a path that permutes, the
        length of the sequences that the decoder was trained on: the permutations are those of N
        tokens.
      lengths: int32 `[B]`, the tokens of each prompt, at least 1; what follows them in a row is
        ignored. By default S.
      prefill: The decoder as it reads the prompts (`Decoder.with_config`), each a sequence of its
        own. By default they are the beginning of the sequence that is decoded.
      permutation_key: A typed key, as for the decoder; needed by paths that permute.
      example_ids: `[B]`; needed (only) if `permutation_scope` is 'example'.

    Returns:
      The logits `[B, V]` of the token behind each prompt, float32, and the cache.

    Raises:
      ValueError: The prompt is empty or longer than the cache, a path can't be decoded, or the
        inputs don't fit the decoder.
    """
    reader = model if prefill is None else prefill
    for config in (reader.config, model.config):
        check_inputs(config, prompt, None, None, permutation_key, example_ids, None)
    if not 1 <= prompt.shape[1] <= length:
        raise ValueError(
            f'The prompt has {prompt.shape[1]} tokens and the cache length = {length}; expected at '
            'least one token, and no more than the cache can hold.'
        )
    if lengths is not None and lengths.shape != prompt.shape[:1]:
        raise ValueError(
            f'lengths has shape {lengths.shape}; expected one per prompt, {prompt.shape[:1]}.'
        )
    if lengths is not None and not isinstance(lengths, jax.core.Tracer):
        least, most = int(lengths.min()), int(lengths.max())
        if least < 1 or most > prompt.shape[1]:
            raise ValueError(
                f'lengths has numbers from {least} to {most}; expected 1 to {prompt.shape[1]}, the '
                'tokens of a prompt.'
            )
    graph, state = nnx.split(reader)
    config = None if prefill is None else model.config
    return _start(graph, state, config, length, prompt, lengths, permutation_key, example_ids)


def read_prompts(
    model: Decoder,
    prompt: Array,
    cache: Cache,
    *,
    segment_ids: Array | None = None,
    permutation_key: Array | None = None,
    example_ids: Array | None = None,
) -> tuple[Array, Cache]:
    """Runs `prompt` `[B, S]` and puts its keys and values at the beginning of the cache.

    Returns:
      The residual stream `[B, S, D]` behind the layers, and the cache, its count as before.
    """
    config = model.config
    length = _length(cache, config)
    context = AttentionContext(segment_ids=segment_ids, key=permutation_key)

    def attend(query, key, value, layer, memory):
        heads = attend_to_sequence(
            query,
            key,
            value,
            config=config,
            context=context,
            layer=layer,
            example_ids=example_ids,
            mesh=None,
        )
        return heads, _write(memory, (key, value), layer * length)

    x, (keys, values), _ = run_layers(model, prompt, attend, (cache.keys, cache.values))
    return x, cache._replace(keys=keys, values=values)


def step(
    model: Decoder,
    cache: Cache,
    tokens: Array,
    *,
    layers: Sequence[nnx.State] | None = None,
) -> tuple[Array, Cache]:
    """Appends one token to every example.

    Compiled once for all steps. Inside a caller's `jax.jit` a full cache gives NaN instead of an
    error.

    Args:
      model: The decoder.
      cache: Of `start` or the step before; donated, hence of no use afterwards.
      tokens: `[B]`, whole numbers below V; others give NaN.
      layers: Of `separate_layers`, for many steps.

    Returns:
      The logits `[B, V]` of the next token, float32, and the cache.

    Raises:
      ValueError: The cache is full, or there isn't one token per example.
    """
    batch, length = len(cache.keys), _length(cache, model.config)
    if tokens.shape != (batch,):
        raise ValueError(f'tokens has shape {tokens.shape}; expected one per example, ({batch},).')
    if not isinstance(cache.count, jax.core.Tracer) and cache.count.max() >= length:
        raise ValueError(
            f'The cache is full: it holds {cache.count.max()} tokens of at most length = {length}; '
            'start with a greater length, or anew with the last tokens as the prompt.'
        )
    return _step(*nnx.split(model), layers, cache, tokens)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _start(graph, state, config, length, prompt, lengths, permutation_key, example_ids):
    """Of a reader; `config` is the decoder's if that is another."""
    reader = nnx.merge(graph, state)
    batch, width = prompt.shape
    cache = empty_cache(
        config or reader.config,
        batch,
        length=length,
        permutation_key=permutation_key,
        example_ids=example_ids,
    )
    count = jnp.asarray(width if lengths is None else lengths, jnp.int32)
    segment_ids = None
    if config is not None:
        segment_ids = (jnp.arange(width) < count.reshape(-1, 1)).astype(jnp.int32)
        segment_ids = jnp.broadcast_to(segment_ids, prompt.shape)
    elif jax.tree.leaves(cache.prepared):
        # The permutations are those of the whole sequence, whose rest causality hides.
        prompt = jnp.zeros((batch, length), prompt.dtype).at[:, :width].set(prompt)
    x, cache = read_prompts(
        reader,
        prompt,
        cache,
        segment_ids=segment_ids,
        permutation_key=permutation_key,
        example_ids=example_ids,
    )
    last = jnp.broadcast_to(count - 1, batch)[:, None, None]
    last = jnp.take_along_axis(x, last, axis=1)
    return unembed(reader, last)[:, 0], cache._replace(count=count)


@functools.partial(jax.jit, static_argnames='graph', donate_argnames='cache')
def _step(graph, state, layers, cache, tokens):
    model = nnx.merge(graph, state)
    config, count = model.config, cache.count
    length = _length(cache, config)

    def neighbours(prepared, _):
        return tuple(
            tuple(
                decoding.neighbours and decoding.neighbours(drawn, count, length, **options)
                for (decoding, options), drawn in zip(_paths(pattern), of_pattern, strict=True)
            )
            for pattern, of_pattern in zip(config.patterns, prepared, strict=True)
        )

    # Of all layers at once: cutting a layer out of `prepared` would cost O(N).
    rows = jax.vmap(neighbours)(cache.prepared, jnp.arange(config.num_layers))

    def attend(query, key, value, layer, memory):
        memory = _write(memory, (key, value), layer * length + count)

        def attend_to_rows(pattern):
            of_pattern = rows[config.patterns.index(pattern)]
            return tuple(
                decode_attention(
                    query,
                    *memory,
                    **({'token': count} if path_rows is None else {'neighbours': path_rows[layer]}),
                    offset=layer * length,
                    length=length,
                    **{name: options[name] for name in _LOGITS_OPTIONS if name in options},
                )
                for (_, options), path_rows in zip(_paths(pattern), of_pattern, strict=True)
            )

        return by_pattern(config, layer, attend_to_rows), memory

    positions = jnp.broadcast_to(count.reshape(-1, 1), (len(tokens), 1))
    x, (keys, values), _ = run_layers(
        model,
        tokens[:, None],
        attend,
        (cache.keys, cache.values),
        layers=layers,
        positions=positions,
    )
    logits = jnp.where(count.reshape(-1, 1) < length, unembed(model, x)[:, 0], jnp.nan)
    return logits, Cache(keys, values, cache.prepared, count + 1)


def _write(memory, keys_and_values, row):
    """Puts keys and values `[B, T, K, H]` into the cache's rows from `row` on, a scalar or `[B]`.

    For `[B]`, T is 1.
    """
    if jnp.ndim(row):
        examples = jnp.arange(len(row))
        return tuple(
            x.at[examples, row].set(new[:, 0])
            for x, new in zip(memory, keys_and_values, strict=True)
        )
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(x, new, row, axis=1)
        for x, new in zip(memory, keys_and_values, strict=True)
    )


def _length(cache, config):
    return cache.keys.shape[1] // config.num_layers


def _paths(pattern):
    """How each path is decoded, and its options."""
    return [(get_attention(name).decoding, options) for name, options in pattern.paths]


def _names(config):
    return {name for pattern in config.patterns for name in pattern.attention}


def _check_paths(config):
    for name in _names(config):
        if get_attention(name).decoding is None:
            raise ValueError(
                f'The attention path {name!r} cannot be decoded with a cache; run the whole '
                'sequence for every token (sa_jax.models.sampling.sample does), or register the '
                "path's `decoding`."
            )
