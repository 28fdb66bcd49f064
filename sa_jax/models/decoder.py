"""The decoder-only transformer: modules that hold the parameters, functions that use them.

Shapes: B examples, T tokens, D the residual stream, N query heads, K key/value heads, H the width
of a head, F the hidden width of the feed-forward layer, V the vocabulary, L layers, P paths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from sa_jax.attention.registry import AttentionContext, get_attention
from sa_jax.models.config import DecoderConfig
from sa_jax.models.layers import (
    apply_rope,
    join_paths,
    path_gates,
    rms_norm,
    rope_tables,
    swiglu,
)
from sa_jax.models.sharding import check_divisible, constrain, partition_spec

_INITIAL_STDDEV = 0.02


class DecoderOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
      logits: `[B, T, V]` float32; `logits[:, t]` predicts token t + 1.
      gate_means: `[L, P]` float32, the mean of each path's gate over the valid tokens and the
        heads, paths in the order of the configuration; `[L, 0]` for a single path.
    """

    logits: Array
    gate_means: Array


class Attention(nnx.Module):
    """The parameters of all layers' attention; a layer's paths share them but for their gates."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        layers, hidden, head_dim = config.num_layers, config.hidden_size, config.head_dim
        heads, kv_heads, paths = config.num_heads, config.num_kv_heads, len(config.attention)
        self.query = _normal(rngs, (layers, hidden, heads, head_dim))
        self.key = _normal(rngs, (layers, hidden, kv_heads, head_dim))
        self.value = _normal(rngs, (layers, hidden, kv_heads, head_dim))
        self.output = _normal(rngs, (layers, heads, head_dim, hidden), _residual_stddev(config))
        if config.qk_norm:
            self.query_norm = nnx.Param(jnp.ones((layers, head_dim)))
            self.key_norm = nnx.Param(jnp.ones((layers, head_dim)))
        if paths > 1:
            # Zeros open every gate to exactly one half.
            gate_shape = (paths, heads, head_dim if config.gate == 'channel' else 1)
            self.path_gate_kernel = nnx.Param(jnp.zeros((layers, hidden, *gate_shape)))
            self.path_gate_bias = nnx.Param(jnp.zeros((layers, *gate_shape)))


class FeedForward(nnx.Module):
    """The parameters of all layers' SwiGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        layers, hidden, width = config.num_layers, config.hidden_size, config.intermediate_size
        self.gate = _normal(rngs, (layers, hidden, width))
        self.up = _normal(rngs, (layers, hidden, width))
        self.down = _normal(rngs, (layers, width, hidden), _residual_stddev(config))


