r"""Trains and scores the variants of a configuration, several seeds each, and compares them.

    python -m experiments.compare --config=configs/pretrain/table1_mini.py \
        --workdir=runs/table1_mini

Runs one after another, each in a folder of its own, --workdir/VARIANT/seedN. The same command goes
on from where it was stopped or killed. The workdir receives result.json, tables and figures of what
is finished: --report_only writes them at any time.
"""

from pathlib import Path

from absl import app, flags, logging

from sa_jax.report import comparison_plot, comparison_tables
from sa_jax.training import comparison
from sa_jax.training.results import write_result
from sa_jax.training.trainer import StopOnSigterm
from sa_jax.training.workdir import keep_compiled

_CONFIG = flags.DEFINE_string('config', None, 'A file with VARIANTS and SEEDS.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Keeps the runs.', required=True)
_DATA_DIR = flags.DEFINE_string(
    'data_dir', '~/.cache/sa_jax', 'Keeps built corpora and trained tokenizers.'
)
_VARIANTS = flags.DEFINE_list('variants', None, 'Some of the variants; by default all.')
_SEEDS = flags.DEFINE_list('seeds', None, "Numbers of the seeds; by default the file's SEEDS.")
_REPORT_ONLY = flags.DEFINE_boolean('report_only', False, 'Report what is finished; train nothing.')


def run(study: comparison.Comparison, workdir: Path) -> bool:
    """Runs what isn't finished; returns whether all are."""
    keep_compiled(workdir)  # a variant's seeds share what is compiled
    with StopOnSigterm() as stop:
        return comparison.run_all(
            study,
            workdir,
            Path(_DATA_DIR.value).expanduser(),
            stop=stop,
            on_start=lambda case: print(f'{case.variant}, seed {case.seed}', flush=True),
        )


def main(argv: list[str]) -> None:
    """Runs what isn't finished, and reports."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    # Below warnings, Orbax reports every file it writes.
    logging.set_verbosity(logging.WARNING)
    workdir = Path(_WORKDIR.value).expanduser()
    try:
        seeds = None if _SEEDS.value is None else [int(x) for x in _SEEDS.value]
    except ValueError:
        raise app.UsageError(f'--seeds={",".join(_SEEDS.value)}; expected numbers.') from None
    try:
        study = comparison.Comparison(Path(_CONFIG.value), _VARIANTS.value, seeds)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    try:
        if not _REPORT_ONLY.value and not run(study, workdir):
            print('Stopped as asked; the same command goes on.')
            return
        figures = comparison.collect(comparison.Comparison(Path(_CONFIG.value)), workdir)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    write_result(
        workdir / 'result.json',
        config={'config': _CONFIG.value},
        figures=figures,
        seeds={'runs': sorted({run['seed'] for run in figures['runs']})},
    )
    tables = comparison_tables.tables(figures)
    (workdir / 'comparison.md').write_text(tables)
    comparison_plot.plot(figures, workdir)
    print(tables)


if __name__ == '__main__':
    app.run(main)
