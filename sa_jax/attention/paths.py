"""From checked inputs to an output: the reference, the GPU kernels, or the blockwise engine."""

import functools

import jax
import jax.numpy as jnp

from sa_jax.attention import blockwise, inputs, local_stochastic, masks, plans, reference
from sa_jax.attention import moba as block_choice
from sa_jax.attention import permutation as permutations
from sa_jax.attention.dispatch import KERNELS, compiled
from sa_jax.attention.lanes import Settings


def _needs_shared_tokens(call):
    if call['key_tokens'] is None:
        return None
    return 'queries and keys have tokens of their own'


def _is_plain(call):
    """Full attention to all tokens of the row."""
    extras = ('window', 'key_tokens', 'sink_logits', 'logits_soft_cap')
    tokens = call['query_tokens']
    return all(call[name] is None for name in extras) and tokens[1] is None


@compiled(obstacle=_needs_shared_tokens, is_plain=_is_plain)
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
    length = query.shape[1]
    query_tokens, key_tokens = _int32((query_tokens, key_tokens))
    if implementation == 'reference':
        query_tokens = inputs.tokens(*query_tokens, length)
        key_tokens = inputs.tokens(*key_tokens, key.shape[1]) if is_separate else query_tokens
        mask = masks.own_order(query_tokens, key_tokens, window, is_causal, num_sinks)
        return _dense(query, key, value, mask, sink_logits, scale, logits_soft_cap)
    if implementation == 'cudnn':
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, implementation='cudnn'
        )
    if implementation in KERNELS:
        options = _options(is_causal, scale, logits_soft_cap, num_sinks, implementation)
        return _kernels().own_order(
            query, key, value, *query_tokens, sink_logits, options, window=window
        )
    if is_separate:
        plan = plans.elsewhere(query_tokens, key_tokens, window, is_causal, num_sinks)
    elif window is None:
        plan = plans.everything(query_tokens[1], length, is_causal)
    else:
        plan = plans.band(query_tokens, length, window, is_causal, num_sinks)
    plan, sizes = plan
    settings = Settings(sizes, scale, logits_soft_cap)
    sink_logits = None if sink_logits is None else sink_logits[None]
    return blockwise.blockwise_attention(query, key, value, sink_logits, plan, settings)[0]


@compiled(obstacle=lambda call: 'the window is circular' if call['circular'] else None)
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
    positions, segment_ids = _int32((positions, segment_ids))
    drawn = _draw(permutation, permutation_key, segment_ids, query.shape[1])
    if implementation == 'reference':
        tokens = inputs.tokens(positions, segment_ids, query.shape[1])
        mask = masks.stochastic(drawn, *tokens, window, is_causal, circular, num_sinks)
        return _dense(query, key, value, mask, sink_logits, scale, logits_soft_cap)
    if implementation in KERNELS:
        options = _options(is_causal, scale, logits_soft_cap, num_sinks, implementation)
        return _kernels().stochastic(
            query,
            key,
            value,
            drawn,
            segment_ids,
            sink_logits,
            options,
            window=window,
            mixes_segments=permutation is not None,
        )
    plan = functools.partial(
        plans.circle if circular else plans.slots,
        window=window,
        is_causal=is_causal,
        num_sinks=num_sinks,
    )
    return _permuted(
        query, key, value, drawn, segment_ids, sink_logits, plan, scale, logits_soft_cap
    )


@compiled(obstacle=lambda call: 'the union of two windows has no GPU kernel')
def local_stochastic_window(
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
    local_window,
    scale,
    logits_soft_cap,
    num_sinks,
    implementation,
):
    """Local stochastic attention; see `local_stochastic_attention`."""
    tokens = _int32((positions, segment_ids))
    drawn = _draw(permutation, permutation_key, tokens[1], query.shape[1])
    if implementation == 'reference':
        tokens = inputs.tokens(*tokens, query.shape[1])
        mask = masks.local_stochastic(drawn, *tokens, window, local_window, num_sinks)
        return _dense(query, key, value, mask, sink_logits, scale, logits_soft_cap)
    return local_stochastic.attention(
        query,
        key,
        value,
        drawn,
        tokens,
        sink_logits,
        window=window,
        local_window=local_window,
        num_sinks=num_sinks,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
    )


