"""Training steps, timed in turns; transformers' Llama as the peer of full attention."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from sa_jax.benchmarks.timing import interleaved
from sa_jax.extras import optional_import
from sa_jax.models.pretrained import Pretrained, save_pretrained
from sa_jax.models.pretrained.hf_config import config_fields
from sa_jax.report import markdown
from sa_jax.training.inputs import Inputs, load_inputs
from sa_jax.training.program import Program, build_program

PEER = 'transformers'
_PAUSE = 0.05  # seconds
# Of the first loss, the same weights and tokens: beyond it the two don't do the same work.
_TOLERANCE = 1e-4


def measure(
    configs: dict[str, ConfigDict],
    data_dir: Path,
    *,
    peer_of: str | None,
    rounds: int,
    steps: int,
    on_measured: Callable[[], None] = lambda: None,
) -> dict[str, dict]:
    """Times the training steps of configurations, reading of data included.

    Args:
      configs: by name.
      data_dir: keeps corpora and tokenizers.
      peer_of: the name of one with plain full attention in float32, whose model transformers
        trains as well, from the same weights on the same batches; None for no peer.
      rounds: measurements of each.
      steps: of a measurement.
      on_measured: called after each measurement.

    Returns:
      By name, of the peer too: tokens_per_s, the median with least and most, and, with a peer,
      speedup over it, round by round: median, least, most.

    Raises:
      ImportError: torch or transformers is missing.
      ValueError: the two models aren't the same, or a configuration is unfit.
    """
    runs, tokens = {}, {}
    for name, config in configs.items():
        program, inputs = build_program(config), load_inputs(config, data_dir)
        runs[name] = _ours(program, inputs)
        tokens[name] = config.training.batch_size * config.data.sequence_length
        if name == peer_of:
            runs[PEER], tokens[PEER] = _theirs(program, inputs), tokens[name]
    first = {name: run(1) for name, run in runs.items()}  # compiles, or warms up
    if peer_of and abs(first[PEER] / first[peer_of] - 1) > _TOLERANCE:
        raise ValueError(
            f'The first loss of {PEER} is {first[PEER]:.6f}, ours {first[peer_of]:.6f}: they do '
            'not train the same model. Set data.cross_document_attention, which its attention has.'
        )
    seconds = interleaved(
        runs, dict.fromkeys(runs, steps), rounds=rounds, pause=_PAUSE, on_measured=on_measured
    )
    rates = {name: tokens[name] / np.array(x) for name, x in seconds.items()}
    figures = {name: {'tokens_per_s': _spread(x)} for name, x in rates.items()}
    if peer_of:
        for name, x in rates.items():
            figures[name]['speedup'] = _spread(x / rates[PEER])
    return figures


def table(figures: dict[str, dict]) -> str:
    """The figures in Markdown."""
    header = ['training', 'tokens/s', 'least', 'most']
    rows = []
    for name, x in figures.items():
        rows.append([name, *(f'{x["tokens_per_s"][y]:,.0f}' for y in ('median', 'least', 'most'))])
        if PEER in figures:
            ratio = x['speedup']
            rows[-1].append(f'{ratio["median"]:.2f} ({ratio["least"]:.2f} … {ratio["most"]:.2f})')
    if PEER in figures:
        header.append(f'× {PEER} (least … most)')
    return markdown.table(header, *rows) + '\n'


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        'median': float(np.median(values)),
        'least': float(values.min()),
        'most': float(values.max()),
    }


def _ours(program: Program, inputs: Inputs) -> Callable[[int], float]:
    """Runs so many steps and waits; returns the last loss."""
    batches, step = inputs.training_batches(), program.compile_step()
    state = program.init()

    def run(calls: int) -> float:
        nonlocal state
        for _ in range(calls):
            state, metrics = step(state, program.place_batch(next(batches)))
        jax.block_until_ready(state.params)
        return float(metrics['loss'])

    return run


def _theirs(program: Program, inputs: Inputs) -> Callable[[int], float]:
    """The same for transformers' model with the same initial weights, SDPA and AdamW."""
    torch = optional_import('torch', 'transformers', 'oracle')
    torch.set_num_threads(os.cpu_count())
    model = _llama(program, inputs).train()
    options = program.config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    accumulation = program.config.training.gradient_accumulation
    batches = inputs.training_batches()

    def microbatches() -> Iterator[Sequence]:
        batch = next(batches)
        total = float(batch['weights'].sum())
        names = ('inputs', 'targets', 'weights')
        parts = (np.split(batch[name], accumulation) for name in names)
        for tokens, targets, weights in zip(*parts, strict=True):
            yield (
                torch.from_numpy(tokens.astype(np.int64)),
                torch.from_numpy(targets.astype(np.int64)),
                torch.from_numpy(weights.astype(np.float32) / total),
            )

    def run(calls: int) -> float:
        for _ in range(calls):
            loss = 0.0
            for tokens, targets, weights in microbatches():
                logits = model(tokens, use_cache=False).logits
                losses = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), reduction='none'
                )
                share = (losses * weights.flatten()).sum()
                share.backward()
                loss += float(share.detach())
            if options.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return run


def _llama(program: Program, inputs: Inputs):
    transformers = optional_import('transformers', "Hugging Face's models", 'oracle')
    model = nnx.merge(program.graph, program.init().params)
    length = program.config.data.sequence_length
    if 'LlamaForCausalLM' not in config_fields(model.config, length)['architectures']:
        raise ValueError(
            f'model.attention = {model.config.attention} with its options and gates is no Llama; '
            f'{PEER} trains plain full attention only.'
        )
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / 'model'
        save_pretrained(Pretrained(model, inputs.tokenizer, length), exported)
        return transformers.AutoModelForCausalLM.from_pretrained(
            exported, dtype='float32', attn_implementation='sdpa'
        )
