"""Whether a published model fits a described card: prefill and decoding compiled without weights.

Shapes: T tokens of the one prompt, N tokens that the cache can hold.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sa_jax.evaluation.patterns import matched_pattern
from sa_jax.models import decoding
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import abstract_decoder, separate_layers
from sa_jax.models.pretrained.hf_config import decoder_config
from sa_jax.report.gpu_compile import Card, Compiled, Program

PATTERNS = ('full', 'swa', 'sa', 'moba')
DTYPE = 'bfloat16'
_USABLE = 0.99  # of a card's memory; the rest is the driver's and the libraries'
_GIB = 2**30

Build = tuple[Callable, tuple[Any, ...]]


def read_config(path: str) -> DecoderConfig:
    """The decoder of a checkpoint's config.json, computing in bfloat16."""
    return decoder_config(json.loads(Path(path).read_text()), compute_dtype=DTYPE)


def parameter_bytes(config: DecoderConfig) -> int:
    """The size of all parameters."""
    leaves = jax.tree.leaves(nnx.state(abstract_decoder(config, DTYPE)))
    return sum(x.size * x.dtype.itemsize for x in leaves)


def cache_bytes(config: DecoderConfig, length: int) -> int:
    """The size of the keys and values of N = `length` tokens."""
    rows = 2 * config.num_layers * length
    return rows * config.num_kv_heads * config.head_dim * jnp.dtype(DTYPE).itemsize


def build_prefill(
    model: str, pattern: str, effective_window: int, context: int, new_tokens: int
) -> Build:
    """Builds the reading of a prompt, and its abstract arguments.

    Args:
      model: the checkpoint's config.json.
      pattern: of the prompt's attention, one of `PATTERNS`.
      effective_window: keys that a query sees, for all patterns but 'full'.
      context: T.
      new_tokens: by which N exceeds T.

    Returns:
      (parameters, prompt `[1, T]`, its length `[1]`, permutation key) -> (logits, cache), as in
      `sa_jax.models.generation`, and the arguments as `jax.ShapeDtypeStruct`s.
    """
    decoder = abstract_decoder(read_config(model), DTYPE).with_config(attention=('full',))
    reader = decoder.with_config(**matched_pattern(pattern, effective_window))
    graph, parameters = nnx.split(decoder)

    def prefill(parameters, prompt, lengths, key):
        return decoding.start(
            nnx.merge(graph, parameters),
            prompt,
            length=context + new_tokens,
            lengths=lengths,
            prefill=nnx.merge(nnx.graphdef(reader), parameters),
            permutation_key=key,
        )

    prompt = jax.ShapeDtypeStruct((1, context), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return prefill, (parameters, prompt, lengths, key)


def build_decode(model: str, context: int, new_tokens: int, separate: bool = False) -> Build:
    """Builds a step behind a prompt, with attention to the whole cache, and its arguments.

    Args:
      model: the checkpoint's config.json.
      context: T.
      new_tokens: by which N exceeds T.
      separate: whether the layers are separate, as `sa_jax.models.generation` has them for many
        tokens: a copy of them all, but for experts.

    Returns:
      (parameters, layers, cache, token `[1]`) -> (logits, cache), and the arguments as
      `jax.ShapeDtypeStruct`s. The cache may be donated.
    """
    decoder = abstract_decoder(read_config(model), DTYPE).with_config(attention=('full',))
    graph, parameters = nnx.split(decoder)

    def decode(parameters, layers, cache, token):
        return decoding.step(nnx.merge(graph, parameters), cache, token, layers=layers)

    prefill, arguments = build_prefill(model, 'full', context, context, new_tokens)
    _, cache = jax.eval_shape(prefill, *arguments)
    layers = None
    if separate:
        layers = jax.eval_shape(lambda x: separate_layers(nnx.merge(graph, x)), parameters)
    return decode, (parameters, layers, cache, jax.ShapeDtypeStruct((1,), jnp.int32))


def programs(
    models: Sequence[str],
    patterns: Sequence[str] = PATTERNS,
    *,
    effective_window: int,
    context: int,
    new_tokens: int,
) -> list[Program]:
    """The prefill of every model under every pattern, and steps of its decoding.

    Args:
      models: files, the checkpoints' config.json.
      patterns: some of `PATTERNS`.
      effective_window: keys that a query sees, for all patterns but 'full'.
      context: T.
      new_tokens: by which N exceeds T.
    """
    sizes = {'context': context, 'new_tokens': new_tokens}
    found = []
    for model in models:
        options = {'model': model} | sizes
        found += [
            Program(
                f'prefill {pattern}',
                f'{__name__}:build_prefill',
                options | {'pattern': pattern, 'effective_window': effective_window},
            )
            for pattern in patterns
        ]
        found += [
            Program(
                name, f'{__name__}:build_decode', options | {'separate': separate}, donated=(2,)
            )
            for name, separate in (('decode', False), ('decode many tokens', True))
        ]
    return found


def usable_bytes(card: Card) -> int:
    """The memory of a card that a program may take."""
    return int(_USABLE * card.memory)


def describe(program: Program, compiled: Compiled, card: Card) -> dict[str, Any]:
    """What a program takes, in bytes, and whether the card has it."""
    options = program.options
    config = read_config(options['model'])
    described = {
        'model': Path(options['model']).stem,
        'program': program.name,
        'parameters': parameter_bytes(config),
        'cache': cache_bytes(config, options['context'] + options['new_tokens']),
        'error': compiled.error,
    }
    if compiled.error is None:
        described |= {
            'temporaries': compiled.temporaries,
            'peak': compiled.peak,
            'fits': compiled.peak <= usable_bytes(card),
        }
    return described


def table(rows: Sequence[dict[str, Any]], card: Card) -> str:
    """Rows of `describe` as Markdown."""
    usable = usable_bytes(card)
    lines = [
        f'GiB. {card.kind}: {card.memory / _GIB:.1f}, of which a program may take '
        f'{usable / _GIB:.1f}.',
        '',
        '| model | program | parameters | cache | temporaries | peak | free |',
        '|---|---|---|---|---|---|---|',
    ]
    for row in rows:
        name = f'| {row["model"]} | {row["program"]} '
        sizes = f'| {row["parameters"] / _GIB:.2f} | {row["cache"] / _GIB:.2f} '
        if row['error']:
            error = ' '.join(row['error'].replace('|', '/').split())
            lines.append(f'{name}{sizes}| not compiled: {error} | | |')
            continue
        free = f'{(usable - row["peak"]) / _GIB:.1f}' if row['fits'] else 'does not fit'
        lines.append(
            f'{name}{sizes}| {row["temporaries"] / _GIB:.2f} | {row["peak"] / _GIB:.2f} | {free} |'
        )
    return '\n'.join(lines) + '\n'
