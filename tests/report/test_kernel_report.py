"""The kernels' budgets, compiled for described cards, and the report's table."""

import functools

import pytest

from sa_jax.report import gpu_compile
from sa_jax.report.gpu_compile import CARDS, Compiled, Kernel, compile_for
from sa_jax.report.kernel_report import KERNELS, programs, table

needs_compiler = pytest.mark.skipif(
    gpu_compile.missing() is not None, reason=str(gpu_compile.missing())
)
SIZES = {'length': 4096, 'heads': 8, 'kv_heads': 4, 'window': 256}
HEADS_BYTES = 4096 * 8 * 64 * 2  # queries in bfloat16 at head_dim 64, the smallest here


def test_table():
    kernels = (
        Kernel('forward_kernel', 123, 0, 0, threads=128, shared_memory=41216),
        Kernel('loop_fusion', 8, 0, 0, threads=128, shared_memory=0),
    )
    reports = {
        'a100': [Compiled('stochastic bfloat16 64', error='RESOURCE_EXHAUSTED:\na | b')],
        'h200': [Compiled('stochastic bfloat16 64', kernels, 2**20, 2**20, 2**19)],
    }
    rows = [[x.strip() for x in line.split('|')] for line in table(reports).splitlines()]
    assert rows[2][1:4] == [
        'a100',
        'stochastic bfloat16 64',
        'not compiled: RESOURCE_EXHAUSTED: a / b',
    ]
    assert [rows[3][x] for x in (1, 3, 5, 6, 7, 8)] == [
        'h200',
        'forward',
        '123',
        '0, 0',
        '40.2',
        '227',
    ]
    assert rows[-1][1:5] == ['h200', 'stochastic bfloat16 64', '1.0', '0.5']
    assert 'loop_fusion' not in table(reports)


@functools.cache
def compiled(card, dtype):
    """What `card` makes of both forms; of the permuted one, the larger, for float32."""
    forms = ('sliding_window', 'stochastic') if dtype == 'bfloat16' else ('stochastic',)
    return compile_for(CARDS[card], programs(forms, [dtype], **SIZES))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('card', ['a10', 'a100', 'h200'])
def test_every_entry_of_the_launch_table_fits(card, dtype):
    # The A10 takes the entries of cards that the table doesn't name, and has the least memory.
    for program in compiled(card, dtype):
        assert program.error is None, program.name
        kernels = {x.name: x for x in program.kernels if x.name in KERNELS}
        assert sorted(kernels) == sorted(KERNELS), program.name
        for kernel in kernels.values():
            assert 0 < kernel.shared_memory <= CARDS[card].shared_memory_limit, kernel


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize('card', ['a100', 'h200'])
def test_bfloat16_spills_no_registers(card):
    spilling = [
        (program.name, kernel)
        for program in compiled(card, 'bfloat16')
        for kernel in program.kernels
        if not program.name.endswith('256') and kernel.spill_stores + kernel.spill_loads > 0
    ]
    assert spilling == []


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize('card', ['a100', 'h200'])
def test_no_permuted_copy_exists(card):
    # Forward and backward hold statistics and indices beside arguments and outputs.
    for program in compiled(card, 'bfloat16'):
        assert program.error is None, program.name
        assert program.temporaries < HEADS_BYTES / 4, program.name
