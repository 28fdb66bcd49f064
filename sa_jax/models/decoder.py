"""The decoder-only transformer.

Shapes: B examples, T tokens, D the residual stream, N query heads, K key/value heads, H the width
of a head, F the hidden width of the feed-forward layer, V the vocabulary, L layers, P paths.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from sa_jax.attention.registry import AttentionContext
from sa_jax.models import rope
from sa_jax.models.attending import attend_to_sequence
from sa_jax.models.config import CHANGEABLE, DecoderConfig
from sa_jax.models.experts import mixture
from sa_jax.models.layers import join_paths, path_gates, rms_norm, swiglu
from sa_jax.models.modules import DecoderLayers, Experts, normal
from sa_jax.models.sharding import check_divisible, constrain


class DecoderOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
      logits: `[B, T, V]` float32; `logits[:, t]` predicts token t + 1.
      gate_means: `[L, P]` float32, the mean of each path's gate over the valid tokens and the
        heads, paths in the order of the configuration; `[L, 0]` without gates.
    """

    logits: Array
    gate_means: Array


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
        self.embedding = normal(rngs, (config.vocab_size, config.hidden_size))
        self.layers = DecoderLayers(config, rngs=rngs)
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size))
        if not config.tie_embeddings:
            self.unembedding = normal(rngs, (config.vocab_size, config.hidden_size))

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

    def with_config(self, **changes: Any) -> Decoder:
        """The same parameters under another configuration; nothing is copied.

        Args:
          **changes: Fields of the configuration that don't decide which parameters there are:
            `attention` (as many paths), `attention_options`, `layer_attention`,
            `permutation_scope`, `compute_dtype`, `remat`. New paths begin with no options and no
            exceptions.

        Returns:
          A decoder of its own.

        Raises:
          ValueError: A field decides the parameters, or its value is invalid.
        """
        fixed = set(changes) - CHANGEABLE
        if fixed:
            raise ValueError(
                f'{sorted(fixed)} cannot be changed in a model that has its parameters; only '
                f'{sorted(CHANGEABLE)} can.'
            )
        if 'attention' in changes:
            changes = {'attention_options': {}, 'layer_attention': {}} | changes
        config = dataclasses.replace(self.config, **changes)
        if len(config.attention) != len(self.config.attention):
            raise ValueError(
                f'attention = {config.attention} has {len(config.attention)} paths, but the model '
                f'has gates for {len(self.config.attention)}; name as many.'
            )
        model = nnx.merge(*nnx.split(self))
        model.config = config
        return model


def abstract_decoder(config: DecoderConfig, dtype: str) -> Decoder:
    """A decoder whose parameters are `jax.ShapeDtypeStruct`s of a type."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), state))


def run_layers(
    model: Decoder,
    tokens: Array,
    attend: Callable[..., tuple[tuple[Array, ...], Any]],
    memory: Any = None,
    *,
    layers: Sequence[nnx.State] | None = None,
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
      layers: Of `separate_layers`; by default each layer is cut out of the stack.
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
        rope_tables=rope.tables(positions, config.head_dim, config.rope_theta, config.rope_scaling),
        attend=attend,
        segment_ids=segment_ids,
        mesh=mesh,
    )
    graph, stacked = nnx.split(model.layers)
    if config.num_experts and mesh is None:
        # A layer is not cut out of these, see `sa_jax.models.experts`. On a mesh it has to be: its
        # shards are gathered.
        forward = functools.partial(forward, experts=model.layers.experts)

    def body(x_and_memory, layer_and_parameters):
        layer, parameters = layer_and_parameters
        parameters = jax.tree.map(lambda p: p.astype(config.compute_dtype), parameters)
        return forward(nnx.merge(graph, parameters), *x_and_memory, layer)

    # In whole rows, as for the logits: the gradients of both uses are added, and sent once.
    table = constrain(model.embedding[...], mesh, 'vocab', None)
    x = jnp.take(table, tokens, axis=0, mode='fill', fill_value=jnp.nan)
    x = constrain(x.astype(config.compute_dtype), mesh, 'batch', 'tokens', None)
    if layers is None:
        (x, memory), gate_means = jax.lax.scan(
            _rematerialise(body, config.remat),
            (x, memory),
            (jnp.arange(config.num_layers), stacked),
        )
        return x, memory, gate_means
    gate_means = []
    for layer_and_parameters in enumerate(layers):
        (x, memory), of_layer = body((x, memory), layer_and_parameters)
        gate_means.append(of_layer)
    return x, memory, jnp.stack(gate_means)


def separate_layers(model: Decoder) -> tuple[nnx.State, ...]:
    """A copy of each layer's parameters in arrays of their own, but for its experts.

    Decoding is faster with them: from the stack a program copies each layer, for every token. But
    it takes longer to compile, as each layer is compiled by itself.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(nnx.state(model.layers))
    by_leaf = []
    for path, stacked in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        if re.search('experts/(gate|up|down)', name):
            by_leaf.append([stacked[:0]] * len(stacked))  # looked up in the stack as it is
        else:
            by_leaf.append(jnp.unstack(stacked))
    return tuple(jax.tree.unflatten(tree, of_layer) for of_layer in zip(*by_leaf, strict=True))


