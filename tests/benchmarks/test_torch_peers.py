"""PyTorch's attention under our masks and permutations."""

import importlib.util
import shutil

import pytest

from sa_jax.benchmarks.settings import Sweep
from sa_jax.benchmarks.sweep import run_sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec('torch') is None, reason='needs PyTorch'),
    pytest.mark.skipif(shutil.which('g++') is None, reason='torch.compile needs a compiler'),
]


@pytest.mark.parametrize('is_causal', [True, False])
def test_every_peer_agrees_with_the_reference(tmp_path, is_causal):
    sweep = Sweep(
        lengths=(64,),
        kinds=('full', 'sliding_window', 'sliding_window_two_sided', 'stochastic'),
        peers=('torch_sdpa', 'torch_flex'),
        heads=4,
        kv_heads=2,
        head_dim=16,
        window=33,
        is_causal=is_causal,
        rounds=1,
        check_length=256,
        matmul_size=16,
        min_ms=0.0,
    )
    figures = run_sweep(sweep, tmp_path)
    errors = {
        (x['kind'], x['mode']): x.get('error', x.get('skipped'))
        for x in figures['checks']
        if x['implementation'].startswith('torch')
    }
    # The forward of five and the backward of SDPA; FlexAttention has none on a CPU.
    measured = [x for x in figures['lengths'][0]['cases'] if 'seconds' in x]
    measured = [x for x in measured if x['implementation'].startswith('torch')]
    assert len(measured) == 6, errors
    for case in measured:
        if case['implementation'] == 'torch_flex':
            assert case['notes']['block_mask_s'] > 0
