"""The mathematics of a layer as pure functions of arrays.

Shapes: B examples, T tokens, D the residual stream, N query heads, H the width of a head, F the
hidden width of the feed-forward layer, P attention paths.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Divides by the root mean square over the last axis, in float32.

    Args:
      x: `[..., D]`, any floating type.
      weight: `[D]`, applied after the cast back to x's type.
      epsilon: Added to the mean square.

    Returns:
      `[..., D]`, x's type.
    """
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype) * weight.astype(x.dtype)


def rope_tables(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """The cosines and sines that rotate heads at the given positions.

    Args:
      positions: `[B, T]`, whole numbers, in tokens.
      head_dim: Width of a head, even.
      theta: Base of the wavelengths: pair i turns by `theta ** (-2i / head_dim)` per token.

    Returns:
      Cosines and sines, each `[B, T, head_dim / 2]` float32. In bfloat16, angles beyond a few
      hundred radians would be off by whole turns.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[..., None] * theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Array, cosines: Array, sines: Array) -> Array:
    """Rotates channel i of each head with channel i + H/2 (the half-split form), in float32.

    Args:
      x: `[B, T, N, H]`.
      cosines: `[B, T, H / 2]`, of `rope_tables`.
      sines: `[B, T, H / 2]`.

    Returns:
      `[B, T, N, H]`, x's type.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def swiglu(x: Array, gate: Array, up: Array) -> Array:
    """The gated hidden layer `silu(x @ gate) * (x @ up)`.

    Args:
      x: `[B, T, D]`.
      gate: `[D, F]`.
      up: `[D, F]`.

    Returns:
      `[B, T, F]`, x's type.
    """
    return jax.nn.silu(x @ gate) * (x @ up)


def path_gates(x: Array, kernel: Array, bias: Array) -> Array:
    """The sigmoid gates of the attention paths, each independent of the others.

    Args:
      x: The layer's normed input, `[B, T, D]`.
      kernel: `[D, P, N, 1]` for a gate per head, `[D, P, N, H]` per channel.
      bias: The kernel's shape without D.

    Returns:
      `[B, T, P, N, 1 or H]` float32, in (0, 1).
    """
    logits = jnp.einsum('btd,dpnh->btpnh', x, kernel, preferred_element_type=jnp.float32)
    return jax.nn.sigmoid(logits + bias.astype(jnp.float32))


def join_paths(outputs: Sequence[Array], gates: Array) -> Array:
    """Sums the paths' heads, each path scaled by its gate.

    Args:
      outputs: P arrays `[B, T, N, H]`.
      gates: `[B, T, P, N, 1 or H]`, of `path_gates`.

    Returns:
      `[B, T, N, H]`, the outputs' type.
    """
    gates = gates.astype(outputs[0].dtype)
    return sum(gates[:, :, path] * output for path, output in enumerate(outputs))
