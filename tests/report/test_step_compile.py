"""Training steps compiled for clusters that aren't here."""

import jax
import pytest

from configs.pretrain import demo, paper_360m
from sa_jax.report import gpu_compile, step_compile
from sa_jax.report.collectives import Collective
from sa_jax.report.gpu_compile import CARDS, Compiled
from sa_jax.training.program import build_program

GIB = 2**30


def parameters(config):
    return build_program(config, jax.devices()[:1]).abstract_state.params


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
    size = 4 * sum(x.size for x in jax.tree.leaves(parameters(demo.get_config('swa'))))
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
    assert sent['all-reduce']['bytes'] == pytest.approx(size, rel=1e-4)
    # A quarter of the parameters and of both moments on each card, which gathers the rest.
    assert shards.aliased < 0.3 * copies.aliased
    lookup = 4 * parameters(demo.get_config('swa'))['embedding'].size  # is done in the shards
    gathered = step_compile.describe(shards)['messages']['all-gather']['bytes']
    assert size - lookup <= gathered <= 2 * size


@pytest.mark.slow
@pytest.mark.skipif(gpu_compile.missing() is not None, reason=str(gpu_compile.missing()))
def test_the_papers_batch_fits_eight_cards_and_nothing_needless_is_sent():
    step = step_compile.program(
        'configs/pretrain/paper_360m.py', 'sa_swa', '1x1x8', {'training.gradient_accumulation': 1}
    )
    (compiled,) = gpu_compile.compile_for(CARDS['h200'], [step])
    assert compiled.error is None
    assert compiled.peak < 0.9 * CARDS['h200'].memory
    params = parameters(paper_360m.get_config('sa_swa'))
    attention = params['layers']['attention']
    gates = attention['path_gate_kernel'].size + attention['path_gate_bias'].size
    layers = params['layers']
    norms = (layers['attention_norm'], layers['feed_forward_norm'], params['final_norm'])
    # Gradients in bfloat16; in float32 those of gates, norms and the embedding's two uses together.
    exact = gates + sum(x.size for x in norms) + params['embedding'].size
    total = sum(x.size for x in jax.tree.leaves(params))
    expected = 2 * (total - exact) + 4 * exact
    sent = step_compile.describe(compiled)['messages']
    assert set(sent) == {'all-reduce'}
    assert sent['all-reduce']['bytes'] == pytest.approx(expected, rel=1e-5)
