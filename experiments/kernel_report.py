"""Compiles the attention kernels for described cards, without a GPU, and reports what they take.

    python -m experiments.kernel_report --cards=a100,h200 --workdir=runs/kernel_report

Each program is a public attention function with its three gradients, so that it holds the forward,
dq and dk/dv kernels as users get them. Of each kernel: registers of a thread, bytes spilled for
want of them, shared memory of a block. Of each program: its temporary memory, which has no room for
a permuted copy of queries, keys or values. Needs the extra aot; two minutes a card.
"""

import dataclasses
from pathlib import Path

import jax
from absl import app, flags
from tqdm import tqdm

from sa_jax.report import kernel_report
from sa_jax.report.gpu_compile import CARDS, compile_for, missing, ptxas_version
from sa_jax.training.results import write_result

_CARDS = flags.DEFINE_list('cards', ['a100', 'h200'], f'What to compile for: {", ".join(CARDS)}.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives result.json and table.md.')
_FORMS = flags.DEFINE_list('forms', list(kernel_report.FORMS), 'Attention functions.')
_DTYPES = flags.DEFINE_list('dtypes', list(kernel_report.DTYPES), 'Of queries, keys and values.')
_HEAD_DIMS = flags.DEFINE_list(
    'head_dims', [str(size) for size in kernel_report.HEAD_DIMS], 'Sizes of a head.'
)
_LENGTH = flags.DEFINE_integer('length', 32768, 'Tokens.', lower_bound=1)
_HEADS = flags.DEFINE_integer('heads', 16, 'Query heads.', lower_bound=1)
_KV_HEADS = flags.DEFINE_integer('kv_heads', 8, 'Key and value heads.', lower_bound=1)
_WINDOW = flags.DEFINE_integer('window', 256, 'Keys or slots a query sees.', lower_bound=1)


def main(argv: list[str]) -> None:
    """Compiles, prints the table, and writes it with result.json."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    lists = ((_CARDS, CARDS), (_FORMS, kernel_report.FORMS), (_DTYPES, kernel_report.DTYPES))
    for flag, known in lists:
        if not flag.value or set(flag.value) - set(known):
            given = ','.join(flag.value)
            raise app.UsageError(f'--{flag.name}={given}; expected some of {", ".join(known)}')
    jax.config.update('jax_platforms', 'cpu')  # no GPU is used, and the plugin has no libraries
    lack = missing()
    if lack is not None:
        raise app.UsageError(lack)
    sizes = {
        'length': _LENGTH.value,
        'heads': _HEADS.value,
        'kv_heads': _KV_HEADS.value,
        'window': _WINDOW.value,
    }
    head_dims = [int(size) for size in _HEAD_DIMS.value]
    work = kernel_report.programs(_FORMS.value, _DTYPES.value, head_dims, **sizes)
    reports = {}
    with tqdm(total=len(work) * len(_CARDS.value), unit='program', disable=None) as bar:
        for card in _CARDS.value:
            reports[card] = compile_for(CARDS[card], work, on_compiled=lambda _: bar.update())
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config=sizes | {'cards': _CARDS.value, 'ptxas': ptxas_version()},
        figures={card: [dataclasses.asdict(x) for x in found] for card, found in reports.items()},
        seeds={},
    )
    text = kernel_report.table(reports)
    (workdir / 'table.md').write_text(text)
    print(text, end='')
    failed = [f'{x.name} on {card}' for card, found in reports.items() for x in found if x.error]
    if failed:
        raise SystemExit(f'Not compiled: {", ".join(failed)}.')


if __name__ == '__main__':
    flags.mark_flags_as_required(['workdir'])
    app.run(main)
