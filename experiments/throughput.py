r"""Times the training step of a config's variants, interleaved, on the data they train on.

    python -m experiments.throughput --config=configs/pretrain/throughput.py --peer \
        --workdir=runs/throughput

Each round runs every variant for some steps. With --peer Hugging Face's transformers trains the
same model as the variant full, on the CPU, from the same weights on the same batches; it needs the
extra oracle. Nothing else should run on the machine.
"""

import runpy
from pathlib import Path

import jax
from absl import app, flags
from tqdm import tqdm

from sa_jax.benchmarks import training
from sa_jax.training.configuration import to_json
from sa_jax.training.results import write_result

_CONFIG = flags.DEFINE_string('config', None, 'A file whose get_config takes a variant.')
_VARIANTS = flags.DEFINE_list('variants', ['full', 'swa', 'sa', 'sa_swa'], 'What to compare.')
_PEER = flags.DEFINE_boolean('peer', False, "Also transformers' model, beside the variant full.")
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives result.json and throughput.md.')
_DATA_DIR = flags.DEFINE_string('data_dir', '~/.cache/sa_jax', 'Keeps corpora and tokenizers.')
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Measurements of each.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 2, 'Steps of a measurement.', lower_bound=1)


def main(argv: list[str]) -> None:
    """Measures, prints a table and writes it with result.json."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    if _PEER.value and 'full' not in _VARIANTS.value:
        raise app.UsageError('--peer trains as full does; --variants must name full.')
    if _PEER.value:
        jax.config.update('jax_platforms', 'cpu')
    get_config = runpy.run_path(_CONFIG.value)['get_config']
    try:
        configs = {variant: get_config(variant) for variant in _VARIANTS.value}
        with tqdm(total=_ROUNDS.value * (len(configs) + _PEER.value), disable=None) as bar:
            figures = training.measure(
                configs,
                Path(_DATA_DIR.value).expanduser(),
                peer_of='full' if _PEER.value else None,
                rounds=_ROUNDS.value,
                steps=_STEPS.value,
                on_measured=bar.update,
            )
    except (ImportError, ValueError) as error:
        raise SystemExit(str(error)) from None
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config={variant: to_json(config) for variant, config in configs.items()},
        figures=figures,
        seeds={variant: config.seed for variant, config in configs.items()},
    )
    text = training.table(figures)
    (workdir / 'throughput.md').write_text(text)
    print(text, end='')


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(main)
