"""Stochastic Attention in JAX: random long-range links at the cost of a sliding window."""

from sa_jax.attention import (
    AttentionContext,
    AttentionKind,
    Decoding,
    decode_attention,
    draw_permutation,
    effective_window,
    full_attention,
    get_attention,
    inverse_permutation,
    moba_attention,
    permute,
    register_attention,
    sliding_window_attention,
    sliding_window_neighbours,
    stochastic_attention,
    stochastic_neighbours,
    stochastic_partition_neighbours,
)
from sa_jax.version import __version__

__all__ = [
    'AttentionContext',
    'AttentionKind',
    'Decoding',
    '__version__',
    'decode_attention',
    'draw_permutation',
    'effective_window',
    'full_attention',
    'get_attention',
    'inverse_permutation',
    'moba_attention',
    'permute',
    'register_attention',
    'sliding_window_attention',
    'sliding_window_neighbours',
    'stochastic_attention',
    'stochastic_neighbours',
    'stochastic_partition_neighbours',
]
