"""Floating-point operations of a decoder, for throughput and MFU."""

from __future__ import annotations

from sa_jax.attention.registry import get_attention
from sa_jax.models.config import DecoderConfig

# The backward pass forms a gradient for each of a product's two factors.
TRAINING_FACTOR = 3


def forward_flops_per_token(config: DecoderConfig, sequence_length: int) -> dict[str, float]:
    """Counts the forward FLOPs of one token, by part.

    Only matrix products count, a multiply-add as 2. Attention counts the pairs a path's mask
    lets through, so causal and windowed paths cost what they need and not what a dense product
    would; recomputation (remat) counts nothing. The embedding is a look-up, hence absent.

    Args:
      config: The architecture.
      sequence_length: Tokens per sequence, taken as one document.

    Returns:
      FLOPs per token under 'projections', 'path_gates', 'feed_forward' (of the experts only those
      that a token goes through), 'unembedding', and for each path p called name
      'attention/p_name'; over all layers.
    """
    hidden, head_dim, layers = config.hidden_size, config.head_dim, config.num_layers
    paths = len(config.attention)
    # Query and output projections have one matrix per query head, key and value per kv head.
    projection_heads = 2 * (config.num_heads + config.num_kv_heads)
    gate_width = config.num_heads * (head_dim if config.gate == 'channel' else 1)
    feed_forward_width = 3 * config.intermediate_size
    if config.num_experts:
        feed_forward_width *= config.num_experts_per_token
        feed_forward_width += config.num_experts  # the router
    flops = {
        'projections': 2.0 * layers * hidden * projection_heads * head_dim,
        'path_gates': 2.0 * layers * hidden * paths * gate_width if config.has_gates else 0.0,
        'feed_forward': 2.0 * layers * hidden * feed_forward_width,
        'unembedding': 2.0 * hidden * config.vocab_size,
    }
    # Scores and their sum over the values: two products per visible key.
    per_key = 2 * 2.0 * config.num_heads * head_dim
    for pattern in config.layer_patterns:
        for path, (name, options) in enumerate(pattern.paths):
            part = f'attention/{path}_{name}'
            visible = _visible_keys(name, sequence_length, options)
            flops[part] = flops.get(part, 0.0) + per_key * visible
    return flops


def training_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """The FLOPs of one token's forward and backward pass together.

    Args:
      config: The architecture.
      sequence_length: Tokens per sequence, taken as one document.

    Returns:
      FLOPs per token, three times the forward pass'.
    """
    return TRAINING_FACTOR * sum(forward_flops_per_token(config, sequence_length).values())


def _visible_keys(name: str, sequence_length: int, options) -> float:
    visible_keys = get_attention(name).visible_keys
    if visible_keys is None:
        return (sequence_length + 1) / 2
    return visible_keys(sequence_length, is_causal=True, **options)
