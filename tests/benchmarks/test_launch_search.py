"""The search of the launch table, with a bench made up for it."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from sa_jax.attention import pallas_gpu
from sa_jax.attention.launch import TABLE, Launch, Tile, read_table
from sa_jax.benchmarks import launch_search
from sa_jax.benchmarks.launch_search import PARTS, Workload, build, save, search, variants
from sa_jax.benchmarks.tuning import Journal

ROOT = Path(__file__).parents[2]
START = Launch(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))
ENTRIES = [('bfloat16', 64), ('float32', 128)]


class Bench:
    """Wide tiles are fast, permuted copies slow, three stages impossible; compiling takes 1 s."""

    now = 0.0

    def __init__(self, workload, dtype, head_dim, part, incumbent):
        self.part = part

    def prepare(self, launch):
        Bench.now += 1.0
        if self.part != 'fused' and getattr(launch, self.part).stages == 3:
            raise RuntimeError('RESOURCE_EXHAUSTED')
        return launch

    def time_once(self, launch):
        tiles = (launch.forward, launch.dq, launch.dkv)
        seconds = sum(1.0 / (tile.block_q * tile.block_k * tile.stages) for tile in tiles)
        seconds *= 1 if launch.fused else 2
        Bench.now += seconds
        return seconds


def run(path, journal, seconds=10_000, card='sm99', make_bench=Bench):
    return search(
        path,
        card,
        ENTRIES,
        Workload(),
        journal,
        seconds=seconds,
        workers=2,
        make_bench=make_bench,
        clock=lambda: Bench.now,
    )


@pytest.fixture
def table(tmp_path):
    path = tmp_path / 'table.json'
    path.write_text(TABLE.read_text())
    return path


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / 'journal.jsonl', {})


def test_variants_differ_in_one_part():
    for part in PARTS[:3]:
        every = variants(START, part)
        assert len(every) == len(set(every)) == 4 * 4 * 2 * 4 - 1
        assert START not in every
        for launch in every:
            restored = dataclasses.replace(launch, **{part: getattr(START, part)})
            assert restored == START
    assert variants(START, 'fused') == [dataclasses.replace(START, fused=False)]


def test_winners_go_into_the_cards_entries_only(table, journal):
    before = read_table(table)
    changes = run(table, journal)
    after = read_table(table)
    best = Tile(128, 128, 4, 4)
    for entry in ENTRIES:
        found = after['sm99', *entry]
        for part in PARTS[:3]:
            tile = getattr(found, part)
            assert dataclasses.replace(tile, warps=4) == best, (entry, part)
        assert found.fused
    assert len(changes) == 6
    assert all('-> 128 × 128, ' in line for line in changes)
    # The new card has all the entries that calls may ask for; nobody else's changed.
    assert {key: after[key] for key in before} == before
    others = {key[1:] for key in before if key[0] == 'other'}
    assert {key[1:] for key in after if key[0] == 'sm99'} == others
    assert after['sm99', 'float32', 64] == before['other', 'float32', 64]


def test_a_search_goes_on_where_it_was_stopped(table, journal, tmp_path):
    class Stopped(Bench):
        def prepare(self, launch):
            if self.part == 'dkv':
                raise KeyboardInterrupt
            return super().prepare(launch)

    with pytest.raises(KeyboardInterrupt):
        run(table, journal, make_bench=Stopped)
    journal.close()
    kept = read_table(table)['sm99', 'bfloat16', 64]
    assert kept.forward.block_q == kept.dq.block_q == 128
    again = Journal(tmp_path / 'journal.jsonl', {})
    assert sorted(again.winners) == ['bfloat16 64 dq', 'bfloat16 64 forward']
    changes = run(table, again)
    assert [line.split(':')[0] for line in changes] == [
        'bfloat16 64 dkv',
        'float32 128 forward',
        'float32 128 dq',
        'float32 128 dkv',
    ]


def test_ends_when_its_time_is_up(table, journal):
    start = Bench.now
    run(table, journal, seconds=80)
    # One candidate may be under way when a part's time is up, and the incumbent always runs.
    assert Bench.now - start < 80 + 3 * len(PARTS) * len(ENTRIES)
    assert len(journal.winners) == len(PARTS) * len(ENTRIES)


@pytest.mark.slow
def test_a_real_bench_in_the_interpreter(table, tmp_path, monkeypatch):
    options = functools.partial(pallas_gpu.Options, interpret=True)
    monkeypatch.setattr(launch_search.pallas_gpu, 'Options', options)
    choices = {'block_q': (16, 32), 'block_k': (32,), 'warps': (4,), 'stages': (1,)}
    monkeypatch.setattr(launch_search, 'CHOICES', choices)
    monkeypatch.setattr(launch_search, 'PARTS', ('forward', 'dq'))
    build = launch_search.build

    def wrong_in_dq(workload, form, part, launch):
        function = build(workload, form, part, launch)
        if launch.dq.block_q != 16:
            return function
        return jax.jit(lambda *inputs: jax.tree.map(lambda x: 1.1 * x, function(*inputs)))

    monkeypatch.setattr(launch_search, 'build', wrong_in_dq)
    journal = Journal(tmp_path / 'journal.jsonl', {})
    entry, workload = ('bfloat16', 64), Workload(100, 2, 1, 20, ('stochastic',))
    save(table, 'sm99', *entry, Launch(*3 * (Tile(32, 32, 4, 1),)))
    search(table, 'sm99', [entry], workload, journal, seconds=1000, workers=1)
    assert sorted(journal.winners) == ['bfloat16 64 dq', 'bfloat16 64 forward']
    found = read_table(table)['sm99', *entry]
    assert found.forward.block_q in (16, 32)
    assert found.dq == found.dkv == Tile(32, 32, 4, 1)
    records = [json.loads(x) for x in (tmp_path / 'journal.jsonl').read_text().splitlines()]
    (failed,) = (x for x in records if x.get('event') == 'failed')
    assert failed['place'] == 'bfloat16 64 dq'
    assert failed['why'].startswith('ValueError: wrong numbers: off by 1.0e-01')


@pytest.mark.parametrize('form', launch_search.FORMS)
@pytest.mark.parametrize('part', PARTS)
def test_calls_lower_for_a_gpu(form, part):
    workload = Workload(length=256, heads=2, kv_heads=1, window=64)
    call = build(workload, form, part, dataclasses.replace(START, fused=part != 'fused'))
    inputs = jax.eval_shape(lambda: launch_search.inputs(workload, 'bfloat16', 64))
    text = lower_for_gpu(call, *inputs)
    # Some versions of JAX leave it to XLA to drop the kernel of dk and dv where only dq is taken.
    kernels = {'forward': {1}, 'dq': {2, 3}}.get(part, {3})
    assert text.count('__gpu$xla.gpu.triton') in kernels


def lower_for_gpu(function, *arguments):
    """The StableHLO that a GPU without a name gets."""
    if jax.__version_info__ < (0, 11):
        return function.trace(*arguments).lower(lowering_platforms=('cuda',)).as_text()
    device = AbstractDevice(device_kind='NVIDIA H200', num_cores=None, platform='gpu')
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return function.trace(*arguments).lower(lowering_platforms=('cuda',)).as_text()


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_what_it_would_try(tmp_path):
    command = [sys.executable, '-m', 'experiments.tune_kernel', f'--workdir={tmp_path}']
    options = {'cwd': ROOT, 'env': os.environ | {'XLA_FLAGS': ''}, 'text': True}
    done = subprocess.run(command, capture_output=True, check=False, **options)
    assert done.returncode != 0
    assert 'tuning times the kernels on an NVIDIA GPU, and JAX has cpu' in done.stderr
    done = subprocess.run(
        [*command, '--dry_run', '--dtypes=bfloat16', '--head_dims=64'],
        capture_output=True,
        check=True,
        **options,
    )
    lines = done.stdout.splitlines()
    assert [line.split(':')[0] for line in lines[1:]] == [f'bfloat16 64 {part}' for part in PARTS]
    assert lines[1].endswith('against 127 others')
    assert list(tmp_path.iterdir()) == []
