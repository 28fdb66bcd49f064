"""Times attention functions over lengths, beside what a user would pick instead.

    python -m experiments.efficiency --workdir=runs/efficiency
    python -m experiments.efficiency --flagfile=configs/efficiency/cpu_targets.flags

Every flag but the workdir is a setting of the sweep; its default depends on the device. PyTorch
takes part if it is installed (`pip install '.[train,bench]'`), and so do cuDNN and tokamax. The
same command continues a sweep that was stopped. Nothing else should run on the machine.
"""

import dataclasses
import json
import os
from pathlib import Path

# PyTorch needs some of the GPU's memory as well.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

from absl import app, flags

from sa_jax.benchmarks.settings import Sweep, default_sweep
from sa_jax.benchmarks.sweep import AnotherSweepError, run_sweep
from sa_jax.report import efficiency_plot, efficiency_tables
from sa_jax.training.results import write_result

_WORKDIR = flags.DEFINE_string(
    'workdir', 'runs/efficiency', 'Receives result.json, efficiency.md and efficiency.png.'
)
_QUICK = flags.DEFINE_boolean('quick', False, 'Three lengths and three rounds: minutes.')
_HELP = {
    'lengths': 'Tokens, ascending.',
    'kinds': "Attention functions by name, also 'sa_swa' and 'sliding_window_two_sided'.",
    'implementations': "Of this package: 'default', 'xla', 'pallas' or 'reference'.",
    'peers': 'What to compare with.',
    'dtypes': 'Precisions of query, key and value.',
    'modes': 'forward, forward_backward.',
    'batch': 'Examples.',
    'heads': 'Query heads.',
    'kv_heads': 'Key and value heads.',
    'head_dim': 'Channels of a head.',
    'window': 'Keys a window spans, the query itself included.',
    'chunk_size': "Tokens of a random partition's chunk.",
    'block_size': 'Keys of a MoBA block.',
    'top_k': 'MoBA blocks per query.',
    'flex_block_size': "Edge of the blocks of FlexAttention's masks.",
    'is_causal': 'Whether a token sees only its predecessors.',
    'options': "JSON: options of other packages' kinds, by kind.",
    'rounds': 'Measurements of each case.',
    'min_ms': 'How long a measurement lasts at least, ms: short calls are repeated.',
    'pause_ms': 'Rest before each measurement, ms.',
    'time_limit_s': 'Cases with longer calls are left out, s.',
    'memory_limit_gib': 'Cases that need more are left out, GiB; 0 for most of the memory.',
    'check_length': 'Tokens of the comparison with the reference.',
    'matmul_size': "Edge of the product that the device's rate is measured with.",
    'seed': 'Of inputs and permutation.',
}
_DEFINE = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    tuple: flags.DEFINE_list,
    dict: flags.DEFINE_string,
}
# None stands for the device's default: which device it is, is known only once flags are parsed.
_SETTINGS = {
    field.name: _DEFINE[type(getattr(Sweep(), field.name))](field.name, None, _HELP[field.name])
    for field in dataclasses.fields(Sweep)
}


def sweep_from_flags() -> Sweep:
    """The device's default settings with those of the flags in their place.

    Raises:
      ValueError: a setting out of range, or no number where one is expected.
    """
    given = {name: flag.value for name, flag in _SETTINGS.items() if flag.value is not None}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(map(int, value)) if name == 'lengths' else tuple(value)
    if 'options' in given:
        given['options'] = json.loads(given['options'])
    if 'heads' in given:
        given.setdefault('kv_heads', given['heads'])
    return dataclasses.replace(default_sweep(is_quick=_QUICK.value), **given)


def main(argv: list[str]) -> None:
    """Measures, writes the result, its tables and its plot, and prints the tables."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    workdir = Path(_WORKDIR.value).expanduser()
    try:
        sweep = sweep_from_flags()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    try:
        figures = run_sweep(sweep, workdir)
    except AnotherSweepError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit('Stopped; the same command continues behind the last length.') from None
    write_result(
        workdir / 'result.json',
        config=sweep.to_json(),
        figures=figures,
        seeds={'inputs': sweep.seed},
    )
    result = json.loads((workdir / 'result.json').read_text())
    tables = efficiency_tables.tables(result)
    (workdir / 'efficiency.md').write_text(tables)
    efficiency_plot.plot(result, workdir / 'efficiency.png')
    print(tables)


if __name__ == '__main__':
    app.run(main)
