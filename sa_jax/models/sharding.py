"""Where arrays live: parameters by name, activations by axis, on a mesh.

Its axes are data, fsdp, tensor and sequence.

Two tables say it all. `PARAMETER_AXES` names the axes of each parameter, `MESH_AXES` the mesh
axes that split each of them. The batch is split over data and fsdp together; parameters and
their optimizer state over fsdp and tensor, and copied over data and sequence; activations also over
sequence, by their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PARAMETER_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        'embedding': ('vocab', 'embed'),
        'layers/attention_norm': ('layers', 'norm'),
        'layers/attention/query': ('layers', 'embed', 'heads', 'head_dim'),
        'layers/attention/key': ('layers', 'embed', 'kv_heads', 'head_dim'),
        'layers/attention/value': ('layers', 'embed', 'kv_heads', 'head_dim'),
        'layers/attention/output': ('layers', 'heads', 'head_dim', 'embed'),
        'layers/attention/query_norm': ('layers', 'norm'),
        'layers/attention/key_norm': ('layers', 'norm'),
        'layers/attention/path_gate_kernel': ('layers', 'embed', 'paths', 'heads', 'head_dim'),
        'layers/attention/path_gate_bias': ('layers', 'paths', 'heads', 'head_dim'),
        'layers/feed_forward_norm': ('layers', 'norm'),
        'layers/feed_forward/gate': ('layers', 'embed', 'mlp'),
        'layers/feed_forward/up': ('layers', 'embed', 'mlp'),
        'layers/feed_forward/down': ('layers', 'mlp', 'embed'),
        'layers/experts/router': ('layers', 'embed', 'router'),
        'layers/experts/gate': ('layers', 'experts', 'embed', 'expert_mlp'),
        'layers/experts/up': ('layers', 'experts', 'embed', 'expert_mlp'),
        'layers/experts/down': ('layers', 'experts', 'expert_mlp', 'embed'),
        'final_norm': ('norm',),
        'unembedding': ('vocab', 'embed'),
    }
)

MESH_AXES: Mapping[str, str | tuple[str, ...] | None] = MappingProxyType(
    {
        'batch': ('data', 'fsdp'),
        'tokens': 'sequence',
        'vocab': 'tensor',
        'embed': 'fsdp',
        'heads': 'tensor',
        'kv_heads': 'tensor',
        'mlp': 'tensor',
        'experts': 'tensor',
        'expert_mlp': None,
        'layers': None,
        'head_dim': None,
        'norm': None,
        'paths': None,
        'router': None,
    }
)


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes data, fsdp, tensor and sequence.

    Args:
      data: Copies of the parameters, each with its share of the batch.
      fsdp: Ways the parameters' hidden axis is split, each with its share of the batch.
      tensor: Ways the heads, the feed-forward layer and the vocabulary are split.
      sequence: Ways the tokens of each row are split.
      devices: The devices to use, all by default.

    One of the sizes may be -1: whatever the others leave.

    Returns:
      The mesh. Its axes are automatic: XLA places what the program doesn't say.

    Raises:
      ValueError: The sizes don't multiply to the number of devices.
    """
    count = len(jax.devices() if devices is None else devices)
    sizes = {'data': data, 'fsdp': fsdp, 'tensor': tensor, 'sequence': sequence}
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f'Mesh sizes must be at least 1, or -1 for the rest; got {sizes}.')
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f'Only one mesh size can be -1, got {sizes}; set the others.')
    if open_axes:
        rest = math.prod(size for size in sizes.values() if size != -1)
        if count % rest:
            raise ValueError(
                f'{count} devices cannot be split into a mesh of {sizes}: {rest} does not divide '
                f'{count}. Choose sizes that do.'
            )
        sizes[open_axes[0]] = count // rest
    if math.prod(sizes.values()) != count:
        raise ValueError(
            f'The mesh {sizes} needs {math.prod(sizes.values())} devices, but there are {count}. '
            'Choose sizes that multiply to it, or set one to -1.'
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 4, devices=devices
    )


def partition_spec(*axes: str | None) -> PartitionSpec:
    """The partition of an array with the given logical axes; None is an axis nobody splits."""
    return PartitionSpec(*(None if axis is None else MESH_AXES[axis] for axis in axes))


def constrain(x: Array, mesh: Mesh | None, *axes: str | None) -> Array:
    """Places an activation by its logical axes; without a mesh, returns it as it is."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(*axes)))


def parameter_shardings(abstract_state: Any, mesh: Mesh) -> Any:
    """The shardings of parameters, or of any state whose leaves mirror them.

    A leaf is known by the end of its path, so that an optimizer's moments
    (`0/mu/layers/attention/query`) are placed as their parameters. Scalars are copied everywhere.

    Args:
      abstract_state: A tree of arrays or `jax.ShapeDtypeStruct`: an `nnx.State`, the plain dict
        of one, an optax state over either, or a structure of these.
      mesh: The mesh, of `make_mesh`.

    Returns:
      A tree of `NamedSharding` of the same structure.

    Raises:
      ValueError: A leaf isn't in the table, has another rank than its entry, or an axis can't
        be split evenly.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _leaf_sharding(
            jax.tree_util.keystr(path, simple=True, separator='/'), leaf.shape, mesh
        ),
        abstract_state,
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays whose first axis is the batch."""
    return NamedSharding(mesh, partition_spec('batch'))


def check_divisible(name: str, size: int, axis: str, mesh: Mesh) -> None:
    """Raises a ValueError unless the mesh splits a logical axis of this size evenly."""
    mesh_axes = MESH_AXES[axis]
    if mesh_axes is None:
        return
    mesh_axes = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
    parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes)
    if size % parts:
        raise ValueError(
            f'{name} = {size} cannot be split evenly over the mesh axes {mesh_axes} of total '
            f'size {parts}; change it to a multiple of {parts}, or choose another mesh.'
        )


def _leaf_sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    if not shape:
        return NamedSharding(mesh, PartitionSpec())
    # In an `nnx.State` a path ends in the variable's own field, `value`.
    matches = (
        axes
        for key, axes in PARAMETER_AXES.items()
        if f'/{name}'.endswith((f'/{key}', f'/{key}/value'))
    )
    axes = next(matches, None)
    if axes is None:
        raise ValueError(
            f'No axes are known for {name!r} of shape {shape}; add it to PARAMETER_AXES.'
        )
    if len(axes) != len(shape):
        raise ValueError(f'{name!r} should have the axes {axes}, but its shape is {shape}.')
    for axis, size in zip(axes, shape, strict=True):
        check_divisible(f'{name!r}: axis {axis!r}', size, axis, mesh)
    return NamedSharding(mesh, partition_spec(*axes))
