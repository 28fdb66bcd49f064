"""Reading the compiler's report, anywhere; compiling for described cards, where JAX's plugin is."""

import importlib.metadata
import os
import re

import jax
import jax.numpy as jnp
import pytest

from sa_jax.report import gpu_compile
from sa_jax.report.gpu_compile import CARDS, Kernel, Program, compile_for, parse_kernels

LOG = """
I0101 subprocess_compilation.cc:313] ptxas x.ptx -o x -arch=sm_80 --warn-on-spills -v
I0101 subprocess_compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_80'
ptxas info    : Function properties for forward
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 153 registers, used 1 barriers, 408 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 86.1 ms
I0101 subprocess_compilation.cc:349] ptxas warning : Registers are spilled to local memory in
 function 'backward', 4096 bytes spill stores, 4200 bytes spill loads
ptxas info    : Compiling entry function 'backward' for 'sm_80'
    64 bytes stack frame, 4096 bytes spill stores, 4200 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
ptxas info    : Compiling entry function 'backward' for 'sm_80'
    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function 'not_launched' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
LAUNCHES = """\
001: kCustomKernel [source | next=2] forward grid: [64, 8, 1] threads: [128, 1, 1]  \
shared_memory: 24832 bytes
002: kCustomKernel [prev=1 | sink] backward grid: [64, 2, 1] threads: [64, 2, 1]  \
shared_memory: 41728 bytes
"""


def test_joins_the_compilers_report_with_the_launches():
    assert parse_kernels(LOG, LAUNCHES) == (
        Kernel('forward', 153, 0, 0, threads=128, shared_memory=24832),
        Kernel('backward', 255, 8, 12, threads=128, shared_memory=41728),
    )


def test_refuses_a_kernel_without_a_report():
    with pytest.raises(ValueError, match=r"launches forward, but ptxas reported only \['backward"):
        parse_kernels(LOG.replace("'forward'", "'other'"), LAUNCHES)


def test_says_what_to_install(monkeypatch):
    versions = {'jax': '1.2.3', gpu_compile.PLUGIN: '1.2.2'}
    monkeypatch.setattr(importlib.metadata, 'version', versions.__getitem__)
    assert "pip install 'jax-cuda13-plugin==1.2.3'" in gpu_compile.missing()
    versions[gpu_compile.PLUGIN] = '1.2.3'
    monkeypatch.setattr(gpu_compile, '_ptxas', lambda: None)
    assert 'no ptxas' in gpu_compile.missing()
    with pytest.raises(
        RuntimeError, match='can compile nothing for NVIDIA H200: there is no ptxas'
    ):
        compile_for(CARDS['h200'], [])


def build_sum(length):
    return jnp.sum, (jax.ShapeDtypeStruct((length,), jnp.float32),)


def build_update(length):
    array = jax.ShapeDtypeStruct((length,), jnp.float32)
    return lambda state, x: {'sum': state['sum'] + x}, ({'sum': array}, array)


def build_crash():
    os.abort()


@pytest.mark.slow
@pytest.mark.skipif(gpu_compile.missing() is not None, reason=str(gpu_compile.missing()))
def test_goes_on_behind_a_program_that_ends_the_compiler():
    programs = [
        Program('first', f'{__name__}:build_sum', {'length': 1024}),
        Program('crash', f'{__name__}:build_crash', {}),
        Program('error', f'{__name__}:build_sum', {}),
        Program('update', f'{__name__}:build_update', {'length': 1024}, donated=(0,)),
        Program('last', f'{__name__}:build_sum', {'length': 2048}),
    ]
    seen = []
    reports = compile_for(CARDS['a100'], programs, on_compiled=seen.append)
    assert seen == reports
    first, crash, error, update, last = reports
    assert first.error is None
    assert first.arguments == 4096
    assert last.arguments == 8192
    assert first.kernels[0].registers > 0
    assert 'exit code -6' in crash.error
    assert error.error.startswith('TypeError')
    assert update.arguments == 2 * update.aliased == 8192
    assert update.outputs - update.aliased < 64  # a tuple's pointers
    assert 8192 <= update.peak < 8192 + 64
    assert re.fullmatch(r'[\d.]+', gpu_compile.ptxas_version())
