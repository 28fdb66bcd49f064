"""Sweeps over tiny lengths: what is kept, refused, left out and caught."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import sa_jax
from sa_jax.benchmarks import peers, runners
from sa_jax.benchmarks.settings import Sweep
from sa_jax.benchmarks.sweep import AnotherSweepError, run_sweep

SWEEP = Sweep(
    lengths=(32, 64),
    kinds=('full',),
    peers=('jax_xla',),
    modes=('forward',),
    heads=2,
    kv_heads=1,
    head_dim=8,
    window=9,
    chunk_size=8,
    block_size=8,
    rounds=2,
    min_ms=0.0,
    pause_ms=0.0,
    check_length=40,
    matmul_size=16,
)


def skipped(figures):
    """The reasons of what was left out, by length, kind and implementation."""
    return {
        (record['length'], x['kind'], x['implementation']): x['skipped']
        for record in figures['lengths']
        for x in record['cases']
        if 'skipped' in x
    }


@pytest.mark.slow
def test_a_sweep_measures_and_continues(tmp_path, monkeypatch):
    figures = run_sweep(SWEEP, tmp_path)
    assert not skipped(figures)
    assert [x['length'] for x in figures['lengths']] == [32, 64]
    for record in figures['lengths']:
        assert len(record['matmul']['float32']['seconds']) == 2
        for case in record['cases']:
            assert len(case['seconds']) == 2
            assert min(case['seconds']) > 0
            assert case['peak_bytes'] > 0
    # Two products of 2 heads, 8 channels and a multiply-add as 2 for each of 32 · 33 / 2 pairs.
    assert figures['lengths'][0]['cases'][0]['flops'] == 2 * 2 * 2 * 8 * 32 * 33 / 2
    assert all(x['error'] < 1e-5 for x in figures['checks'])

    # Without the second length, only that one is measured again.
    (tmp_path / 'lengths' / '64.json').unlink()
    prepared = []
    prepare = peers.prepare

    def counted(case, sweep, inputs):
        prepared.append(inputs.query.shape[1])
        return prepare(case, sweep, inputs)

    monkeypatch.setattr(peers, 'prepare', counted)
    again = run_sweep(SWEEP, tmp_path)
    assert prepared == [64] * 2
    assert again['lengths'][0] == figures['lengths'][0]
    assert again['lengths'][1] != figures['lengths'][1]


def test_another_sweep_in_the_same_folder_is_refused(tmp_path):
    sweep = dataclasses.replace(SWEEP, lengths=(32,), kinds=('full',), peers=())
    run_sweep(sweep, tmp_path)
    other = dataclasses.replace(sweep, window=5, rounds=3)
    with pytest.raises(AnotherSweepError, match=r'(?s)rounds: 2 -> 3.*window: 9 -> 5'):
        run_sweep(other, tmp_path)
    stored = json.loads((tmp_path / 'config.json').read_text())
    stored['versions']['jax'] = '0.1'
    (tmp_path / 'config.json').write_text(json.dumps(stored))
    with pytest.raises(AnotherSweepError, match=r"versions\.jax: '0\.1' ->"):
        run_sweep(sweep, tmp_path)


def test_what_cannot_run_is_left_out_with_the_reason(tmp_path):
    sweep = dataclasses.replace(
        SWEEP,
        lengths=(32,),
        kinds=('full', 'unheard_of', 'moba'),
        implementations=('default', 'slow'),
        peers=('jax_cudnn',),
        is_causal=False,
    )
    reasons = skipped(run_sweep(sweep, tmp_path))
    assert (32, 'full', 'default') not in reasons
    assert "'slow'" in reasons[32, 'full', 'slow']
    assert reasons[32, 'full', 'jax_cudnn'] == 'cuDNN needs an NVIDIA GPU'
    assert "unknown attention 'unheard_of'" in reasons[32, 'unheard_of', 'default']
    assert 'causal' in reasons[32, 'moba', 'default']


@pytest.mark.slow
def test_limits_of_memory_and_time(tmp_path, monkeypatch):
    sweep = dataclasses.replace(SWEEP, kinds=('full',), memory_limit_gib=2e-5, matmul_size=4)
    reasons = skipped(run_sweep(sweep, tmp_path / 'memory'))
    # The dense logits of 2 heads take 8 KiB at 32 tokens and 32 KiB at 64.
    assert 'over the limit of 0.0 GiB' in reasons[64, 'full', 'jax_xla']
    prepare = peers.prepare

    def slow(case, sweep, inputs):
        # What a call takes is made up: a tenth of a second at 32 tokens.
        runner = prepare(case, sweep, inputs)
        monkeypatch.setattr('time.perf_counter', iter(np.arange(1e6) / 10).__next__)
        return runner

    monkeypatch.setattr(peers, 'prepare', slow)
    sweep = dataclasses.replace(SWEEP, kinds=('full',), peers=(), time_limit_s=0.3)
    reasons = skipped(run_sweep(sweep, tmp_path / 'time'))
    assert reasons == {(64, 'full', 'default'): 'about 0 s a call, over the limit of 0.3 s'}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_wrong_function_is_not_timed(tmp_path, monkeypatch, dtype):
    attention = sa_jax.sliding_window_attention

    def off_by_one(*arguments, window, implementation, **options):
        window += implementation != 'reference'
        return attention(*arguments, window=window, implementation=implementation, **options)

    monkeypatch.setattr(sa_jax, 'sliding_window_attention', off_by_one)
    sweep = Sweep(kinds=('sliding_window',), peers=(), lengths=(32,), dtypes=(dtype,), rounds=1)
    sweep = dataclasses.replace(sweep, modes=('forward',), matmul_size=16)
    reasons = skipped(run_sweep(sweep, tmp_path))
    assert reasons[32, 'sliding_window', 'default'].startswith('wrong: differs from the reference')


def test_kinds_of_other_packages_are_measured_and_checked(tmp_path, monkeypatch):
    from sa_jax.attention import registry

    monkeypatch.setattr(registry, '_KINDS', dict(registry._KINDS))
    full = sa_jax.get_attention('full')
    sa_jax.register_attention('theirs', full.function, mask=full.mask)
    sa_jax.register_attention('wrong', lambda q, k, v, context: 0 * q, mask=full.mask)
    sa_jax.register_attention('unmasked', lambda q, k, v, context: q)
    sweep = dataclasses.replace(
        SWEEP, kinds=('theirs', 'wrong', 'unmasked'), peers=(), lengths=(32,)
    )
    reasons = skipped(run_sweep(sweep, tmp_path))
    assert (32, 'theirs', 'default') not in reasons
    assert reasons[32, 'wrong', 'default'].startswith('wrong')
    assert 'has no mask' in reasons[32, 'unmasked', 'default']


def test_gradients_are_those_of_a_loss():
    rng = np.random.default_rng(0)
    inputs = runners.Inputs(
        *(rng.standard_normal((1, 3, 1, 2), np.float32) for _ in range(4)), draw=None
    )

    def attention(query, key, value, draw):
        return query * key + jnp.sin(value)

    outputs = runners.prepare_jax(attention, inputs, 'float32', 'forward_backward').outputs()
    query, key, value, gradient = inputs.numbers
    wanted = (query * key + np.sin(value), gradient * key, gradient * query)
    for output, expected in zip(outputs, (*wanted, gradient * np.cos(value)), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5)
