"""Variants of a configuration, several seeds each: trained one after another, scored alike."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from sa_jax.data.speech_tasks import write_held_out_passages
from sa_jax.evaluation import tasks
from sa_jax.evaluation.scoring import Scorer
from sa_jax.models.flops import training_flops_per_token
from sa_jax.training.configuration import differences, to_json
from sa_jax.training.finish import finish
from sa_jax.training.metrics import read_metrics
from sa_jax.training.results import write_result
from sa_jax.training.trainer import Run, train
from sa_jax.untrusted import brief, damage_reported, read_json

# Where distance matters: tokens with three quarters of a row behind them.
_FAR = 0.75
_TOKENS_PER_BATCH = 8192


class Case(NamedTuple):
    """A run: a variant under a seed."""

    group: str
    variant: str
    seed: int


class Comparison:
    """What a configuration file with VARIANTS and SEEDS asks for.

    Args:
      path: the file. `VARIANTS[group][variant]` are what it compares, `SEEDS[group]`, or
        `SEEDS[variant]`, how many seeds, and `get_config(variant)` returns the configuration.
      variants: some of them; None for all.
      seeds: numbers of the seeds; None for those of SEEDS.

    Raises:
      ValueError: if the file has no variants, or not those that are asked for.
    """

    def __init__(
        self, path: Path, variants: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ):
        if not path.is_file():
            raise ValueError(f'{path} does not exist; expected a configuration file with VARIANTS.')
        module = runpy.run_path(str(path))
        if missing := [x for x in ('VARIANTS', 'SEEDS', 'get_config') if x not in module]:
            raise ValueError(f'{path} lacks {", ".join(missing)}: it compares no variants.')
        self._get_config = module['get_config']
        groups = module['VARIANTS']
        known = [variant for group in groups.values() for variant in group]
        if unknown := [x for x in variants or () if x not in known]:
            raise ValueError(
                f'{path} has no variant {", ".join(unknown)}; expected some of {", ".join(known)}.'
            )
        counts = module['SEEDS']
        # All groups' first seeds before anyone's second: figures come early.
        self.cases = [
            Case(group, variant, seed)
            for seed in (range(max(counts.values())) if seeds is None else seeds)
            for group, of_group in groups.items()
            for variant in of_group
            if (variants is None or variant in variants)
            and (seeds is not None or seed < counts.get(variant, counts[group]))
        ]

    def config(self, case: Case) -> ConfigDict:
        """The configuration of a run."""
        config = self._get_config(case.variant)
        config.seed = case.seed
        return config.lock()


def folder(workdir: Path, case: Case) -> Path:
    """Where a run is kept."""
    return workdir / case.variant / f'seed{case.seed}'


def run_all(
    comparison: Comparison,
    workdir: Path,
    data_dir: Path,
    *,
    stop: Any = None,
    on_start: Callable[[Case], None] = lambda case: None,
) -> bool:
    """Trains and scores what isn't finished yet.

    Args:
      comparison: the runs.
      workdir: receives a folder for each.
      data_dir: where built corpora and trained tokenizers are kept.
      stop: an object whose `requested` turns true when training shall save and return.
      on_start: called before each run.

    Returns:
      Whether all are finished.

    Raises:
      ValueError: if a folder holds another run.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    passages = workdir / 'held_out_passages.jsonl'
    write_held_out_passages(passages)
    last_word = tasks.load_task(passages)
    for case in comparison.cases:
        path, config = folder(workdir, case), comparison.config(case)
        if read(path, config) is not None:
            continue
        on_start(case)
        run = train(config, path, data_dir, stop=stop)
        if not run.finished:
            return False
        summary = finish(run, path)
        write_result(
            path / 'scores.json',
            config=to_json(config),
            figures=score(run, summary.figures, last_word, read_metrics(path / 'metrics.jsonl')),
            seeds={'run': case.seed, 'evaluation_draws': 0},
        )
    return True


def read(path: Path, config: ConfigDict) -> dict | None:
    """The scores of a run; None if it isn't finished.

    Raises:
      ValueError: if they are of another configuration.
    """
    file = path / 'scores.json'
    if not file.exists():
        return None
    result = read_json(file)
    with damage_reported(file):
        before, now = result['config'], to_json(config)
        changed = differences(before, now)
        # A run may be prolonged or scored otherwise, but then it doesn't compare with others.
        for section, field in (
            ('training', 'steps'),
            ('evaluation', 'batches'),
            ('evaluation', 'permutation_draws'),
        ):
            values = before[section][field], now[section][field]
            if values[0] != values[1]:
                changed.append(f'{section}.{field}: {values[0]} -> {values[1]}')
    if changed:
        raise ValueError(
            f'{file} is of another configuration:\n  ' + brief('\n  '.join(changed)) + '\nDelete '
            f'{path} to run it anew, or choose another --workdir.'
        )
    return result


