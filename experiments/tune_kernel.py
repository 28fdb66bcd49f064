"""Finds the fastest launch of the GPU kernels on this machine's card and writes it to the table.

    python -m experiments.tune_kernel --workdir=runs/tune_kernel --seconds=1800

For each dtype and head_dim, the forward kernel's tile first, then dq's, then dk/dv's, then whether
to read rows through the permutation or from permuted copies: each time all tiles are tried, those
nearest to the table's first, as far as the time goes. What doesn't compile, needs more shared
memory than there is or computes other numbers than the table's launch is out; the rest is timed in
turns, by medians. A winner goes into the table at once, and only this card's entries change. The
same command continues a search that was stopped or killed, from --workdir/journal.jsonl.
"""

import os
from pathlib import Path

import jax
from absl import app, flags
from tqdm import tqdm

from sa_jax.attention.launch import OTHER, TABLE, card_of
from sa_jax.benchmarks import launch_search
from sa_jax.benchmarks.launch_search import PARTS, TOLERANCES, Workload
from sa_jax.benchmarks.tuning import Journal

_WORKDIR = flags.DEFINE_string('workdir', None, 'Keeps journal.jsonl.')
_TABLE = flags.DEFINE_string('table', str(TABLE), 'The launch table to improve.')
_SECONDS = flags.DEFINE_float('seconds', 1800, 'For everything; what it is too short for stays.')
_DTYPES = flags.DEFINE_list('dtypes', list(TOLERANCES), 'Of queries, keys and values.')
_HEAD_DIMS = flags.DEFINE_list('head_dims', ['64', '128', '256'], 'Sizes of a head.')
_FORMS = flags.DEFINE_list('forms', list(launch_search.FORMS), 'Whose times are added up.')
_LENGTH = flags.DEFINE_integer('length', 32768, 'Tokens.', lower_bound=1)
_HEADS = flags.DEFINE_integer('heads', 16, 'Query heads.', lower_bound=1)
_KV_HEADS = flags.DEFINE_integer('kv_heads', 16, 'Key and value heads.', lower_bound=1)
_WINDOW = flags.DEFINE_integer('window', 256, 'Keys or slots a query sees.', lower_bound=1)
_WORKERS = flags.DEFINE_integer('workers', os.cpu_count(), 'Compilations at a time.')
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Only say what would be tried, on any machine.')


def main(argv: list[str]) -> None:
    """Searches, writes the table and prints what changed."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    for flag, known in ((_DTYPES, TOLERANCES), (_FORMS, launch_search.FORMS)):
        if not flag.value or set(flag.value) - set(known):
            given = ','.join(flag.value)
            raise app.UsageError(f'--{flag.name}={given}; expected some of {", ".join(known)}')
    entries = [(dtype, int(size)) for dtype in _DTYPES.value for size in _HEAD_DIMS.value]
    table, device = Path(_TABLE.value).expanduser(), jax.devices()[0]
    card = card_of(device)
    if _DRY_RUN.value:
        print(f'For {card or "a GPU, which this machine lacks"}, in {_SECONDS.value:.0f} s:')
        for dtype, head_dim in entries:
            launch = launch_search.launch_in(table, card or OTHER, dtype, head_dim)
            for part in PARTS:
                others = len(launch_search.variants(launch, part))
                used = launch_search.describe(launch, part)
                print(f'{dtype} {head_dim} {part}: {used}, against {others} others')
        return
    if card is None:
        raise app.UsageError(
            f'tuning times the kernels on an NVIDIA GPU, and JAX has {device.device_kind}; '
            '--dry_run says what would be tried'
        )
    sizes = (_LENGTH.value, _HEADS.value, _KV_HEADS.value, _WINDOW.value)
    workload = Workload(*sizes, tuple(_FORMS.value))
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        journal = Journal(workdir / 'journal.jsonl', workload.as_json(device))
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    with tqdm(total=len(entries) * len(PARTS), unit='part', disable=None) as bar:

        def show(place):
            bar.set_description(place)
            bar.update()

        changes = launch_search.search(
            table,
            card,
            entries,
            workload,
            journal,
            seconds=_SECONDS.value,
            workers=_WORKERS.value,
            on_part=show,
        )
    print('\n'.join(changes) or 'Nothing changed.')
    places = [f'{dtype} {size} {part}' for dtype, size in entries for part in PARTS]
    done = sum(place in journal.winners for place in places)
    print(f'{done} of {len(places)} parts are decided for {device.device_kind}, in {table}.')


if __name__ == '__main__':
    flags.mark_flags_as_required(['workdir'])
    app.run(main)
