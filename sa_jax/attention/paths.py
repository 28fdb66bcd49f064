"""From checked inputs to an output: the reference, or a plan for the blockwise engine."""

import inspect

import jax
import jax.numpy as jnp

from sa_jax.attention import blockwise, inputs, masks, plans, reference
from sa_jax.attention import moba as block_choice
from sa_jax.attention import permutation as permutations

IMPLEMENTATIONS = ('reference', 'xla')


def resolve(implementation: str | None) -> str:
    """The implementation to run: the one place where a path is picked.

    Raises:
      ValueError: no such implementation.
    """
    if implementation is None:
        return 'xla'
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f'implementation={implementation!r}; expected None or one of '
            f'{", ".join(map(repr, IMPLEMENTATIONS))}'
        )
    return implementation


def _compiled(function):
    """Jits a function whose keyword-only arguments are static.

    Compiled as one also where the caller is not: hundreds of small operations plan the blocks.
    """
    parameters = inspect.signature(function).parameters.values()
    static = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return jax.jit(function, static_argnames=static)


@_compiled
def own_order(
    query,
    key,
    value,
    query_tokens,
    key_tokens,
    sink_logits,
    *,
    window,
    is_causal,
    scale,
    logits_soft_cap,
    num_sinks,
    implementation,
):
    """Full (window None) and sliding-window attention; key_tokens is None where T = S."""
    is_separate = key_tokens is not None
    query_tokens = inputs.tokens(*query_tokens, query.shape[1])
    key_tokens = inputs.tokens(*key_tokens, key.shape[1]) if is_separate else query_tokens
    if implementation == 'reference':
        mask = masks.own_order(query_tokens, key_tokens, window, is_causal, num_sinks)
        mask = masks.with_heads(mask, query.shape[2])
        return reference.masked_attention(
            query, key, value, mask, sink_logits, scale=scale, logits_soft_cap=logits_soft_cap
        )
    if is_separate:
        plan = plans.elsewhere(query_tokens, key_tokens, window, is_causal, num_sinks)
    elif window is None:
        plan = plans.everything(query_tokens, is_causal)
    else:
        plan = plans.band(query_tokens, window, is_causal, num_sinks)
    plan, block, chunk = plan
    settings = blockwise.Settings(block, chunk, scale, logits_soft_cap)
    sink_logits = None if sink_logits is None else sink_logits[None]
    return blockwise.blockwise_attention(query, key, value, sink_logits, plan, settings)[0]


@_compiled
def stochastic(
    query,
    key,
    value,
    permutation,
    permutation_key,
    positions,
    segment_ids,
    sink_logits,
    *,
    window,
    is_causal,
    circular,
    scale,
    logits_soft_cap,
    num_sinks,
    implementation,
):
    """Stochastic attention; see `stochastic_attention`."""
    batch, length, heads, _ = query.shape
    kv_heads = key.shape[2]
    positions, segment_ids = inputs.tokens(positions, segment_ids, length)
    if permutation is None:
        permutation = permutations.draw_permutation(permutation_key, segment_ids=segment_ids)
    permutation = permutation.astype(jnp.int32)
    permutation = permutation[None] if permutation.ndim == 1 else permutation
    if implementation == 'reference':
        mask = masks.stochastic(
            permutation, positions, segment_ids, window, is_causal, circular, num_sinks
        )
        mask = masks.with_heads(mask, heads)
        return reference.masked_attention(
            query, key, value, mask, sink_logits, scale=scale, logits_soft_cap=logits_soft_cap
        )
    sink_logits = None if sink_logits is None else sink_logits[None]
    per_head = permutation.ndim == 3
    if per_head:
        # Heads that see other tokens are examples of their own.
        query, key, value = (blockwise.heads_to_examples(x, kv_heads) for x in (query, key, value))
        positions, segment_ids = (
            jnp.repeat(jnp.broadcast_to(x, (batch, length)), kv_heads, axis=0)
            for x in (positions, segment_ids)
        )
        permutation = permutation.reshape(batch * kv_heads, length)
        if sink_logits is not None:
            sink_logits = jnp.tile(sink_logits.reshape(kv_heads, -1), (batch, 1))
    plan = plans.circle if circular else plans.slots
    plan, block, chunk = plan(permutation, positions, segment_ids, window, is_causal, num_sinks)
    settings = blockwise.Settings(block, chunk, scale, logits_soft_cap)
    output, _ = blockwise.blockwise_attention(query, key, value, sink_logits, plan, settings)
    return blockwise.examples_to_heads(output, kv_heads) if per_head else output


@_compiled
def moba(
    query,
    key,
    value,
    positions,
    segment_ids,
    sink_logits,
    *,
    block_size,
    top_k,
    scale,
    logits_soft_cap,
    num_sinks,
    implementation,
):
    """Mixture of block attention; see `moba_attention`."""
    positions, segment_ids = inputs.tokens(positions, segment_ids, query.shape[1])
    options = {'scale': scale, 'logits_soft_cap': logits_soft_cap}
    if implementation == 'reference':
        mask = block_choice.mask(query, key, positions, segment_ids, block_size, top_k, num_sinks)
        return reference.masked_attention(query, key, value, mask, sink_logits, **options)
    return block_choice.attention(
        query,
        key,
        value,
        sink_logits,
        positions,
        segment_ids,
        block_size=block_size,
        top_k=top_k,
        num_sinks=num_sinks,
        **options,
    )
