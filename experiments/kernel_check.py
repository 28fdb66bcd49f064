"""Holds the GPU kernels against the float32 reference on the device, over a grid of calls.

    python -m experiments.kernel_check --workdir=runs/kernel_check

Forms × dtypes × head_dim × what a call may bring along (packing and padding, grouped heads, caps
and sinks, lengths that are no multiple of a block), output and gradients each. Prints the largest
errors and fails if one is beyond 2e-2 for bfloat16, 1e-5 (outputs) or 1e-4 (gradients) for float32.
Kernels compile beside each other: two minutes on sixteen cores.
"""

import concurrent.futures
import dataclasses
import os
from pathlib import Path

import jax
from absl import app, flags
from tqdm import tqdm

from sa_jax.benchmarks import kernel_errors
from sa_jax.training.results import write_result

_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives result.json and table.md.')
_IMPLEMENTATION = flags.DEFINE_enum(
    'implementation', 'pallas', ['pallas', 'pallas_interpret'], 'The second runs on any device.'
)
_FORMS = flags.DEFINE_list('forms', list(kernel_errors.FORMS), 'Attention functions.')
_DTYPES = flags.DEFINE_list('dtypes', list(kernel_errors.VALUES), 'Of queries, keys and values.')
_HEAD_DIMS = flags.DEFINE_list('head_dims', ['64', '128', '256'], 'Sizes of a head.')
_WORKERS = flags.DEFINE_integer('workers', os.cpu_count(), 'Compilations at a time.')


def main(argv: list[str]) -> None:
    """Checks all cases, writes the errors, and fails if one is too large."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    for flag, known in ((_FORMS, kernel_errors.FORMS), (_DTYPES, kernel_errors.VALUES)):
        if not flag.value or set(flag.value) - set(known):
            given = ','.join(flag.value)
            raise app.UsageError(f'--{flag.name}={given}; expected some of {", ".join(known)}')
    device = jax.devices()[0]
    if _IMPLEMENTATION.value == 'pallas' and device.platform != 'gpu':
        raise app.UsageError(
            f'the kernels need an NVIDIA GPU, and JAX has {device.device_kind}; '
            '--implementation=pallas_interpret runs them in the interpreter'
        )
    head_dims = [int(size) for size in _HEAD_DIMS.value]
    cases = kernel_errors.cases(_FORMS.value, _DTYPES.value, head_dims)
    records = []
    with concurrent.futures.ThreadPoolExecutor(_WORKERS.value) as pool:
        prepared = [pool.submit(kernel_errors.prepare, x, _IMPLEMENTATION.value) for x in cases]
        for case in tqdm(cases, unit='case', disable=None):
            try:
                functions = prepared.pop(0).result()
                records.append(kernel_errors.check(case, *functions))
            except Exception as error:  # the other cases still tell something
                failure = {'is_good': False, 'failure': f'{type(error).__name__}: {error}'[:500]}
                records.append(dataclasses.asdict(case) | failure)
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config={'implementation': _IMPLEMENTATION.value},
        figures={'largest': kernel_errors.largest(records), 'cases': records},
        seeds={'inputs': kernel_errors.SEED},
    )
    text = kernel_errors.table(records)
    (workdir / 'table.md').write_text(text)
    print(text, end='')
    wrong = [(x, record) for x, record in zip(cases, records, strict=True) if not record['is_good']]
    for case, record in wrong:
        print(f'WRONG: {case}: {record.get("failure") or record["errors"]}')
    if wrong:
        raise SystemExit(f'{len(wrong)} of {len(cases)} cases are wrong.')
    print(f'All {len(cases)} cases are within their tolerance on {device.device_kind}.')


if __name__ == '__main__':
    flags.mark_flags_as_required(['workdir'])
    app.run(main)
