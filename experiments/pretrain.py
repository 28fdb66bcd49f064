"""Trains a decoder from scratch.

    python -m experiments.pretrain --config=configs/pretrain/demo.py --workdir=runs/demo

The same command continues a run that was stopped or killed. `--config.SECTION.FIELD=VALUE`
overrides a field, `--dry_run` describes the run and stops. On several hosts start it on each, with
`--multi_host`; docs/scaling.md says more.
"""

import os
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from sa_jax.training import cluster
from sa_jax.training.configuration import parse_flags
from sa_jax.training.dry_run import describe
from sa_jax.training.finish import finish
from sa_jax.training.trainer import StopOnSigterm, train
from sa_jax.training.workdir import DiskFullError, keep_compiled

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The configuration file.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives checkpoints, metrics and plots.')
_DATA_DIR = flags.DEFINE_string(
    'data_dir', '~/.cache/sa_jax', 'Keeps built corpora and trained tokenizers.'
)
_DRY_RUN = flags.DEFINE_boolean(
    'dry_run', False, 'Print parameters, FLOPs, memory and shardings, and stop.'
)


def main(argv: list[str]) -> None:
    """Runs the experiment the flags describe."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    # Below warnings, Orbax reports every file it writes.
    logging.set_verbosity(logging.WARNING)
    try:
        cluster.join()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    config = _CONFIG.value.lock()
    if _DRY_RUN.value:
        print(describe(config))
        return
    if not _WORKDIR.value:
        raise app.UsageError('--workdir says where the run is kept; it is missing.')
    workdir = Path(_WORKDIR.value).expanduser()
    keep_compiled(workdir)
    with cluster.ending_together(), StopOnSigterm() as stop:
        try:
            run = train(config, workdir, Path(_DATA_DIR.value).expanduser(), stop=stop)
        except DiskFullError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)  # the ends of the threads that were writing would bury the message
        if not run.finished:
            print(f'Stopped as asked; the same command continues from {run.checkpoint}.')
            return
        summary = finish(run, workdir)
    if summary:
        print(summary)


if __name__ == '__main__':
    flags.mark_flag_as_required('config')
    app.run(main, flags_parser=parse_flags)
