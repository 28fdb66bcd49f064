"""The modules that hold a decoder's parameters, and their initial values.

Shapes: D the residual stream, N query heads, K key/value heads, H the width of a head, F the
hidden width of the feed-forward layer, E experts, V the vocabulary, L layers, P paths.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from sa_jax.models.config import DecoderConfig

_INITIAL_STDDEV = 0.02


class Attention(nnx.Module):
    """The parameters of all layers' attention; a layer's paths share them but for their gates."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        layers, hidden, head_dim = config.num_layers, config.hidden_size, config.head_dim
        heads, kv_heads, paths = config.num_heads, config.num_kv_heads, len(config.attention)
        self.query = normal(rngs, (layers, hidden, heads, head_dim))
        self.key = normal(rngs, (layers, hidden, kv_heads, head_dim))
        self.value = normal(rngs, (layers, hidden, kv_heads, head_dim))
        self.output = normal(rngs, (layers, heads, head_dim, hidden), _residual_stddev(config))
        if config.qk_norm:
            self.query_norm = nnx.Param(jnp.ones((layers, head_dim)))
            self.key_norm = nnx.Param(jnp.ones((layers, head_dim)))
        if config.has_gates:
            # Zeros open every sigmoid to exactly one half, and make shares equal.
            gate_shape = (paths, heads, head_dim if config.gate == 'channel' else 1)
            self.path_gate_kernel = nnx.Param(jnp.zeros((layers, hidden, *gate_shape)))
            self.path_gate_bias = nnx.Param(jnp.zeros((layers, *gate_shape)))


class FeedForward(nnx.Module):
    """The parameters of all layers' SwiGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        layers, hidden, width = config.num_layers, config.hidden_size, config.intermediate_size
        self.gate = normal(rngs, (layers, hidden, width))
        self.up = normal(rngs, (layers, hidden, width))
        self.down = normal(rngs, (layers, width, hidden), _residual_stddev(config))


class Experts(nnx.Module):
    """The parameters of all layers' experts, and of the routers that choose among them."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        layers, hidden, width = config.num_layers, config.hidden_size, config.intermediate_size
        experts = config.num_experts
        self.router = normal(rngs, (layers, hidden, experts))
        self.gate = normal(rngs, (layers, experts, hidden, width))
        self.up = normal(rngs, (layers, experts, hidden, width))
        self.down = normal(rngs, (layers, experts, width, hidden), _residual_stddev(config))


class DecoderLayers(nnx.Module):
    """The parameters of all layers, each stacked along a leading axis `[L]`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        norm_shape = (config.num_layers, config.hidden_size)
        self.attention_norm = nnx.Param(jnp.ones(norm_shape))
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = nnx.Param(jnp.ones(norm_shape))
        if config.num_experts:
            self.experts = Experts(config, rngs=rngs)
        else:
            self.feed_forward = FeedForward(config, rngs=rngs)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float = _INITIAL_STDDEV) -> nnx.Param:
    """A parameter of normal float32 numbers."""
    # Drawn flat: the same numbers, but XLA compiles them ten times faster on the CPU.
    flat = jax.random.normal(rngs.params(), (math.prod(shape),))
    return nnx.Param(stddev * flat.reshape(shape))


def _residual_stddev(config: DecoderConfig) -> float:
    # Two sublayers per layer add to the residual stream: its variance shall not grow with depth.
    return _INITIAL_STDDEV / math.sqrt(2 * config.num_layers)
