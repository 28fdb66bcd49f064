r"""Compiles the training step for clusters that aren't there: memory and messages of each card.

    python -m experiments.cluster_report --workdir=runs/cluster_report \
        --config=configs/pretrain/paper_360m.py

Needs the extra aot, no GPU. A minute or more for each step. Writes result.json and table.md.
"""

import math
import runpy
from pathlib import Path

import jax
from absl import app, flags
from tqdm import tqdm

from sa_jax.report import step_compile
from sa_jax.report.gpu_compile import CARDS, compile_for, missing
from sa_jax.training.results import write_result

_CONFIG = flags.DEFINE_string('config', None, 'The configuration file.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives the files.', required=True)
_VARIANTS = flags.DEFINE_list('variants', ['full', 'swa', 'sa', 'sa_swa'], 'Of the file.')
_TOPOLOGIES = flags.DEFINE_list(
    'topologies', ['1x1x1', '1x1x8', '2x1x8', '32x1x8'], 'Slices × hosts × cards of a host.'
)
_ROWS = flags.DEFINE_integer(
    'rows_per_card', 32, 'At most, of a microbatch: gradients are accumulated over the rest.'
)
_CARD = flags.DEFINE_enum('card', 'h200', list(CARDS), 'What to compile for.')


def accumulation(config: str, variant: str, topology: str) -> int:
    """The microbatches of a step, so that each card has few enough rows at a time.

    Raises:
      ValueError: the topology isn't three counts.
    """
    try:
        slices, hosts, cards = map(int, topology.split('x'))
    except ValueError:
        raise ValueError(f'--topologies: {topology!r}; expected counts, as in 2x1x8') from None
    rows = runpy.run_path(config)['get_config'](variant).training.batch_size
    return math.ceil(rows / (slices * hosts * cards * _ROWS.value))


def main(argv: list[str]) -> None:
    """Compiles, writes the result and its table, and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    jax.config.update('jax_platforms', 'cpu')  # no GPU is used, and the plugin has no libraries
    try:
        if lack := missing():
            raise ValueError(lack)
        work = [
            step_compile.program(
                _CONFIG.value,
                variant,
                topology,
                {'training.gradient_accumulation': accumulation(_CONFIG.value, variant, topology)},
            )
            for topology in _TOPOLOGIES.value
            for variant in _VARIANTS.value
        ]
    except (OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    card = CARDS[_CARD.value]
    with tqdm(total=len(work), unit='step', disable=None) as bar:
        compiled = compile_for(card, work, on_compiled=lambda _: bar.update())
    rows = [step_compile.describe(x) for x in compiled]
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config={'config': _CONFIG.value, 'card': _CARD.value, 'rows_per_card': _ROWS.value},
        figures={'steps': rows},
        seeds={},
    )
    text = step_compile.table(rows, card)
    (workdir / 'table.md').write_text(text)
    print(text, end='')
    failed = [row['program'] for row in rows if row['error']]
    if failed:
        raise SystemExit(f'Not compiled: {", ".join(failed)}.')


if __name__ == '__main__':
    app.run(main)