def unembed(model: Decoder, x: Array, mesh: Mesh | None = None) -> Array:
    """The logits `[B, T, V]`, float32, of the residual stream `[B, T, D]` behind the layers."""
    config = model.config
    x = rms_norm(x, model.final_norm[...], config.norm_eps)
    table = model.embedding if config.tie_embeddings else model.unembedding
    table = constrain(table[...], mesh, 'vocab', None)
    logits = jnp.einsum('btd,vd->btv', x, table.astype(x.dtype), preferred_element_type=jnp.float32)
    return constrain(logits, mesh, 'batch', 'tokens', 'vocab')


def _layer(
    parameters: DecoderLayers,
    x: Array,
    memory: Any,
    layer: Array,
    *,
    config: DecoderConfig,
    rope_tables: tuple[Array, Array],
    attend: Callable[..., tuple[tuple[Array, ...], Any]],
    segment_ids: Array | None,
    mesh: Mesh | None,
    experts: Experts | None = None,
) -> tuple[tuple[Array, Any], Array]:
    """One layer, whose parameters have lost their leading axis to the scan.

    `experts` still have it, if given.

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
        constrain(rope.rotate(query, *rope_tables), mesh, 'batch', 'tokens', 'heads', None),
        constrain(rope.rotate(key, *rope_tables), mesh, 'batch', 'tokens', 'kv_heads', None),
        constrain(value, mesh, 'batch', 'tokens', 'kv_heads', None),
        layer,
        memory,
    )
    if config.has_gates:
        gates = path_gates(
            y,
            attention.path_gate_kernel[...],
            attention.path_gate_bias[...],
            are_shares=config.gate == 'softmax',
        )
        heads = join_paths(outputs, gates)
        gate_means = _mean_over_valid(gates, segment_ids)
    else:
        heads = sum(outputs[1:], outputs[0])
        gate_means = jnp.zeros(0)
    # One axis for heads and their channels: XLA would sum over them in an order of its own, and
    # transpose the weights for it.
    output = attention.output[...]
    x = x + heads.reshape(*heads.shape[:2], -1) @ output.reshape(-1, output.shape[-1])
    x = constrain(x, mesh, 'batch', 'tokens', None)

    x = x + _feed_forward(parameters, x, layer, config, experts, mesh)
    return (constrain(x, mesh, 'batch', 'tokens', None), memory), gate_means


def _feed_forward(parameters, x, layer, config, experts, mesh):
    y = rms_norm(x, parameters.feed_forward_norm[...], config.norm_eps)
    if config.num_experts:
        router = parameters.experts.router[...]
        if experts is None:
            experts, layer = jax.tree.map(lambda w: w[None], parameters.experts), 0
        return mixture(
            y,
            router,
            *(w[...] for w in (experts.gate, experts.up, experts.down)),
            layer=layer,
            num_chosen=config.num_experts_per_token,
            normalize=config.normalize_experts,
            mesh=mesh,
        )
    feed_forward = parameters.feed_forward
    hidden = swiglu(y, feed_forward.gate[...], feed_forward.up[...])
    return constrain(hidden, mesh, 'batch', None, 'mlp') @ feed_forward.down[...]


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
        check_divisible('the length of a row', tokens.shape[1], 'tokens', mesh)
        check_divisible('num_heads', config.num_heads, 'heads', mesh)
        check_divisible('num_kv_heads', config.num_kv_heads, 'kv_heads', mesh)
