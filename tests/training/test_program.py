"""What a run compiles for the devices at hand."""

import jax
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
    assert dict(sharded.mesh.shape) == {'data': 3, 'fsdp': 2, 'tensor': 1}


def test_fixed_mesh_sizes_are_not_changed(tiny):
    with pytest.raises(ValueError, match='rows of a microbatch'):
        build_program(tiny(training__gradient_accumulation=1, training__batch_size=4, mesh__data=8))
