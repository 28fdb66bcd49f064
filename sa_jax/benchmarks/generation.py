"""Reading prompts and decoding, timed beside Hugging Face's transformers on the same file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sa_jax.benchmarks.timing import interleaved
from sa_jax.extras import optional_import
from sa_jax.models import decoding
from sa_jax.models.decoder import Decoder, separate_layers

PHASES = ('prefill', 'decode')
_PAUSE = 0.05  # seconds
_CACHE_BLOCK = 128  # the cache's length is a multiple of it


def measure(
    model: Decoder,
    path: Path,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    on_measured: Callable[[], None] = lambda: None,
) -> list[dict]:
    """Times reading prompts and decoding, both in float32.

    Args:
      model: The decoder, in float32.
      path: Where it came from: a directory or a GGUF file.
      batches: Prompts at a time.
      prompt_tokens: Of each prompt.
      new_tokens: Decoded behind each.
      rounds: Measurements of each time, interleaved.
      on_measured: Called after each measurement.

    Returns:
      A row for each batch and phase: tokens per second of both, medians, and median, least and
      greatest of theirs over ours in seconds, round by round.

    Raises:
      ImportError: torch or transformers is missing.
    """
    theirs = _transformers(path)
    rows = []
    for batch in batches:
        generator = np.random.default_rng(0)
        tokens = generator.integers(0, model.config.vocab_size, (batch, prompt_tokens))
        runs = _runs('ours', *_ours(model, tokens, new_tokens))
        runs |= _runs('transformers', *_theirs(theirs, tokens, new_tokens))
        # Decoding compiles twice: behind a prompt just read, and behind one read before.
        for run in runs.values():
            run(2)
        seconds = interleaved(
            runs, dict.fromkeys(runs, 1), rounds=rounds, pause=_PAUSE, on_measured=on_measured
        )
        for phase, count in zip(PHASES, (prompt_tokens, new_tokens), strict=True):
            ours, other = (np.array(seconds[who, phase]) for who in ('ours', 'transformers'))
            ratios = other / ours
            rows.append(
                {
                    'batch': batch,
                    'phase': phase,
                    'ours_tokens_per_s': float(batch * count / np.median(ours)),
                    'transformers_tokens_per_s': float(batch * count / np.median(other)),
                    'ratio': float(np.median(ratios)),
                    'least_ratio': float(ratios.min()),
                    'greatest_ratio': float(ratios.max()),
                }
            )
    return rows


def table(rows: Sequence[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        '| prompts at a time | phase | tokens/s, ours | transformers | ratio (least … most) |',
        '|---|---|---|---|---|',
    ]
    lines += [
        f'| {x["batch"]} | {x["phase"]} | {x["ours_tokens_per_s"]:.1f} '
        f'| {x["transformers_tokens_per_s"]:.1f} '
        f'| {x["ratio"]:.2f} ({x["least_ratio"]:.2f} … {x["greatest_ratio"]:.2f}) |'
        for x in rows
    ]
    return '\n'.join(lines) + '\n'


def _runs(who, prefill, decode):
    """By (who, phase), functions of the number of calls."""

    def repeat(function):
        def run(calls):
            for _ in range(calls):
                function()

        return run

    return {(who, 'prefill'): repeat(prefill), (who, 'decode'): repeat(decode)}


def _ours(model, tokens, new_tokens):
    """Reading the prompts, and decoding behind them, each a function that waits.

    Decoding as `generate` does it for many tokens.
    """
    prompt = jnp.asarray(tokens)
    length = -(-(prompt.shape[1] + new_tokens) // _CACHE_BLOCK) * _CACHE_BLOCK
    layers = separate_layers(model)
    held = {}

    def prefill():
        held['start'] = jax.block_until_ready(decoding.start(model, prompt, length=length))

    def decode():
        # Each time as many tokens behind the same prompt: only the count is set back. Which tokens
        # they are differs, as a round goes on from the logits of the last one.
        logits, cache = held['start']
        for _ in range(new_tokens):
            last = jnp.argmax(logits, -1)
            logits, cache = decoding.step(model, cache, last, layers=layers)
        jax.block_until_ready(logits)
        held['start'] = logits, cache._replace(count=jnp.int32(prompt.shape[1]))

    return prefill, decode


def _theirs(model, tokens, new_tokens):
    torch = optional_import('torch', 'transformers', 'oracle')
    prompt = torch.from_numpy(tokens)
    held = {}

    @torch.inference_mode()
    def prefill():
        held['start'] = model(prompt, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode():
        output = held['start']
        cache = output.cache
        for _ in range(new_tokens):
            last = output.logits[:, -1:].argmax(-1)
            output = model(last, cache=cache, use_cache=True)
        cache.crop(-new_tokens)
        held['start'] = output

    return prefill, decode


def _transformers(path):
    torch = optional_import('torch', 'transformers', 'oracle')
    transformers = optional_import('transformers', "Hugging Face's models", 'oracle')
    torch.set_num_threads(os.cpu_count())
    name = {'gguf_file': path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **name)
    return model.eval()
