"""Rotary position embeddings, and how their wavelengths are stretched for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax import Array


def frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] = FrozenDict()
) -> tuple[np.ndarray, float]:
    """The angles that each pair of channels turns by per token, and a factor of the tables.

    Args:
      head_dim: Width of a head, even.
      theta: Base of the wavelengths: unscaled, pair i turns by `theta ** (-2i / head_dim)`.
      scaling: `rope_type` and its parameters, in the terms of Hugging Face's `config.json`:
        'linear' (Chen et al., arXiv 2306.15595), 'yarn' (Peng et al., arXiv 2309.00071), 'llama3'
        (Llama 3.1's), or 'factors', whose `factors` divide the frequencies one by one. Empty or
        'default' for none.

    Returns:
      Frequencies `[head_dim / 2]` float32, in radians per token, and the factor of cosines and
      sines, 1 but for 'yarn'.

    Raises:
      ValueError: The type is unknown, or a parameter is missing, unknown or out of range.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    unscaled = np.float32(theta) ** -exponents
    options = dict(scaling)
    kind = options.pop('rope_type', 'default')
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(
            f'rope_scaling has the rope_type {kind!r}, which is not supported; expected one of '
            f'{", ".join(map(repr, _SCALINGS))}.'
        )
    try:
        with np.errstate(all='ignore'):
            scaled, factor = _SCALINGS[kind](unscaled, theta, **options)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(
            f'rope_scaling = {dict(scaling)!r:.500} does not suit the rope_type {kind!r}: {error}'
        ) from error
    scaled = np.asarray(scaled, np.float32)
    if not (np.isfinite(scaled).all() and (scaled > 0).all() and factor > 0):
        raise ValueError(
            f'rope_scaling = {dict(scaling)!r:.500} gives frequencies that are no positive '
            'numbers; expected positive factors, and low_freq_factor below high_freq_factor.'
        )
    return scaled, float(factor)


def tables(
    positions: Array, head_dim: int, theta: float, scaling: Mapping[str, Any] = FrozenDict()
) -> tuple[Array, Array]:
    """The cosines and sines that rotate heads at the given positions.

    Args:
      positions: `[B, T]`, whole numbers, in tokens.
      head_dim: Width of a head, even.
      theta: Base of the wavelengths.
      scaling: As for `frequencies`.

    Returns:
      Cosines and sines, each `[B, T, head_dim / 2]` float32. In bfloat16, angles beyond a few
      hundred radians would be off by whole turns.
    """
    turns, factor = frequencies(head_dim, theta, scaling)
    angles = positions.astype(jnp.float32)[..., None] * turns
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(x: Array, cosines: Array, sines: Array) -> Array:
    """Rotates channel i of each head with channel i + H/2 (the half-split form), in float32.

    Args:
      x: `[B, T, N, H]`.
      cosines: `[B, T, H / 2]`, of `tables`.
      sines: `[B, T, H / 2]`.

    Returns:
      `[B, T, N, H]`, x's type.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _default(turns, theta):
    del theta
    return turns, 1.0


def _linear(turns, theta, *, factor):
    del theta
    return turns / factor, 1.0


def _factors(turns, theta, *, factors):
    del theta
    if len(factors) != len(turns):
        raise ValueError(f'rope_scaling has {len(factors)} factors; expected {len(turns)}.')
    return turns / np.asarray(factors, np.float32), 1.0


def _llama3(
    turns,
    theta,
    *,
    factor,
    low_freq_factor,
    high_freq_factor,
    original_max_position_embeddings,
):
    """Long wavelengths are stretched, short ones kept, those between mixed."""
    del theta
    wavelengths = 2 * math.pi / turns
    cycles = original_max_position_embeddings / wavelengths
    share = (cycles - low_freq_factor) / (high_freq_factor - low_freq_factor)
    share = np.clip(share, 0, 1)
    return (1 - share) * turns / factor + share * turns, 1.0


def _yarn(
    turns,
    theta,
    *,
    factor,
    original_max_position_embeddings,
    beta_fast=32,
    beta_slow=1,
    attention_factor=None,
    mscale=None,
    mscale_all_dim=None,
    truncate=True,
):
    """Pairs that turn less than `beta_slow` times are stretched, from `beta_fast` times on kept."""
    pairs = len(turns)

    def pair_that_turns(times):
        context = original_max_position_embeddings / (times * 2 * math.pi)
        return pairs * math.log(context) / math.log(theta)

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    share = np.clip((np.arange(pairs) - low) / max(high - low, 1e-3), 0, 1)
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    return share * turns / factor + (1 - share) * turns, attention_factor


def _mscale(factor, scale):
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_SCALINGS: dict[str, Callable] = {
    'default': _default,
    'linear': _linear,
    'factors': _factors,
    'llama3': _llama3,
    'yarn': _yarn,
}
