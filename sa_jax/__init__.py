"""Stochastic Attention in JAX: random long-range links at the cost of a sliding window."""

from sa_jax.attention import (
    AttentionContext,
    AttentionKind,
    draw_permutation,
    effective_window,
    full_attention,
    get_attention,
    inverse_permutation,
    moba_attention,
    permute,
    register_attention,
    sliding_window_attention,
    stochastic_attention,
)
from sa_jax.version import __version__

__all__ = [
    'AttentionContext',
    'AttentionKind',
    '__version__',
    'draw_permutation',
    'effective_window',
    'full_attention',
    'get_attention',
    'inverse_permutation',
    'moba_attention',
    'permute',
    'register_attention',
    'sliding_window_attention',
    'stochastic_attention',
]
