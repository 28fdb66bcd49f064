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


def path_gates(x: Array, kernel: Array, bias: Array, *, are_shares: bool = False) -> Array:
    """The gates of the attention paths: sigmoids, each independent of the others.

    Args:
      x: The layer's normed input, `[B, T, D]`.
      kernel: `[D, P, N, 1]` for a gate per head, `[D, P, N, H]` per channel.
      bias: The kernel's shape without D.
      are_shares: Whether they add up to 1 over the paths instead, by a softmax.

    Returns:
      `[B, T, P, N, 1 or H]` float32, in (0, 1).
    """
    logits = jnp.einsum('btd,dpnh->btpnh', x, kernel, preferred_element_type=jnp.float32)
    logits += bias.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=2) if are_shares else jax.nn.sigmoid(logits)


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
