"""Times the training step of a config's variants, interleaved, on the data they train on.

    python -m experiments.throughput --config=configs/pretrain/demo.py --workdir=runs/throughput

Each round runs every variant for some steps; the first round is not counted. Nothing else should
run on the machine.
"""

import runpy
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags
from tqdm import tqdm

from sa_jax.training.configuration import to_json
from sa_jax.training.inputs import load_inputs
from sa_jax.training.program import build_program
from sa_jax.training.results import write_result

_CONFIG = flags.DEFINE_string('config', None, 'Config file whose get_config takes a variant.')
_VARIANTS = flags.DEFINE_list('variants', ['full', 'swa', 'sa', 'sa_swa'], 'What to compare.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives result.json.')
_DATA_DIR = flags.DEFINE_string('data_dir', '~/.cache/sa_jax', 'Keeps corpora and tokenizers.')
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Counted rounds.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of a variant per round.', lower_bound=1)


def run_steps(step, program, batches, state, count):
    """Runs some steps; returns the state and the tokens per second, reading of data included."""
    start, tokens = time.perf_counter(), 0.0
    for _ in range(count):
        batch = next(batches)
        tokens += float(batch['weights'].sum())
        state, _ = step(state, program.place_batch(batch))
    jax.block_until_ready(state.params)
    return state, tokens / (time.perf_counter() - start)


def main(argv: list[str]) -> None:
    """Measures, prints a table and writes result.json."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    get_config = runpy.run_path(_CONFIG.value)['get_config']
    configs = {variant: get_config(variant) for variant in _VARIANTS.value}
    runs, rates = {}, {variant: [] for variant in configs}
    for variant, config in configs.items():
        program = build_program(config)
        inputs = load_inputs(config, Path(_DATA_DIR.value).expanduser())
        runs[variant] = program, inputs.training_batches(), program.compile_step()
    states = {variant: program.init() for variant, (program, *_) in runs.items()}
    for round_ in tqdm(range(_ROUNDS.value + 1), unit='round'):
        for variant, (program, batches, step) in runs.items():
            states[variant], rate = run_steps(step, program, batches, states[variant], _STEPS.value)
            if round_:
                rates[variant].append(rate)
    figures = {
        variant: {'median': float(np.median(x)), 'least': min(x), 'most': max(x)}
        for variant, x in rates.items()
    }
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config={variant: to_json(config) for variant, config in configs.items()},
        figures={'tokens_per_s': figures},
        seeds={variant: config.seed for variant, config in configs.items()},
    )
    print('| variant | tokens/s | least | most |\n|---|---|---|---|')
    for variant, x in figures.items():
        print(f'| {variant} | {x["median"]:,.0f} | {x["least"]:,.0f} | {x["most"]:,.0f} |')


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(main)
