"""A run described without running it: parameters, FLOPs, memory, shardings."""

import math
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from sa_jax.models.flops import TRAINING_FACTOR, forward_flops_per_token
from sa_jax.training.optimizer import parameter_name
from sa_jax.training.program import Program, build_program

_MIB = 2**20


def describe(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> str:
    """Describes what a configuration would train, and how much it needs.

    Compiles the train step, but makes no array, reads no data and writes no file.

    Args:
      config: the run's configuration.
      devices: those to run on, by default all.

    Raises:
      ValueError: if the configuration doesn't fit itself or the devices.
    """
    program = build_program(config, devices)
    return '\n'.join(
        [
            *_parameters(program),
            *_flops(program),
            *_memory(program),
            *_shardings(program),
        ]
    )


def _parameters(program: Program) -> list[str]:
    params = program.abstract_state.params
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    total = sum(x.size for _, x in leaves)
    gates = sum(x.size for path, x in leaves if 'path_gate' in parameter_name(path))
    embeddings = sum(x.size for path, x in leaves if 'embedding' in parameter_name(path))
    return [
        f'Parameters: {total:,}, of them {embeddings:,} in embeddings, {gates:,} in path gates '
        f'({gates / total:.3%})'
    ]


def _flops(program: Program) -> list[str]:
    length = program.config.data.sequence_length
    parts = forward_flops_per_token(program.model_config, length)
    total = sum(parts.values())
    lines = [f'Forward FLOPs per token at sequence length {length}:']
    lines += [f'  {name:<28}{flops:>16,.0f}  {flops / total:6.1%}' for name, flops in parts.items()]
    return [
        *lines,
        f'  {"total":<28}{total:>16,.0f}',
        f'Training FLOPs per token: {TRAINING_FACTOR * total:,.0f}',
    ]


def _memory(program: Program) -> list[str]:
    analysis = program.compile_step().memory_analysis()
    if analysis is None:
        return ['Memory per device: the compiler gives no analysis on this platform']
    state_and_batch = analysis.argument_size_in_bytes
    # Donated buffers are inputs and outputs at once.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    total = state_and_batch + outputs + temporary
    return [
        f"Memory per device, the compiler's analysis of the train step: {total / _MIB:,.1f} MiB",
        f'  state and batch {state_and_batch / _MIB:,.1f} MiB, activations, gradients and '
        f'buffers {temporary / _MIB:,.1f} MiB, other outputs {outputs / _MIB:,.1f} MiB',
    ]


def _shardings(program: Program) -> list[str]:
    axes = ', '.join(f'{name} {size}' for name, size in program.mesh.shape.items())
    lines = [f'Mesh: {axes}', 'Array, shape, type, partition, MiB per device:']
    arrays = {'state': program.abstract_state, 'batch': program.abstract_batch}
    for path, x in jax.tree_util.tree_flatten_with_path(arrays)[0]:
        shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        lines.append(
            f'  {parameter_name(path):<52} {list(x.shape)!s:<20} {x.dtype!s:<9} '
            f'{tuple(x.sharding.spec)!s:<28} {shard / _MIB:.3f}'
        )
    return lines
