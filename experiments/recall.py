"""Recall against distance: what an attention pattern reaches, learnt by a small decoder.

    python -m experiments.recall --workdir=runs/recall
    python -m experiments.recall --workdir=runs/recall_quick --quick

A row is noise with pairs of a key and a value in it; wherever their key stands later, the value is
to be predicted (multi-query associative recall). One decoder per pattern and seed learns it. The
workdir receives the accuracy by distance, beside the share of pairs of tokens so far apart that the
same masks connect through all layers: result.json, recall.md, recall.png and .svg. The same command
goes on behind the last decoder that was finished.
"""

import json
from pathlib import Path

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict
from tqdm import tqdm

from sa_jax.analysis.adjacency import layer_permutation, layer_runs
from sa_jax.analysis.coverage import receptive_fields, share_by_distance
from sa_jax.data.recall import Recall
from sa_jax.models.config import DecoderConfig
from sa_jax.report import recall_report
from sa_jax.training.files import write_atomically
from sa_jax.training.recall import accuracy_by_distance, learn
from sa_jax.training.results import write_result

_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives the files.', required=True)
_QUICK = flags.DEFINE_boolean('quick', False, 'A few steps: whether it runs, not what is learnt.')
_VARIANTS = flags.DEFINE_list('variants', ['full', 'swa', 'sa', 'sa_swa'], 'Patterns that learn.')
_TOKENS = flags.DEFINE_integer('tokens', 128, 'Of a row.')
_PAIRS = flags.DEFINE_integer('pairs', 2, 'Of a row.')
_WINDOW = flags.DEFINE_integer('window', 9, 'Keys that a window spans, the query itself included.')
_LAYERS = flags.DEFINE_integer('layers', 4, 'Of the decoders.')
_STEPS = flags.DEFINE_integer('steps', 2000, 'Optimizer steps of each.')
_ROWS = flags.DEFINE_integer('rows', 32, 'Of a step.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Decoders of each pattern.')
_DRAWS = flags.DEFINE_integer('draws', 8, 'Permutations over which accuracy is averaged.')

_PATHS = {
    'full': ('full',),
    'swa': ('sliding_window',),
    'sa': ('stochastic',),
    'sa_swa': ('stochastic', 'sliding_window'),
}
_WALKED = 64  # draws of all permutations whose reach is averaged


def optimizer(steps: int) -> ConfigDict:
    """As a run's, with what suits rows that never come twice."""
    return ConfigDict(
        {
            'learning_rate': 3e-3,
            'schedule': 'cosine',
            'warmup_steps': min(200, steps // 4),
            'final_fraction': 0.05,
            'beta1': 0.9,
            'beta2': 0.95,
            'eps': 1e-8,
            'weight_decay': 0.01,
            'clip_norm': 1.0,
        }
    )


def decoder(variant: str, vocab_size: int) -> DecoderConfig:
    """A decoder of about 0.2M parameters."""
    paths = _PATHS[variant]
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        num_layers=_LAYERS.value,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=128,
        tie_embeddings=False,
        attention=paths,
        attention_options={name: {'window': _WINDOW.value} for name in paths if name != 'full'},
    )


def reach(variant: str, edges: list[int]) -> list[float]:
    """The share of earlier tokens that all layers connect, by distance."""
    if variant == 'full':
        return [1.0] * (len(edges) - 1)
    n, queries = _TOKENS.value, np.arange(_TOKENS.value)
    found = []
    for seed in range(1 if variant == 'swa' else _WALKED):
        key = jax.random.key(seed)
        layers = (
            layer_runs(
                variant,
                n,
                window=_WINDOW.value,
                causal=True,
                permutation=None if variant == 'swa' else layer_permutation(key, layer, n),
            )
            for layer in range(_LAYERS.value)
        )
        *_, bits = receptive_fields(layers, queries)
        found.append(share_by_distance(bits, queries, edges))
    return np.mean(found, axis=0).tolist()


def bins(tokens: int, window: int, layers: int) -> list[int]:
    """Edges of bins of distances, of which one is the first that SWA doesn't reach."""
    beyond = layers * (window - 1) + 1
    edges = {*range(1, tokens, max(1, window - 1)), tokens}
    return sorted(edges | ({beyond} if beyond < tokens else set()))


def measure(variant: str, seed: int, recall: Recall, steps: int, draws: int) -> dict:
    """Trains a decoder; its accuracy by distance, JSON."""
    with tqdm(total=steps, desc=f'{variant}, seed {seed}', disable=None) as bar:

        def on_step(loss):
            bar.set_postfix(loss=f'{loss:.3f}', refresh=False)
            bar.update()

        model = learn(
            decoder(variant, recall.vocab_size),
            recall,
            optimizer(steps),
            steps=steps,
            rows=_ROWS.value,
            seed=seed,
            on_step=on_step,
        )
    edges = bins(_TOKENS.value, _WINDOW.value, _LAYERS.value)
    accuracy, count = accuracy_by_distance(model, recall, edges, batches=8, draws=draws, seed=seed)
    return {
        'variant': variant,
        'seed': seed,
        'accuracy': accuracy.tolist(),
        'queries': count.tolist(),
    }


def measured(path: Path, settings: dict) -> dict | None:
    """What an earlier call has measured of a case.

    Raises:
      ValueError: under other settings.
    """
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    if found['settings'] != settings:
        raise ValueError(
            f'{path} has the settings {found["settings"]}, not {settings}; choose another --workdir'
        )
    return found['case']


def main(argv: list[str]) -> None:
    """Trains, measures, and writes the files."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    steps, draws = (20, 1) if _QUICK.value else (_STEPS.value, _DRAWS.value)
    settings = {'tokens': _TOKENS.value, 'pairs': _PAIRS.value, 'window': _WINDOW.value}
    settings |= {'layers': _LAYERS.value, 'steps': steps, 'rows': _ROWS.value, 'draws': draws}
    workdir = Path(_WORKDIR.value).expanduser()
    cases = []
    try:
        if unknown := [x for x in _VARIANTS.value if x not in _PATHS]:
            raise ValueError(f'--variants={",".join(unknown)}; expected of {", ".join(_PATHS)}')
        recall = Recall(length=_TOKENS.value, pairs=_PAIRS.value)
        (workdir / 'cases').mkdir(parents=True, exist_ok=True)
        for seed in range(_SEEDS.value):
            for variant in _VARIANTS.value:
                path = workdir / 'cases' / f'{variant}-{seed}.json'
                case = measured(path, settings)
                if case is None:
                    case = measure(variant, seed, recall, steps, draws)
                    write_atomically(path, json.dumps({'settings': settings, 'case': case}))
                cases.append(case)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    edges = bins(_TOKENS.value, _WINDOW.value, _LAYERS.value)
    figures = {
        'edges': edges,
        'chance': 1 / recall.num_values,
        'reach': {variant: reach(variant, edges) for variant in _VARIANTS.value},
        'swa_reach': _LAYERS.value * (_WINDOW.value - 1),
        'cases': cases,
    }
    write_result(
        workdir / 'result.json',
        config=settings,
        figures=figures,
        seeds={'decoders': list(range(_SEEDS.value))},
    )
    result = json.loads((workdir / 'result.json').read_text())
    table = recall_report.table(result)
    (workdir / 'recall.md').write_text(table)
    recall_report.plot(result, workdir / 'recall')
    print(table)


if __name__ == '__main__':
    app.run(main)
