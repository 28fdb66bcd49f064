"""What a finished run leaves behind: plots, baselines, a sample, result.json, a summary."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from sa_jax.evaluation.ngram import NgramCounts
from sa_jax.models.sampling import sample
from sa_jax.training.configuration import to_json
from sa_jax.training.metrics import read_metrics
from sa_jax.training.plots import plot_gates, plot_loss
from sa_jax.training.results import write_result
from sa_jax.training.trainer import Run

# The baselines count this much of the training split at most, in tokens (about 2 GB of memory).
_COUNTED_TOKENS = 50_000_000
_SAMPLED_TOKENS = 120
_TEMPERATURE = 0.8
_TOP_K = 40


@dataclasses.dataclass(frozen=True)
class Summary:
    """The end of a run: its figures, a sampled paragraph, and where everything is."""

    figures: dict
    text: str
    files: dict[str, Path]

    def __str__(self) -> str:
        held_out, baselines = self.figures['held_out'], self.figures['baselines']
        spread = f' +- {held_out["perplexity_std"]:.2f}' if held_out['draws'] > 1 else ''
        rows = [('this model', f'{held_out["perplexity"]:.2f}{spread}')]
        rows += [(name, f'{values["perplexity"]:.2f}') for name, values in baselines.items()]
        lines = [f'A paragraph sampled from the model:\n\n{self.text}\n']
        lines += [f'Held-out perplexity per token, {held_out["tokens"]:,} tokens:']
        lines += [f'  {name:<12}{value}' for name, value in rows]
        lines += [f'Bits per byte: {held_out["bits_per_byte"]:.3f}']
        lines += [f'{name}: {path}' for name, path in self.files.items()]
        return '\n'.join(lines)


def finish(run: Run, workdir: Path) -> Summary | None:
    """Draws loss.png and gates.png, samples a paragraph and writes result.json.

    Args:
      run: a run whose steps are all done.
      workdir: its directory.

    Returns:
      The summary to print; None on all processes but the first.
    """
    params = _on_one_device(run.state.params)
    # A run that was finished before may be asked for other draws or batches now.
    held_out = None if run.evaluated else _evaluate(run)
    if jax.process_index() > 0:
        return None
    records = read_metrics(workdir / 'metrics.jsonl')
    if not records:
        raise ValueError(
            f'{workdir / "metrics.jsonl"} is missing or empty, though the run is finished: '
            'restore it, or train in another --workdir.'
        )
    losses = count_baselines(run)
    plot_loss(records, workdir / 'loss.png', losses)
    files = {'Loss curve': workdir / 'loss.png'}
    if 'gates' in records[-1]:
        plot_gates(records, workdir / 'gates.png')
        files['Gates'] = workdir / 'gates.png'
    rates = [record['tokens_per_s'] for record in records]
    figures = {
        'steps': records[-1]['step'],
        'parameters': sum(x.size for x in jax.tree.leaves(params)),
        'training_loss': records[-1]['loss'],
        'held_out': held_out or records[-1]['evaluation'],
        'baselines': {
            name: {'loss': loss, 'perplexity': math.exp(loss)} for name, loss in losses.items()
        },
        'tokens_per_s': {'median': float(np.median(rates)), 'std': float(np.std(rates))},
    } | timing(records)
    text = sample_paragraph(run, params)
    config = to_json(run.program.config)
    write_result(
        workdir / 'result.json',
        config=config,
        figures=figures | {'sample': text},
        seeds={'run': run.program.config.seed, 'evaluation_draws': 0},
    )
    files |= {
        'Metrics': workdir / 'metrics.jsonl',
        'Result': workdir / 'result.json',
        'Checkpoint': workdir / 'checkpoints' / run.checkpoint.name,
    }
    return Summary(figures, text, files)


def timing(records: Sequence[dict]) -> dict:
    """Where the time of a run went.

    Args:
      records: its metrics.

    Returns:
      JSON: step_seconds, the median of the records' medians and the most of any step; input_wait,
      the share of the time at most that devices waited for batches, the median; save_seconds, the
      most that a checkpoint kept steps waiting, None for the one at the end. Empty if no record
      tells, as those of versions before 'step_seconds' don't.
    """
    records = [record for record in records if 'step_seconds' in record]
    if not records:
        return {}
    steps = [record['step_seconds'] for record in records]
    return {
        'step_seconds': {
            'median': float(np.median([x['median'] for x in steps])),
            'most': max(x['most'] for x in steps),
        },
        'input_wait': float(np.median([record['input_wait'] for record in records])),
        'save_seconds': max(
            (x['save_seconds'] for x in records if 'save_seconds' in x), default=None
        ),
    }


def _evaluate(run: Run) -> dict[str, float]:
    return run.program.evaluate(
        run.state,
        lambda: run.inputs.held_out,
        token_bytes=run.inputs.tokenizer.token_bytes,
        draws=run.program.config.evaluation.permutation_draws,
    )


def count_baselines(run: Run) -> dict[str, float]:
    """Returns the held-out loss, nats per token, of the n-gram models on the same tokens."""
    counts = NgramCounts(run.inputs.counted(_COUNTED_TOKENS), run.inputs.tokenizer.vocab_size)
    return counts.losses(run.inputs.held_out)


def sample_paragraph(run: Run, params: dict) -> str:
    """Continues the document separator into a paragraph, always the same for one model."""
    tokenizer, length = run.inputs.tokenizer, run.program.config.data.sequence_length
    tokens = sample(
        nnx.merge(run.program.graph, params),
        np.array([[tokenizer.bos_id]], np.int32),
        min(_SAMPLED_TOKENS, length - 1),
        key=jax.random.key(run.program.config.seed),
        temperature=_TEMPERATURE,
        top_k=min(_TOP_K, run.program.model_config.vocab_size),
        length=length,
    )
    return tokenizer.decode(np.asarray(tokens[0, 1:]).tolist())


def _on_one_device(params: dict) -> dict:
    """Copies sharded parameters to this process' first device."""
    host = multihost_utils.process_allgather(params, tiled=True)
    return jax.device_put(host, jax.local_devices()[0])
