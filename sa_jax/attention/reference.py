"""The dense oracle: softmax attention under a boolean mask, in float32, O(T·S)."""

import jax
import jax.numpy as jnp


def masked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    sink_logits: jax.Array | None = None,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
) -> jax.Array:
    """Attention of each query to the keys that `mask` shows it.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, K, H]`, K dividing N.
      value: `[B, S, K, H]`.
      mask: boolean, broadcastable to `[B, N, T, S]`. A row without keys gives zeros.
      sink_logits: `[N]`, a logit per head in the denominator only, as in gpt-oss.
      scale: factor of the logits.
      logits_soft_cap: c in c·tanh(logits / c), as in Gemma 2.

    Returns:
      `[B, T, N, H]` in query's dtype.
    """
    batch, length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    mask = jnp.broadcast_to(mask, (batch, heads, length, kv_length))
    # Rows that nobody sees may hold anything, NaN included.
    seen = mask.any((1, 2))[:, :, None, None]
    key, value = (jnp.where(seen, x, 0).astype(jnp.float32) for x in (key, value))
    sees = jnp.moveaxis(mask.any(-1), 1, 2)[..., None]
    q = jnp.where(sees, query, 0).astype(jnp.float32)
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    mask = mask.reshape(batch, kv_heads, heads // kv_heads, length, kv_length)

    logits = scale * jnp.einsum('btkrh,bskh->bkrts', q, key, precision='highest')
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(mask, logits, -jnp.inf)
    largest = logits.max(-1, keepdims=True)
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        largest = jnp.maximum(largest, sinks)
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
    weights = jnp.exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    if sink_logits is not None:
        total += jnp.exp(sinks - largest)
    weights /= jnp.where(total > 0, total, 1.0)
    output = jnp.einsum('bkrts,bskh->btkrh', weights, value, precision='highest')
    return output.reshape(query.shape).astype(query.dtype)
