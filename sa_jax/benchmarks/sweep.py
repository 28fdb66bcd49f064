"""A sweep: checks every case against the reference, then times the lengths one after another."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from sa_jax.benchmarks import patterns, peers, runners, timing
from sa_jax.benchmarks.runners import NotAvailableError, Runner
from sa_jax.benchmarks.settings import Case, Inputs, Sweep, cases, draw_inputs
from sa_jax.training.files import write_atomically
from sa_jax.training.results import describe_device, git_revision, versions

# Largest difference from the reference, as a share of its largest number (1 at least). One key too
# many in a window of 257 makes 0.05 or more. GPUs round the factors of float32 products.
_TOLERANCES = {
    'cpu': {'float32': 1e-4, 'float16': 1e-2, 'bfloat16': 3e-2},
    'gpu': {'float32': 1e-2, 'float16': 1e-2, 'bfloat16': 3e-2},
}
# The share of the memory that a case may need.
_MEMORY_SHARE = 0.7


class AnotherSweepError(ValueError):
    """The workdir holds other measurements than these would be."""


def run_sweep(sweep: Sweep, workdir: Path) -> dict:
    """Measures what is not measured yet; each finished length is kept in the workdir.

    Args:
      sweep: the settings.
      workdir: receives config.json, check.json and lengths/*.json.

    Returns:
      The figures: 'checks' and, under 'lengths', the records of every length.

    Raises:
      AnotherSweepError: the workdir belongs to another sweep, or to this one on another machine or
        with other versions; the message names the differences.
    """
    (workdir / 'lengths').mkdir(parents=True, exist_ok=True)
    _claim(workdir, sweep)
    every = cases(sweep)
    rounds = sweep.rounds + 1  # One stands for preparing a case.
    total = len(every) * (1 + rounds * len(sweep.lengths))
    with tqdm(total=total, dynamic_ncols=True, disable=None) as bar:
        bar.set_description('comparing with the reference')
        checks = _kept(workdir / 'check.json', lambda: list(_check(sweep, every, bar)))
        bar.n = len(every)
        finished = []
        for number, length in enumerate(sweep.lengths, 1):
            bar.set_description(f'n = {length:,}')
            path = workdir / 'lengths' / f'{length}.json'
            finished.append(
                _kept(path, lambda n=length: _measure(sweep, n, every, checks, finished, bar))
            )
            bar.n = len(every) * (1 + rounds * number)
            bar.refresh()
            bar.write(_describe(finished[-1]))
    return {'threads': runners.threads(), 'checks': checks, 'lengths': finished}


def _claim(workdir: Path, sweep: Sweep) -> None:
    """Makes the workdir the sweep's own, or refuses."""
    path = workdir / 'config.json'
    wanted = {'sweep': sweep.to_json(), 'device': describe_device(), 'versions': versions()}
    if not path.exists():
        write_atomically(path, json.dumps(wanted, indent=2) + '\n')
        return
    stored = json.loads(path.read_text())
    differences = [
        f'{part}.{name}: {stored[part].get(name)!r} -> {wanted[part].get(name)!r}'
        for part in wanted
        for name in sorted(stored[part] | wanted[part])
        if stored[part].get(name) != wanted[part].get(name)
    ]
    if differences:
        raise AnotherSweepError(
            f'{workdir} holds another sweep; choose another --workdir, or repeat the command that '
            'began this one. Different are\n  ' + '\n  '.join(differences)
        )


def _kept(path: Path, measure: Callable[[], list | dict]) -> list | dict:
    """What a file holds, measured first if there is none."""
    if not path.exists():
        write_atomically(path, json.dumps(measure()) + '\n')
    return json.loads(path.read_text())


def _describe(record: dict) -> str:
    """A line about a finished length."""
    skipped = sum('skipped' in x for x in record['cases'])
    text = f'n = {record["length"]:,}: {len(record["cases"]) - skipped} cases measured'
    return f'{text}, {skipped} left out' if skipped else text


def _check(sweep: Sweep, every: list[Case], bar: tqdm) -> Iterator[dict]:
    """Compares each case's output and gradients with the reference's, at a small length."""
    inputs = draw_inputs(sweep, sweep.check_length)
    tolerances = _TOLERANCES['cpu' if jax.default_backend() == 'cpu' else 'gpu']
    expected = {}
    for case in every:
        record = case._asdict()
        try:
            wanted = case.kind, case.dtype, case.mode
            if wanted not in expected:
                expected[wanted] = _reference(sweep, case, inputs)
            outputs = peers.prepare(case, sweep, inputs).outputs()
            error = max(_error(*x) for x in zip(outputs, expected[wanted], strict=True))
            record['error'] = error
            if not error <= tolerances[case.dtype]:
                record['skipped'] = f'wrong: differs from the reference by {error:.2g}'
        # Whatever a library raises, the other cases go on.
        except Exception as error:
            record['skipped'] = _reason(error)
        bar.update()
        yield record


def _reference(sweep: Sweep, case: Case, inputs: Inputs) -> list[np.ndarray]:
    """The output, and gradients, that float32 has for numbers of the case's precision."""
    function = patterns.build_reference(case.kind, sweep)
    return runners.prepare_jax(function, inputs.rounded(case.dtype), 'float32', case.mode).outputs()


def _error(output: np.ndarray, expected: np.ndarray) -> float:
    if output.shape != expected.shape:
        raise ValueError(f'has shape {output.shape}; expected {expected.shape}')
    return float(np.abs(output - expected).max() / max(1.0, np.abs(expected).max()))


def _reason(error: Exception) -> str:
    """An exception in a line."""
    text = ' '.join(str(error).split())
    text = text if len(text) <= 200 else f'{text[:200]} …'
    return text if isinstance(error, NotAvailableError) else f'{type(error).__name__}: {text}'


def _measure(
    sweep: Sweep,
    length: int,
    every: list[Case],
    checks: list[dict],
    finished: list[dict],
    bar: tqdm,
) -> dict:
    """Times all cases that pass, run and fit at a length."""
    inputs = draw_inputs(sweep, length)
    # Every length's rounds measure the rate of the device as well.
    ready = {dtype: runners.prepare_matmul(sweep.matmul_size, dtype) for dtype in sweep.dtypes}
    estimates = {dtype: _warm_up(runner, sweep) for dtype, runner in ready.items()}
    records = {}
    for case, check in zip(every, checks, strict=True):
        records[case] = case._asdict()
        try:
            if 'skipped' in check:
                raise NotAvailableError(check['skipped'])
            _foresee(sweep, case, length, finished)
            runner = peers.prepare(case, sweep, inputs)
            estimates[case] = _warm_up(runner, sweep)
            records[case] |= {
                'flops': patterns.flops(case.kind, sweep, length, case.mode),
                'peak_bytes': runner.peak_bytes(),
                'notes': runner.notes,
            }
            ready[case] = runner
        except Exception as error:
            records[case]['skipped'] = _reason(error)
        bar.update()
    calls = {
        case: timing.calls_per_round(seconds, sweep.min_ms / 1e3)
        for case, seconds in estimates.items()
    }
    seconds = timing.interleaved(
        {case: ready[case].run for case in ready},
        calls,
        rounds=sweep.rounds,
        pause=sweep.pause_ms / 1e3,
        on_measured=bar.update,
    )
    for case in ready:
        if case in records:
            records[case] |= {'seconds': seconds[case], 'calls_per_round': calls[case]}
    matmul = {
        dtype: {'flops': 2.0 * sweep.matmul_size**3, 'seconds': seconds[dtype]}
        for dtype in sweep.dtypes
    }
    return {
        'length': length,
        'git_revision': git_revision(),
        'matmul': matmul,
        'cases': list(records.values()),
    }


def _foresee(sweep: Sweep, case: Case, length: int, finished: list[dict]) -> None:
    """Refuses a case that would take too long by what the last shorter length took."""
    for record in reversed(finished):
        earlier = next(x for x in record['cases'] if x.items() >= case._asdict().items())
        if 'seconds' not in earlier:
            continue
        if case.implementation in ('reference', 'jax_xla'):
            growth = (length / record['length']) ** 2
        else:
            growth = patterns.flops(case.kind, sweep, length, case.mode) / earlier['flops']
        seconds = growth * float(np.median(earlier['seconds']))
        if seconds > sweep.time_limit_s:
            raise NotAvailableError(
                f'about {seconds:,.0f} s a call, over the limit of {sweep.time_limit_s:g} s'
            )
        return


def _warm_up(runner: Runner, sweep: Sweep) -> float:
    """Calls a case twice, if it fits; returns the seconds of the second."""
    limit = sweep.memory_limit_gib * 2**30 or _memory()
    if (runner.needed_bytes or 0) > limit:
        raise NotAvailableError(
            f'needs {runner.needed_bytes / 2**30:,.1f} GiB, over the limit of '
            f'{limit / 2**30:,.1f} GiB'
        )
    first = timing.seconds_per_call(runner.run, 1)
    seconds = first if first > sweep.time_limit_s else timing.seconds_per_call(runner.run, 1)
    if seconds > sweep.time_limit_s:
        raise NotAvailableError(
            f'{seconds:,.0f} s a call, over the limit of {sweep.time_limit_s:g} s'
        )
    return seconds


def _memory() -> float:
    """What a case may take, bytes."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return _MEMORY_SHARE * stats['bytes_limit']
    return _MEMORY_SHARE * os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
