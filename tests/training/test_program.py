"""What a run compiles for the devices at hand."""

import jax
import numpy as np
import pytest

from sa_jax.training.program import build_program


def test_an_open_data_axis_takes_the_devices_that_divide_the_batch(tiny):
    assert jax.device_count() == 8
    assert (
        build_program(tiny(training__gradient_accumulation=1, training__batch_size=4)).mesh.size
        == 4
    )
    assert (
        build_program(tiny(training__gradient_accumulation=1, training__batch_size=8)).mesh.size
        == 8
    )
    sharded = build_program(
        tiny(training__gradient_accumulation=1, training__batch_size=6, mesh__fsdp=2)
    )
    assert dict(sharded.mesh.shape) == {'data': 3, 'fsdp': 2, 'tensor': 1, 'sequence': 1}


def test_fixed_mesh_sizes_are_not_changed(tiny):
    with pytest.raises(ValueError, match='rows of a microbatch'):
        build_program(tiny(training__gradient_accumulation=1, training__batch_size=4, mesh__data=8))


def test_a_run_that_keeps_its_permutations_is_evaluated_under_them(tiny):
    rows = np.ones((8, 64), np.int32)
    batch = dict.fromkeys(('inputs', 'targets', 'segment_ids'), rows) | {
        'positions': np.arange(64, dtype=np.int32) * rows,
        'weights': np.ones((8, 64), np.float32),
    }

    def held_out(**changes):
        program = build_program(tiny(**changes), jax.devices()[:1])
        token_bytes = np.ones(258, np.int64)
        return program.evaluate(program.init(), lambda: [batch], token_bytes=token_bytes, draws=2)

    assert held_out()['draws'] == 2
    assert held_out(training__fresh_permutations=False)['draws'] == 1