def score(
    run: Run, figures: Mapping[str, Any], last_word: tasks.Task, records: Sequence[dict]
) -> dict[str, Any]:
    """The figures of a finished run.

    Args:
      run: of `train`.
      figures: of `finish`.
      last_word: passages whose last word is to be predicted.
      records: its metrics.

    Returns:
      JSON: held_out and far, the tokens behind three quarters of a row (of
      `evaluation.perplexity.evaluate`); last_word, accuracy and perplexity of the last words of
      held-out passages; baselines, parameters, flops_per_token of training, tokens_per_s, tokens
      trained on; learning_curve, the steps of evaluations and the held-out perplexity at each; and
      gates, the steps and the mean gate of each path and layer at each.
    """
    config, model_config = run.program.config, run.program.model_config
    kept = {name: figures[name] for name in ('held_out', 'baselines', 'parameters')}
    gated = [record for record in records if 'gates' in record]
    evaluated = [record for record in records if 'evaluation' in record]
    return kept | {
        'far': run.program.evaluate(
            run.state,
            lambda: far_batches(run.inputs.held_out),
            token_bytes=run.inputs.tokenizer.token_bytes,
            draws=config.evaluation.permutation_draws,
        ),
        'last_word': _last_word(run, last_word),
        'flops_per_token': training_flops_per_token(model_config, config.data.sequence_length),
        'tokens_per_s': figures['tokens_per_s']['median'],
        'tokens': (
            config.training.steps * config.training.batch_size * config.data.sequence_length
        ),
        'learning_curve': {
            'steps': [record['step'] for record in evaluated],
            'perplexity': [record['evaluation']['perplexity'] for record in evaluated],
        },
        'gates': {
            'steps': [record['step'] for record in gated],
            'means': {
                path: [record['gates'][path] for record in gated]
                for path in (gated[0]['gates'] if gated else ())
            },
        },
    }


def far_batches(batches: Sequence[dict]) -> Iterator[dict]:
    """Batches of which only the tokens count that have three quarters of a row behind them."""
    for batch in batches:
        is_far = batch['positions'] >= _FAR * batch['positions'].shape[1]
        yield batch | {'weights': batch['weights'] * is_far}


def _last_word(run: Run, task: tasks.Task) -> dict[str, Any]:
    """Accuracy and perplexity over draws, the mean; the errors are those over the items."""
    config = run.program.config
    found = []
    for draw in range(config.evaluation.permutation_draws):
        scorer = Scorer(
            nnx.merge(run.program.graph, run.state.params),
            max_length=config.data.sequence_length,
            tokens_per_batch=_TOKENS_PER_BATCH,
            draw=draw,
        )
        if not config.training.fresh_permutations:
            scorer.permutation_key = run.state.key
        found.append(tasks.evaluate(task, scorer, run.inputs.tokenizer).metrics)
    accuracy = [x['acc'].value for x in found]
    return {
        'accuracy': float(np.mean(accuracy)),
        'accuracy_std': float(np.std(accuracy, ddof=len(accuracy) > 1)),
        'accuracy_stderr': float(np.mean([x['acc'].stderr for x in found])),
        'perplexity': math.exp(np.mean([math.log(x['perplexity'].value) for x in found])),
        'items': len(task.items),
    }


def collect(comparison: Comparison, workdir: Path) -> dict[str, Any]:
    """The scores of all runs that are finished, of further seeds as well.

    Returns:
      JSON: runs, each with group, variant, seed, git_revision and the figures of `score`; missing,
        the group, variant and seed of those that aren't finished.

    Raises:
      ValueError: if there are none, or a folder holds another run.
    """
    runs, missing = [], []
    further = [
        Case(group, variant, int(path.parent.name.removeprefix('seed')))
        for group, variant in dict.fromkeys(case[:2] for case in comparison.cases)
        for path in sorted((workdir / variant).glob('seed*/scores.json'))
    ]
    for case in dict.fromkeys([*comparison.cases, *further]):
        result = read(folder(workdir, case), comparison.config(case))
        if result is None:
            missing.append(case._asdict())
        else:
            found = result['figures'] | {'git_revision': result['git_revision']}
            runs.append(case._asdict() | found)
    if not runs:
        raise ValueError(f'{workdir} has no finished run yet; train some first.')
    return {'runs': runs, 'missing': missing}