@compiled
def stochastic_partition(
    query,
    key,
    value,
    permutation,
    permutation_key,
    positions,
    segment_ids,
    sink_logits,
    *,
    chunk_size,
    is_causal,
    scale,
    logits_soft_cap,
    num_sinks,
    implementation,
):
    """Stochastic partition attention; see `stochastic_partition_attention`."""
    positions, segment_ids = _int32((positions, segment_ids))
    drawn = _draw(permutation, permutation_key, segment_ids, query.shape[1])
    if implementation == 'reference':
        tokens = inputs.tokens(positions, segment_ids, query.shape[1])
        mask = masks.stochastic_partition(drawn, *tokens, chunk_size, is_causal, num_sinks)
        return _dense(query, key, value, mask, sink_logits, scale, logits_soft_cap)
    if implementation in KERNELS:
        options = _options(is_causal, scale, logits_soft_cap, num_sinks, implementation)
        return _kernels().stochastic_partition(
            query, key, value, drawn, segment_ids, sink_logits, options, chunk_size=chunk_size
        )
    plan = functools.partial(
        plans.chunks, chunk_size=chunk_size, is_causal=is_causal, num_sinks=num_sinks
    )
    return _permuted(
        query, key, value, drawn, segment_ids, sink_logits, plan, scale, logits_soft_cap
    )


def _dense(query, key, value, mask, sink_logits, scale, logits_soft_cap):
    """The reference under a mask `[B or 1, T, S]`, or `[B, K, T, T]`."""
    mask = masks.with_heads(mask, query.shape[2])
    return reference.masked_attention(
        query, key, value, mask, sink_logits, scale=scale, logits_soft_cap=logits_soft_cap
    )


def _kernels():
    """The GPU kernels, imported where they run: importing Pallas takes a while."""
    from sa_jax.attention import pallas_gpu

    return pallas_gpu


def _options(is_causal, scale, logits_soft_cap, num_sinks, implementation):
    """The options of the GPU kernels."""
    return _kernels().Options(
        is_causal,
        scale,
        logits_soft_cap,
        num_sinks,
        interpret=implementation == 'pallas_interpret',
    )


def _int32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.int32), tree)


def _draw(permutation, permutation_key, segment_ids, length):
    """The permutation given or drawn: int32 `[B or 1, T]` or `[B, K, T]`."""
    if permutation is None:
        of = {'length': length} if segment_ids is None else {'segment_ids': segment_ids}
        permutation = permutations.draw_permutation(permutation_key, **of)
    permutation = inputs.not_folded(permutation.astype(jnp.int32))
    return permutation[None] if permutation.ndim == 1 else permutation


def _permuted(
    query, key, value, permutation, segment_ids, sink_logits, plan, scale, logits_soft_cap
):
    """Attention by `plan(permutation, segment_ids)`, whatever the permutation's scope."""
    batch, length, _, _ = query.shape
    kv_heads = key.shape[2]
    sink_logits = None if sink_logits is None else sink_logits[None]
    per_head = permutation.ndim == 3
    if per_head:
        # Heads that see other tokens are examples of their own.
        query, key, value = (blockwise.heads_to_examples(x, kv_heads) for x in (query, key, value))
        permutation = permutation.reshape(batch * kv_heads, length)
        if segment_ids is not None:
            segment_ids = jnp.repeat(segment_ids, kv_heads, axis=0)
        if sink_logits is not None:
            sink_logits = jnp.tile(sink_logits.reshape(kv_heads, -1), (batch, 1))
    plan, sizes = plan(permutation, segment_ids)
    settings = Settings(sizes, scale, logits_soft_cap)
    output, _ = blockwise.blockwise_attention(query, key, value, sink_logits, plan, settings)
    return blockwise.examples_to_heads(output, kv_heads) if per_head else output


@compiled(obstacle=lambda call: 'MoBA has no GPU kernel')
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
        segment_ids,
        block_size=block_size,
        top_k=top_k,
        num_sinks=num_sinks,
        **options,
    )
