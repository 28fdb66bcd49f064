"""One softmax over a sliding window and the stochastic window's tokens beyond it."""

import functools

import jax
import jax.numpy as jnp

from sa_jax.attention import blockwise, plans
from sa_jax.attention.lanes import Settings


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    permutation: jax.Array,
    tokens: plans.Tokens,
    sink_logits: jax.Array | None,
    *,
    window: int,
    local_window: int,
    num_sinks: int,
    scale: float,
    logits_soft_cap: float | None,
) -> jax.Array:
    """See `local_stochastic_attention`; permutation `[B or 1, T]` or `[B, K, T]`.

    Near keys, sinks among them, and distant ones are attended to by themselves, and joined by
    their log-sum-exps.
    """
    batch, length, _, _ = query.shape
    kv_heads = key.shape[2]
    run = functools.partial(_run, scale=scale, logits_soft_cap=logits_soft_cap)
    near = run(
        query,
        key,
        value,
        sink_logits,
        plans.band(tokens, length, local_window, True, num_sinks),
    )
    distant = functools.partial(
        plans.distant_slots, window=window, local_window=local_window, num_sinks=num_sinks
    )
    if permutation.ndim == 3:
        # Heads that see other tokens are examples of their own.
        arrays = (blockwise.heads_to_examples(x, kv_heads) for x in (query, key, value))
        tokens = jax.tree.map(
            lambda x: jnp.repeat(jnp.broadcast_to(x, (batch, length)), kv_heads, axis=0), tokens
        )
        plan = distant(permutation.reshape(batch * kv_heads, length), tokens)
        far = tuple(blockwise.examples_to_heads(x, kv_heads) for x in run(*arrays, None, plan))
    else:
        far = run(query, key, value, None, distant(permutation, tokens))
    (near, near_lse), (far, far_lse) = near, far
    share = jax.nn.sigmoid(far_lse - near_lse)
    return (near + share * (far - near)).astype(query.dtype)


def _run(query, key, value, sink_logits, plan_and_sizes, *, scale, logits_soft_cap):
    """Output `[B, T, N, H]` and log-sum-exp `[B, T, N, 1]`, float32."""
    plan, sizes = plan_and_sizes
    settings = Settings(sizes, scale, logits_soft_cap)
    sink_logits = None if sink_logits is None else sink_logits[None]
    output, lse = blockwise.blockwise_attention(query, key, value, sink_logits, plan, settings)
    return output.astype(jnp.float32), lse[..., None]
