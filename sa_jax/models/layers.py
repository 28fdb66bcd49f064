"""The mathematics of a layer as pure functions of arrays.

Shapes: B examples, T tokens, D the residual stream, N query heads, H the width of a head, F the
hidden width of the feed-forward layer, P attention paths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

# Norm and hidden layer have backward passes of their own, which keep what goes into the pointwise
# part and compute the rest anew. Derived ones keep what each operation gives, and XLA computes
# SwiGLU's gradients a second time on a CPU, transposed for the weights' products.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Divides by the root mean square over the last axis, in float32.

    Args:
      x: `[..., D]`, any floating type.
      weight: `[D]`, applied after the cast back to x's type.
      epsilon: Added to the mean square.

    Returns:
      `[..., D]`, x's type. It has no forward-mode derivative.
    """
    normed, _ = _normed(x, epsilon)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def _normed(x, epsilon):
    """Of unit mean square, float32, and what x was multiplied with."""
    x = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return x * factor, factor


def _rms_norm_forward(x, weight, epsilon):
    return rms_norm(x, weight, epsilon), (x, weight)


def _rms_norm_backward(epsilon, residuals, gradient):
    x, weight = residuals
    normed, factor = _normed(x, epsilon)
    gradient = gradient.astype(jnp.float32)
    of_weight = jnp.sum(gradient * normed, axis=range(x.ndim - 1))
    gradient *= weight.astype(jnp.float32)
    of_x = factor * (gradient - normed * jnp.mean(gradient * normed, axis=-1, keepdims=True))
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def swiglu(x: Array, gate: Array, up: Array) -> Array:
    """The gated hidden layer `silu(x @ gate) * (x @ up)`.

    Args:
      x: `[..., D]`.
      gate: `[D, F]`.
      up: `[D, F]`.

    Returns:
      `[..., F]`, x's type. It has no forward-mode derivative.
    """
    return jax.nn.silu(x @ gate) * (x @ up)


def _swiglu_forward(x, gate, up):
    gated, linear = x @ gate, x @ up
    return jax.nn.silu(gated) * linear, (x, gate, up, gated, linear)


def _swiglu_backward(residuals, gradient):
    x, gate, up, gated, linear = residuals
    gated, linear, gradient = (z.astype(jnp.float32) for z in (gated, linear, gradient))
    sigmoid = jax.nn.sigmoid(gated)
    of_gated = gradient * linear * sigmoid * (1 + gated * (1 - sigmoid))
    of_linear = gradient * gated * sigmoid
    of_gated, of_linear = (z.astype(x.dtype) for z in (of_gated, of_linear))
    of_weights = (jnp.einsum('...d,...f->df', x, z) for z in (of_gated, of_linear))
    return of_gated @ gate.T + of_linear @ up.T, *of_weights


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


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