class DecoderLayers(nnx.Module):
    """The parameters of all layers, each stacked along a leading axis `[L]`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        norm_shape = (config.num_layers, config.hidden_size)
        self.attention_norm = nnx.Param(jnp.ones(norm_shape))
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = nnx.Param(jnp.ones(norm_shape))
        self.feed_forward = FeedForward(config, rngs=rngs)


class Decoder(nnx.Module):
    """A decoder-only transformer whose layers are stacked along a leading axis and scanned.

    Attributes:
      config: The architecture.
      embedding: `[V, D]`.
      layers: Their parameters, all leading with `[L]`.
      final_norm: `[D]`.
      unembedding: `[V, D]`, only if the embeddings aren't tied.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Initialises float32 parameters.

        Matrices are normal with standard deviation 0.02, divided by sqrt(2 L) where they write to
        the residual stream; norms are ones; path gates start at one half.

        Args:
          config: The architecture.
          rngs: Source of the initial values.
        """
        self.config = config
        self.embedding = _normal(rngs, (config.vocab_size, config.hidden_size))
        self.layers = DecoderLayers(config, rngs=rngs)
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size))
        if not config.tie_embeddings:
            self.unembedding = _normal(rngs, (config.vocab_size, config.hidden_size))

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        permutation_key: Array | None = None,
        example_ids: Array | None = None,
        mesh: Mesh | None = None,
    ) -> DecoderOutput:
        """Computes the logits of every next token.

        Args:
          tokens: `[B, T]`, whole numbers below V; others give NaN.
          positions: `[B, T]`, strictly increasing within a segment; by default the index.
          segment_ids: `[B, T]`: 0 is padding, equal numbers from 1 on belong together and
            stand together; by default everything is one segment.
          permutation_key: A typed key, already folded with the step. Layer and path are folded
            in here. Needed by paths that permute.
          example_ids: `[B]`, whole numbers naming the examples; needed (only) if
            `permutation_scope` is 'example'.
          mesh: Of `make_mesh`; None for a single device.

        Returns:
          The logits and the gates' means.

        Raises:
          ValueError: Shapes disagree, the key isn't a typed scalar key, example ids are
            missing, or batch or heads can't be split over the mesh.
        """
        config = self.config
        check_inputs(config, tokens, positions, segment_ids, permutation_key, example_ids, mesh)
        context = AttentionContext(positions, segment_ids, permutation_key)

        def attend(query, key, value, layer, memory):
            heads = attend_to_sequence(
                query,
                key,
                value,
                config=config,
                context=context,
                layer=layer,
                example_ids=example_ids,
                mesh=mesh,
            )
            return heads, memory

        x, _, gate_means = run_layers(
            self, tokens, attend, positions=positions, segment_ids=segment_ids, mesh=mesh
        )
        return DecoderOutput(unembed(self, x, mesh), gate_means)


def run_layers(
    model: Decoder,
    tokens: Array,
    attend: Callable[..., tuple[tuple[Array, ...], Any]],
    memory: Any = None,
    *,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[Array, Any, Array]:
    """Everything between tokens and logits, around any way to attend.

    Args:
      model: The decoder.
      tokens: `[B, T]`.
      attend: `(query [B, T, N, H], key [B, T, K, H], value [B, T, K, H], layer, memory)` to the
        heads `[B, T, N, H]` of every path, before gates and output projection, and the memory.
      memory: A tree of arrays that the layers hand on, such as a cache of keys and values.
      positions: `[B, T]`; by default the index.
      segment_ids: `[B, T]`; over the valid tokens the gates are averaged.
      mesh: Of `make_mesh`; None for a single device.

    Returns:
      The residual stream `[B, T, D]` behind the last layer, the memory, and the means `[L, P]` of
      the gates.
    """
    config = model.config
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    forward = functools.partial(
        _layer,
        config=config,
        rope=rope_tables(positions, config.head_dim, config.rope_theta),
        attend=attend,
        segment_ids=segment_ids,
        mesh=mesh,
    )
    graph, stacked = nnx.split(model.layers)

    def body(x_and_memory, layer_and_parameters):
        layer, parameters = layer_and_parameters
        parameters = jax.tree.map(lambda p: p.astype(config.compute_dtype), parameters)
        return forward(nnx.merge(graph, parameters), *x_and_memory, layer)

    x = jnp.take(model.embedding[...], tokens, axis=0, mode='fill', fill_value=jnp.nan)
    x = constrain(x.astype(config.compute_dtype), mesh, 'batch', None, None)
    (x, memory), gate_means = jax.lax.scan(
        _rematerialise(body, config.remat), (x, memory), (jnp.arange(config.num_layers), stacked)
    )
    return x, memory, gate_means


def unembed(model: Decoder, x: Array, mesh: Mesh | None = None) -> Array:
    """The logits `[B, T, V]`, float32, of the residual stream `[B, T, D]` behind the layers."""
    config = model.config
    x = rms_norm(x, model.final_norm[...], config.norm_eps)
    table = model.embedding if config.tie_embeddings else model.unembedding
    logits = jnp.einsum(
        'btd,vd->btv', x, table[...].astype(x.dtype), preferred_element_type=jnp.float32
    )
    return constrain(logits, mesh, 'batch', None, 'vocab')


def _layer(
    parameters: DecoderLayers,
    x: Array,
    memory: Any,
    layer: Array,
    *,
    config: DecoderConfig,
    rope: tuple[Array, Array],
    attend: Callable[..., tuple[tuple[Array, ...], Any]],
    segment_ids: Array | None,
    mesh: Mesh | None,
) -> tuple[tuple[Array, Any], Array]:
    """One layer, whose parameters have lost their leading axis to the scan.

    Returns the residual stream `[B, T, D]` behind it, the memory, and the means `[P]` of its gates.
    """
    attention = parameters.attention
    y = rms_norm(x, parameters.attention_norm[...], config.norm_eps)
    query = jnp.einsum('btd,dnh->btnh', y, attention.query[...])
    key = jnp.einsum('btd,dkh->btkh', y, attention.key[...])
    value = jnp.einsum('btd,dkh->btkh', y, attention.value[...])
    if config.qk_norm:
        query = rms_norm(query, attention.query_norm[...], config.norm_eps)
        key = rms_norm(key, attention.key_norm[...], config.norm_eps)
    outputs, memory = attend(
        constrain(apply_rope(query, *rope), mesh, 'batch', None, 'heads', None),
        constrain(apply_rope(key, *rope), mesh, 'batch', None, 'kv_heads', None),
        constrain(value, mesh, 'batch', None, 'kv_heads', None),
        layer,
        memory,
    )
    if len(outputs) > 1:
        gates = path_gates(y, attention.path_gate_kernel[...], attention.path_gate_bias[...])
        heads = join_paths(outputs, gates)
        gate_means = _mean_over_valid(gates, segment_ids)
    else:
        (heads,) = outputs
        gate_means = jnp.zeros(0)
    x = x + jnp.einsum('btnh,nhd->btd', heads, attention.output[...])
    x = constrain(x, mesh, 'batch', None, None)

    feed_forward = parameters.feed_forward
    y = rms_norm(x, parameters.feed_forward_norm[...], config.norm_eps)
    hidden = swiglu(y, feed_forward.gate[...], feed_forward.up[...])
    x = x + constrain(hidden, mesh, 'batch', None, 'mlp') @ feed_forward.down[...]
    return (constrain(x, mesh, 'batch', None, None), memory), gate_means


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
        return tuple(
            get_attention(name).function(
                query,
                key,
                value,
                AttentionContext(positions, segment_ids, permutation_key, layer),
                **config.attention_options.get(name, {}),
            )
            for name, permutation_key in zip(config.attention, permutation_keys, strict=True)
        )

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
    # examples and heads. All mesh axes split every float operand, hence no cotangent needs a sum
    # over devices and replication (check_vma) need not be tracked.
    heads = partition_spec('batch', None, 'heads', None)
    kv_heads = partition_spec('batch', None, 'kv_heads', None)
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


def _mean_over_valid(gates: Array, segment_ids: Array | None) -> Array:
    """The mean `[P]` of gates `[B, T, P, N, 1 or H]` over valid tokens and heads."""
    gates = gates.mean(axis=(-2, -1))
    if segment_ids is None:
        return gates.mean(axis=(0, 1))
    valid = (segment_ids > 0).astype(jnp.float32)
    return jnp.einsum('bt,btp->p', valid, gates) / jnp.maximum(valid.sum(), 1)


def _rematerialise(body, remat: str):
    """Wraps a scanned body so that the backward pass recomputes what the policy doesn't keep."""
    if remat == 'none':
        return body
    policy = {
        'full': jax.checkpoint_policies.nothing_saveable,
        'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[remat]
    # Inside a scan nothing can be merged across the two passes anyway.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float = _INITIAL_STDDEV) -> nnx.Param:
    # Drawn flat: the same numbers, but XLA compiles them ten times faster on the CPU.
    flat = jax.random.normal(rngs.params(), (math.prod(shape),))
    return nnx.Param(stddev * flat.reshape(shape))


def _residual_stddev(config: DecoderConfig) -> float:
    # Two sublayers per layer add to the residual stream: its variance shall not grow with depth.
    return _INITIAL_STDDEV / math.sqrt(2 * config.num_layers)


def check_inputs(
    config: DecoderConfig,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    permutation_key: Array | None,
    example_ids: Array | None,
    mesh: Mesh | None,
) -> None:
    """Raises a ValueError unless the arguments of `Decoder.__call__` fit together."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f'tokens must be whole numbers [B, T], got {tokens.dtype} of shape {tokens.shape}.'
        )
    for name, array in (('positions', positions), ('segment_ids', segment_ids)):
        if array is not None and array.shape != tokens.shape:
            raise ValueError(
                f'{name} must have the shape {tokens.shape} of tokens, got {array.shape}.'
            )
    if permutation_key is not None and (
        not jnp.issubdtype(permutation_key.dtype, jax.dtypes.prng_key) or permutation_key.shape
    ):
        raise ValueError(
            'permutation_key must be a single typed key such as jax.random.key(0), got '
            f'{permutation_key.dtype} of shape {permutation_key.shape}.'
        )
    if config.permutation_scope == 'example' and permutation_key is not None:
        shape = None if example_ids is None else example_ids.shape
        if shape != tokens.shape[:1]:
            raise ValueError(
                "permutation_scope='example' needs example_ids of shape "
                f'{tokens.shape[:1]}, one per example, got {shape}.'
            )
    if mesh is not None:
        check_divisible('batch', tokens.shape[0], 'batch', mesh)
        check_divisible('num_heads', config.num_heads, 'heads', mesh)
        check_divisible('num_kv_heads', config.num_kv_heads, 'kv_heads', mesh)
