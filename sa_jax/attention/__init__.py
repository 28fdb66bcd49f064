"""Attention functions: masks as specifications, a dense reference, and fast paths."""

from sa_jax.attention import kinds as _kinds  # noqa: F401  (registers the built-in functions)
from sa_jax.attention.decoding import (
    decode_attention,
    local_stochastic_neighbours,
    sliding_window_neighbours,
    stochastic_neighbours,
    stochastic_partition_neighbours,
)
from sa_jax.attention.functions import (
    full_attention,
    local_stochastic_attention,
    moba_attention,
    sliding_window_attention,
    stochastic_attention,
    stochastic_partition_attention,
)
from sa_jax.attention.permutation import draw_permutation, inverse_permutation, permute
from sa_jax.attention.registry import (
    AttentionContext,
    AttentionKind,
    Decoding,
    get_attention,
    register_attention,
)
from sa_jax.attention.window import effective_window

__all__ = [
    'AttentionContext',
    'AttentionKind',
    'Decoding',
    'decode_attention',
    'draw_permutation',
    'effective_window',
    'full_attention',
    'get_attention',
    'inverse_permutation',
    'local_stochastic_attention',
    'local_stochastic_neighbours',
    'moba_attention',
    'permute',
    'register_attention',
    'sliding_window_attention',
    'sliding_window_neighbours',
    'stochastic_attention',
    'stochastic_neighbours',
    'stochastic_partition_attention',
    'stochastic_partition_neighbours',
]
