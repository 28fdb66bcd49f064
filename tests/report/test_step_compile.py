"""Training steps compiled for clusters that aren't here."""

import pytest

from sa_jax.report import gpu_compile, step_compile
from sa_jax.report.collectives import Collective
from sa_jax.report.gpu_compile import CARDS, Compiled

GIB = 2**30
PARAMETERS = 1_480_000  # of the demo, at least


def test_table():
    sent = (Collective('all-reduce', GIB, 3),)
    compiled = [
        Compiled('sa 1x1x8', (), 2 * GIB, 2 * GIB, GIB, aliased=GIB, collectives=sent),
        Compiled('full 1x1x8', error='RESOURCE_EXHAUSTED'),
    ]
    rows = [step_compile.describe(x) for x in compiled]
    assert rows[0]['messages'] == {'all-reduce': {'count': 3, 'bytes': 3 * GIB}}
    lines = step_compile.table(rows, CARDS['h200']).splitlines()
    assert lines[4] == '| sa 1x1x8 | all-reduce: 3, 3.00 GiB | 1.00 | 1.00 | 4.00 |'
    assert 'not compiled: RESOURCE_EXHAUSTED' in lines[5]


@pytest.mark.slow
@pytest.mark.skipif(gpu_compile.missing() is not None, reason=str(gpu_compile.missing()))
def test_copies_of_a_model_exchange_its_gradients():
    config = 'configs/pretrain/demo.py'
    work = [
        step_compile.program(config, 'swa', topology, {'training.batch_size': 4} | changes)
        for topology, changes in (
            ('1x1x1', {}),
            ('1x1x4', {}),
            ('2x1x2', {'mesh.fsdp': 4, 'mesh.data': 1}),
        )
    ]
    alone, copies, shards = gpu_compile.compile_for(CARDS['h200'], work)
    for compiled in (alone, copies, shards):
        assert compiled.error is None
    assert alone.collectives == ()
    sent = step_compile.describe(copies)['messages']
    assert set(sent) == {'all-reduce'}
    assert sent['all-reduce']['bytes'] >= 4 * PARAMETERS
    # A quarter of the parameters and of both moments on each card, which gathers the rest.
    assert shards.aliased < 0.3 * copies.aliased
    assert step_compile.describe(shards)['messages']['all-gather']['bytes'] >= 4 * PARAMETERS
