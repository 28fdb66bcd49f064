"""How many layers connect all pairs of tokens: result.json, receptive_field.md and two figures.

    python -m experiments.receptive_field --workdir=runs/receptive_field
    python -m experiments.receptive_field --workdir=runs/receptive_field_quick --quick

Walks through stacks of layers, with the windows and permutations that the attention functions use,
and counts which tokens each query sees, exactly or for a sample of the queries; beside it stand the
closed forms of docs/theory.md. Figures, as PNG and SVG: the receptive field against depth, and the
depth to coverage against the number of tokens. Needs no accelerator.
"""

import dataclasses
import os
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from absl import app, flags
from tqdm import tqdm

from sa_jax.analysis import coverage_study
from sa_jax.analysis.coverage_study import Study
from sa_jax.report import coverage_plot, coverage_tables
from sa_jax.training.results import write_result

_WORKDIR = flags.DEFINE_string('workdir', 'runs/receptive_field', 'Receives the files.')
_QUICK = flags.DEFINE_boolean(
    'quick', False, 'Fewer and shorter stacks: under half a minute on two cores.'
)
_HELP = {
    'kinds': 'Patterns: swa, sa, sa_swa, partition.',
    'lengths': 'Tokens of the sweep.',
    'windows': 'Keys a window of the sweep spans, the query itself included; chunks as well.',
    'seeds': 'Draws of all permutations and samples.',
    'first_seed': 'The first of the seeds, which are consecutive.',
    'sampled': 'Queries that stand for all where there are more than --exact_up_to.',
    'exact_up_to': 'Tokens up to which every query is followed.',
    'max_layers': 'Layers that the sweep walks through at most.',
    'focus_length': 'Tokens of the stack whose every layer is reported.',
    'focus_window': 'Keys a window of that stack spans; the second figure shows it, too.',
    'focus_layers': 'Layers of that stack.',
}
_QUICK_STUDY = {
    'lengths': (256, 1024, 4096),
    'windows': (16, 64),
    'seeds': 2,
    'sampled': 128,
    'exact_up_to': 1024,
    'max_layers': 32,
    'focus_length': 1024,
    'focus_window': 33,
}
_DEFINE = {int: flags.DEFINE_integer, tuple: flags.DEFINE_list}
# None stands for the default, which --quick changes.
_SETTINGS = {
    field.name: _DEFINE[type(field.default)](field.name, None, _HELP[field.name])
    for field in dataclasses.fields(Study)
}


def study_from_flags() -> Study:
    """The default or the quick study with the flags' settings in their place.

    Raises:
      ValueError: a setting out of range, or no number where one is expected.
    """
    given = {name: flag.value for name, flag in _SETTINGS.items() if flag.value is not None}
    for name in ('lengths', 'windows'):
        if name in given:
            given[name] = tuple(_whole_number(name, x) for x in given[name])
    if 'kinds' in given:
        given['kinds'] = tuple(given['kinds'])
    return Study(**(_QUICK_STUDY if _QUICK.value else {}) | given)


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'--{name}: {text!r}; expected whole numbers, as in 1024,4096') from None


def main(argv: list[str]) -> None:
    """Walks through the stacks, writes the files and prints the tables."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    try:
        study = study_from_flags()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    with tqdm(total=study.runs(), unit='stack') as bar:

        def advance(case):
            bar.set_postfix_str(
                f'{case.setting} {case.kind}, n={case.n:,}, w={case.window:,}', refresh=False
            )
            bar.update()

        figures = coverage_study.run(study, advance)
    write_result(
        workdir / 'result.json',
        config=dataclasses.asdict(study),
        figures=figures,
        seeds={'permutations and queries': list(range(*_seeds(study)))},
    )
    tables = coverage_tables.tables(figures)
    (workdir / 'receptive_field.md').write_text(tables)
    coverage_plot.plot_receptive_field(figures, workdir / 'receptive_field')
    coverage_plot.plot_depth(figures, _drawn_window(study), workdir / 'depth')
    print(tables)


def _seeds(study: Study) -> tuple[int, int]:
    return study.first_seed, study.first_seed + study.seeds


def _drawn_window(study: Study) -> int:
    """The window of the sweep that is nearest to the focus."""
    return min(study.windows, key=lambda window: abs(window - study.focus_window))


if __name__ == '__main__':
    app.run(main)
