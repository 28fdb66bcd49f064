"""What published models take: counted, and compiled for a described card."""

from pathlib import Path

import jax
import pytest

from sa_jax.report import gpu_compile
from sa_jax.report.gpu_compile import CARDS, Compiled, compile_for
from sa_jax.report.model_memory import (
    build_decode,
    build_prefill,
    cache_bytes,
    describe,
    parameter_bytes,
    programs,
    read_config,
    table,
)

CONFIGS = Path(__file__).parents[2] / 'configs' / 'pretrained'
DENSE, SPARSE = str(CONFIGS / 'qwen3_8b.json'), str(CONFIGS / 'qwen3_30b_a3b.json')
GIB = 2**30
SIZES = {'context': 32768, 'new_tokens': 1024}


@pytest.mark.parametrize(
    ('path', 'parameters', 'bytes_per_token'),
    # Two bytes for keys and values of every layer, kv head and channel.
    [(DENSE, 8.19e9, 2 * 2 * 36 * 8 * 128), (SPARSE, 30.53e9, 2 * 2 * 48 * 4 * 128)],
    ids=['8B', '30B-A3B'],
)
def test_sizes(path, parameters, bytes_per_token):
    config = read_config(path)
    assert parameter_bytes(config) == pytest.approx(2 * parameters, rel=1e-3)
    assert cache_bytes(config, 1000) == 1000 * bytes_per_token
    _, (_, _, cache, _) = build_decode(path, **SIZES)
    assert 2 * cache.keys.size * 2 == cache_bytes(config, 33792)
    assert cache.keys.dtype == cache.values.dtype == 'bfloat16'


def test_patterns_are_matched_on_the_effective_window():
    with pytest.raises(ValueError, match='effective_window = 7 for moba'):
        build_prefill(DENSE, 'moba', 7, **SIZES)


def test_table():
    work = programs([DENSE], ['sa'], effective_window=256, **SIZES)
    card = CARDS['h200']
    compiled = [
        Compiled('prefill sa', (), 16 * GIB, 4 * GIB, 2 * GIB),
        Compiled('decode', (), 100 * GIB, 60 * GIB, GIB, aliased=20 * GIB),
        Compiled('decode many tokens', (), 30 * GIB, 2 * GIB, GIB),
    ]
    rows = [describe(*x, card) for x in zip(work, compiled, strict=True)]
    rows.append(rows[0] | {'error': 'RESOURCE_EXHAUSTED:\na | b'})
    cells = [[x.strip() for x in line.split('|')] for line in table(rows, card).splitlines()[4:]]
    assert cells[0][1:-1] == [
        'qwen3_8b',
        'prefill sa',
        '15.26',
        '4.64',
        '2.00',
        '22.00',
        '117.0',
    ]
    assert cells[1][5:-1] == ['1.00', '141.00', 'does not fit']
    assert cells[2][2] == 'decode many tokens'
    assert cells[3][5] == 'not compiled: RESOURCE_EXHAUSTED: a / b'


@pytest.mark.slow
@pytest.mark.skipif(gpu_compile.missing() is not None, reason=str(gpu_compile.missing()))
@pytest.mark.parametrize('path', [DENSE, SPARSE], ids=['8B', '30B-A3B'])
def test_fits_one_card_at_32k_tokens(path):
    work = programs([path], ['full', 'sa'], effective_window=256, **SIZES)
    config = read_config(path)
    cache = cache_bytes(config, 33792)
    for program, compiled in zip(work, compile_for(CARDS['h200'], work), strict=True):
        parameters, name = parameter_bytes(config), program.name
        assert compiled.error is None, name
        assert compiled.peak <= 139 * GIB, name
        # Nothing of the parameters' or the cache's size beside them.
        if program.options.get('separate'):
            _, (_, layers, *_) = build_decode(**program.options)
            parameters += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers))
        assert compiled.peak < parameters + cache + 3 * GIB, name
        is_prefill = program.name.startswith('prefill')
        assert ('forward_kernel' in [x.name for x in compiled.kernels]) == is_prefill, name
        if not is_prefill:
            assert compiled.aliased >= cache, name
            # A layer is not cut out of the experts' weights.
            assert compiled.temporaries < 1.1 * GIB, name
