"""How a layer attends: its paths, their permutations, and what differs between layers.

Shapes: B examples, T tokens, N query heads, K key/value heads, H the width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.models.config import DecoderConfig, Pattern
from sa_jax.models.sharding import partition_spec


def by_pattern(config: DecoderConfig, layer: Array, attend: Callable[[Pattern], Any]) -> Any:
    """What `attend` gives for the pattern of a layer, whose index may be traced."""
    if len(config.patterns) == 1:
        return attend(config.patterns[0])
    which = jnp.array([config.patterns.index(pattern) for pattern in config.layer_patterns])
    branches = [lambda pattern=pattern: attend(pattern) for pattern in config.patterns]
    return jax.lax.switch(which[layer], branches)


def attend_to_sequence(
    query: Array,
    key: Array,
    value: Array,
    *,
    config: DecoderConfig,
    context: AttentionContext,
    layer: Array,
    example_ids: Array | None,
    mesh: Mesh | None,
) -> tuple[Array, ...]:
    """The heads `[B, T, N, H]` of every path, before gates and output projection."""
    permutation_keys = path_keys(config, context.key, layer, example_ids, batch=query.shape[0])

    def paths(query, key, value, layer, positions, segment_ids, permutation_keys):
        def attend(pattern):
            return tuple(
                _function(name, mesh)(
                    query,
                    key,
                    value,
                    AttentionContext(positions, segment_ids, permutation_key, layer),
                    **options,
                )
                for (name, options), permutation_key in zip(
                    pattern.paths, permutation_keys, strict=True
                )
            )

        return by_pattern(config, layer, attend)

    operands = (
        query,
        key,
        value,
        layer,
        context.positions,
        context.segment_ids,
        permutation_keys,
    )
    if mesh is None:
        return paths(*operands)
    # XLA can't partition the loops inside an attention function, so each device is handed its
    # examples, tokens and heads. All mesh axes split every float operand, hence no cotangent needs
    # a sum over devices and replication (check_vma) need not be tracked.
    heads = partition_spec('batch', 'tokens', 'heads', None)
    kv_heads = partition_spec('batch', 'tokens', 'kv_heads', None)
    scope = {'layer': (), 'example': ('batch',), 'head': ('batch', 'kv_heads')}
    specs = (
        heads,
        kv_heads,
        kv_heads,
        partition_spec(),
        partition_spec('batch', None),
        partition_spec('batch', None),
        partition_spec(*scope[config.permutation_scope]),
    )
    return jax.shard_map(paths, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(
        *operands
    )


def _function(name: str, mesh: Mesh | None) -> Callable[..., Array]:
    """The attention function of a path, for the tokens that a device has."""
    kind = get_attention(name)
    if mesh is None or mesh.shape['sequence'] == 1:
        return kind.function
    if kind.split is None:
        raise ValueError(
            f'attention {name!r} needs all tokens of a row on one device, but mesh.sequence is '
            f'{mesh.shape["sequence"]}; set it to 1, or choose stochastic or sliding_window'
        )
    return functools.partial(kind.split, axis_name='sequence')


def path_keys(
    config: DecoderConfig,
    key: Array | None,
    layer: Array,
    example_ids: Array | None,
    *,
    batch: int,
) -> tuple[Array | None, ...]:
    """A permutation key per path, whose shape is the scope: `[]`, `[B]` or `[B, K]`."""
    if key is None:
        return (None,) * len(config.attention)
    fold_each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))

    def in_scope(key):
        if config.permutation_scope == 'layer':
            return key
        if config.permutation_scope == 'example':
            return fold_each(key, example_ids)
        heads = jnp.arange(config.num_kv_heads)
        return jnp.broadcast_to(fold_each(key, heads), (batch, config.num_kv_heads))

    key = jax.random.fold_in(key, layer)
    return tuple(in_scope(jax.random.fold_in(key, path)) for path in range(len(config.attention)))
