"""What layers of a published model attend with: queries, keys and values, for `analysis.mixing`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sa_jax.analysis.mixing import Settings, Source
from sa_jax.attention.registry import AttentionContext
from sa_jax.data.sotu import Sotu
from sa_jax.data.sources import read_text
from sa_jax.models.attending import attend_to_sequence
from sa_jax.models.decoder import run_layers
from sa_jax.models.pretrained import load_pretrained
from sa_jax.tokenization.tokenizers import Tokenizer


def read_model(model: str, text: Path | None, settings: Settings) -> list[Source]:
    """Reads text and returns what some layers attend with.

    Args:
      model: a directory, a GGUF file, or a repository of the hub.
      text: a file; None for the default corpus' held-out speeches.
      settings: how many texts of how many tokens, and which layers.

    Raises:
      ValueError, ImportError: The model can't be loaded, a layer doesn't exist, or there
        isn't enough text.
    """
    decoder, tokenizer, context_length = load_pretrained(model, dtype='float32')
    count = decoder.config.num_layers
    layers = settings.layers or tuple(sorted({0, count // 2, count - 1}))
    for layer in layers:
        if not 0 <= layer < count:
            raise ValueError(f'layer {layer} of a model of {count}; expected 0 to {count - 1}')
    if tokenizer is None:
        raise ValueError(f'{model} has no tokenizer; add its tokenizer.json')
    if settings.tokens > context_length:
        raise ValueError(
            f'tokens={settings.tokens}, but the model was made for {context_length} at most'
        )
    tokens = _read_tokens(tokenizer, text, settings)
    captured = _capture(*nnx.split(decoder), jnp.asarray(tokens), layers)
    return [
        Source(f'layer {layer}', *(x[place] for x in captured))
        for place, layer in enumerate(layers)
    ]


def _read_tokens(tokenizer: Tokenizer, text: Path | None, settings: Settings) -> np.ndarray:
    """Real text as `[texts, tokens]`: consecutive pieces of a file, or the beginning of speeches.

    Raises:
      ValueError: There isn't enough text, or it can't be read.
      ImportError: There is no default corpus.
    """
    first = [tokenizer.bos_id] if tokenizer.adds_bos else []
    size = settings.tokens - len(first)

    def pieces() -> Iterator[list[int]]:
        if text is None:
            for path in Sotu.find(None)[1]['validation']:
                yield tokenizer.encode(' '.join(read_text(path).split()))[:size]
            return
        ids = tokenizer.encode(read_text(text))
        for start in range(0, len(ids), size):
            yield ids[start : start + size]

    found = [first + ids for ids in pieces() if len(ids) == size]
    if len(found) < settings.texts:
        raise ValueError(
            f'{text or "the default corpus"} has {len(found)} texts of {settings.tokens} tokens, '
            f'but texts={settings.texts}; ask for fewer or shorter ones'
        )
    return np.array(found[: settings.texts], np.int32)


@functools.partial(jax.jit, static_argnames=('graph', 'layers'))
def _capture(graph, state, tokens, layers):
    """Queries, keys and values of some layers, stacked along `[layers]`."""
    model = nnx.merge(graph, state)
    config = model.config
    batch, length = tokens.shape
    # Layers that are not asked for are written behind the end, that is, dropped.
    place = np.full(config.num_layers, len(layers))
    place[list(layers)] = np.arange(len(layers))

    def attend(query, key, value, layer, memory):
        heads = attend_to_sequence(
            query,
            key,
            value,
            config=config,
            context=AttentionContext(),
            layer=layer,
            example_ids=None,
            mesh=None,
        )
        row = jnp.asarray(place)[layer]
        found = (query, key, value)
        return heads, [
            x.at[row].set(new, mode='drop') for x, new in zip(memory, found, strict=True)
        ]

    nothing = [
        jnp.zeros((len(layers), batch, length, heads, config.head_dim))
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    return run_layers(model, tokens, attend, nothing)[1]
