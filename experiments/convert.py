r"""Turns a run's checkpoint into config.json, model.safetensors and tokenizer.json, and back.

    python -m experiments.convert --checkpoint=runs/demo --output=exported
    python -m experiments.convert --pretrained=exported --config=configs/pretrain/demo.py \
        --config.data.tokenizer.kind=file --config.data.tokenizer.path=exported \
        --workdir=runs/further

The second writes the checkpoint of step 0 of a run, from which `experiments.pretrain` goes on when
it is given the same configuration and workdir.
"""

from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from sa_jax.models.pretrained import load_pretrained, save_pretrained
from sa_jax.training.configuration import parse_flags
from sa_jax.training.restore import begin_run, load_run

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, "A run's workdir, to be turned into files.")
_STEP = flags.DEFINE_integer('step', None, 'Of the checkpoint; by default the latest.')
_OUTPUT = flags.DEFINE_string('output', None, 'The directory to be written.')
_PRETRAINED = flags.DEFINE_string('pretrained', None, 'Files to begin a run with.')
_CONFIG = config_flags.DEFINE_config_file('config', None, "The new run's configuration.")
_WORKDIR = flags.DEFINE_string('workdir', None, "The new run's workdir.")
_DATA_DIR = flags.DEFINE_string(
    'data_dir', '~/.cache/sa_jax', 'Keeps built corpora and trained tokenizers.'
)


def main(argv: list[str]) -> None:
    """Converts in the direction that the flags give."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    # Below warnings, Orbax reports every file it writes.
    logging.set_verbosity(logging.WARNING)
    data_dir = Path(_DATA_DIR.value).expanduser()
    forth = _CHECKPOINT.value, _OUTPUT.value
    back = _PRETRAINED.value, _CONFIG.value, _WORKDIR.value
    try:
        if all(forth) and not any(back):
            run = load_run(Path(_CHECKPOINT.value).expanduser(), data_dir, step=_STEP.value)
            save_pretrained(run, _OUTPUT.value)
            print(f'{_OUTPUT.value} holds the model; load_pretrained reads it.')
        elif all(back) and not any(forth):
            pretrained = load_pretrained(_PRETRAINED.value, dtype='float32')
            workdir = Path(_WORKDIR.value).expanduser()
            begin_run(pretrained, _CONFIG.value.lock(), workdir, data_dir)
            print(f'{workdir} holds step 0; experiments.pretrain goes on from there.')
        else:
            raise app.UsageError(
                'Give --checkpoint and --output, or --pretrained, --config and --workdir.'
            )
    except (ImportError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == '__main__':
    app.run(main, flags_parser=parse_flags)
