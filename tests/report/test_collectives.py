"""Messages of compiled programs, counted."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sa_jax.report.collectives import Collective, collectives, totals


def compiled_text(body, length=None):
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(body, mesh=mesh, in_specs=P('x'), out_specs=P('x'), check_vma=False)

    def repeat(x):
        return jax.lax.scan(lambda x, _: (sharded(x), None), x, None, length=length)[0]

    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P('x')))
    return jax.jit(repeat if length else sharded).lower(x).compile().as_text()


def test_kinds_and_sizes():
    def body(x):  # [8, 16] on each of eight devices
        whole = jax.lax.all_gather(x, 'x', tiled=True)
        mine = jax.lax.psum_scatter(whole, 'x', tiled=True)
        swapped = jax.lax.all_to_all(mine, 'x', 0, 0, tiled=True)
        moved = jax.lax.ppermute(swapped, 'x', [(i, (i + 1) % 8) for i in range(8)])
        return moved + jax.lax.psum(moved[0, 0], 'x')

    found = collectives(compiled_text(body))
    shard = 8 * 16 * 4
    assert totals(found) == {
        'all-reduce': (1, 4),
        'all-gather': (1, 8 * shard),
        'reduce-scatter': (1, 8 * shard),
        'all-to-all': (1, shard),
        'collective-permute': (1, shard),
    }


def test_loops_count_as_often_as_they_run():
    found = collectives(compiled_text(lambda x: x + jax.lax.psum(x.sum(), 'x'), length=5))
    assert found == [Collective('all-reduce', 4, 5)]


GPU = """
HloModule program

%add (a: bf16[], b: bf16[]) -> bf16[] {
  ROOT %sum = bf16[] add(%a, %b)
}

ENTRY %main (w: bf16[1024,8192]) -> bf16[1024,8192] {
  %start = ((bf16[1024,8192]{1,0}, f32[4]{0}), (bf16[4096,8192]{1,0}, f32[16]{0})) \
all-gather-start(%w, %v), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %done = (bf16[4096,8192]{1,0}, f32[16]{0}) all-gather-done(%start)
  %scatter = ((bf16[4096,8192]{1,0}), bf16[1024,8192]{1,0}) reduce-scatter-start(%done), \
replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %sum-start = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%x), \
replica_groups=[1,8]<=[8], to_apply=%add
  %sums-start = (f32[16]{0}, f32[16]{0}) all-reduce-start(%y, %z), \
replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %scattered = bf16[1024,8192]{1,0} reduce-scatter-done(%scatter)
}
"""


def test_asynchronous_messages():
    gathered = 4096 * 8192 * 2
    assert collectives(GPU) == [
        Collective('all-gather', gathered + 16 * 4, 1),
        Collective('reduce-scatter', gathered, 1),
        Collective('all-reduce', 2 * 16 * 4, 1),
        Collective('all-reduce', 8 * 4, 1),
    ]


@pytest.mark.parametrize(
    ('groups', 'devices'),
    [
        ('{{0,1,2},{3,4,5}}', 3),
        ('[2,4]<=[8]', 4),
        ("mesh['a'=8,'b'=2] {'a','b'}", 16),
        ("mesh['a'=8,'b'=2] {'a':(2)4}", 4),
    ],
)
def test_how_many_devices_take_part(groups, devices):
    text = 'ENTRY %main (x: f32[4]) -> f32[2] {\n  %y = f32[2] reduce-scatter(%x), channel_id=1, '
    text += f'replica_groups={groups}, to_apply=%add\n}}'
    assert collectives(text) == [Collective('reduce-scatter', 8 * devices, 1)]


def test_errors():
    with pytest.raises(ValueError, match='no ENTRY'):
        collectives('')
