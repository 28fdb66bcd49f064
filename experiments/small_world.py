"""Holds attention patterns, as graphs, against connectomes and small worlds.

    python -m experiments.small_world --workdir=runs/small_world
    python -m experiments.small_world --flywire=connections.csv.gz --workdir=runs/small_world

Who sees whom in one layer or in the union of several is a directed graph. Its clustering, mean
shortest path and other statistics stand beside those of the fly's brain, of C. elegans (with
`pip install cect`) and of the fly's visual columns (with `pip install flyvis`), at the same number
of nodes and edges. Writes result.json, small_world.md and Figure 1, small_world.png and .svg.
FlyWire's edge list doesn't come along: without --flywire the fly has the published figures.
"""

import dataclasses
import json
from pathlib import Path

from absl import app, flags

from sa_jax.analysis.small_world import CONNECTOMES, Settings, measure
from sa_jax.report import small_world_plot, small_world_tables
from sa_jax.training.results import write_result

_WORKDIR = flags.DEFINE_string('workdir', 'runs/small_world', 'Receives the files.')
_QUICK = flags.DEFINE_boolean(
    'quick', False, 'Fewer tokens beside the fly, fewer columns and smaller samples: seconds.'
)
_DEFAULTS = Settings()
_SETTINGS = [
    flags.DEFINE_list(
        'connectomes', None, f'Of {", ".join(CONNECTOMES)}; by default those that are at hand.'
    ),
    flags.DEFINE_string('flywire', None, "FlyWire's connections: .csv(.gz), .parquet, .feather."),
    flags.DEFINE_integer('min_synapses', 5, "Of an edge between the fly's neurons."),
    flags.DEFINE_integer('tokens', None, "n of the graphs beside the fly; by default the fly's."),
    flags.DEFINE_integer(
        'window',
        None,
        'Keys that a token sees in all layers together, itself included, beside the fly; by '
        "default the fly's mean degree and one.",
    ),
    flags.DEFINE_list(
        'layers', [*map(str, _DEFAULTS.layers)], 'Of the stacks whose union is taken.'
    ),
    flags.DEFINE_list(
        'rewired',
        [*map(str, _DEFAULTS.rewired)],
        'Shares of edges that Watts–Strogatz rewires.',
    ),
    flags.DEFINE_integer('sources', _DEFAULTS.sources, 'Nodes that paths are searched from.'),
    flags.DEFINE_integer('wedges', _DEFAULTS.wedges, 'Pairs of neighbours that are sampled.'),
    flags.DEFINE_integer('extent', _DEFAULTS.extent, "Of the fly's visual columns, to the rim."),
    flags.DEFINE_integer('seed', 0, 'Of permutations, random graphs and samples.'),
]
_QUICK_SETTINGS = {'tokens': 4096, 'wedges': 1 << 18, 'extent': 3}
_NUMBERS = {'layers': int, 'rewired': float}


def settings_from_flags() -> Settings:
    """The settings that the flags give; --quick changes the defaults of some.

    Raises:
      ValueError: One is out of range, or no number where one is expected.
    """
    given = {}
    for flag in _SETTINGS:
        value = flag.value
        if flag.name in _NUMBERS:
            try:
                value = tuple(map(_NUMBERS[flag.name], value))
            except ValueError as error:
                raise ValueError(f'--{flag.name}={",".join(value)}; expected numbers') from error
        if _QUICK.value and not flags.FLAGS[flag.name].present:
            value = _QUICK_SETTINGS.get(flag.name, value)
        given[flag.name] = tuple(value) if isinstance(value, list) else value
    return Settings(**given)


def main(argv: list[str]) -> None:
    """Measures, writes the result, its tables and Figure 1, and prints the tables."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    try:
        settings = settings_from_flags()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(settings)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(str(error)) from None
    write_result(
        workdir / 'result.json',
        config=dataclasses.asdict(settings),
        figures=figures,
        seeds={'permutations, random graphs and samples': settings.seed},
    )
    result = json.loads((workdir / 'result.json').read_text())
    tables = small_world_tables.tables(result)
    (workdir / 'small_world.md').write_text(tables)
    small_world_plot.plot(result, workdir)
    print(tables, end='')


if __name__ == '__main__':
    app.run(main)
