"""The built-in attention functions under the names that configs use."""

import jax

from sa_jax.attention import decoding, functions, masks, moba, sequence_parallel, window
from sa_jax.attention import permutation as permutations
from sa_jax.attention.registry import AttentionContext, Decoding, register_attention


def _tokens(context: AttentionContext) -> dict:
    return {
        'is_causal': context.is_causal,
        'positions': context.positions,
        'segment_ids': context.segment_ids,
    }


def _key(context: AttentionContext) -> jax.Array:
    if context.key is None:
        raise ValueError(
            'stochastic attention got a context without a key; pass one for the permutation'
        )
    return context.key


def _full(query, key, value, context, **options):
    return functions.full_attention(query, key, value, **_tokens(context), **options)


def _full_mask(query, key, context, *, num_sinks=0, **_):
    tokens = context.tokens(query)
    mask = masks.own_order(tokens, tokens, None, context.is_causal, num_sinks)
    return masks.with_heads(mask, query.shape[2])


def _sliding_window(query, key, value, context, **options):
    return functions.sliding_window_attention(query, key, value, **_tokens(context), **options)


def _sliding_window_mask(query, key, context, *, window, num_sinks=0, **_):
    tokens = context.tokens(query)
    mask = masks.own_order(tokens, tokens, window, context.is_causal, num_sinks)
    return masks.with_heads(mask, query.shape[2])


def _stochastic(query, key, value, context, **options):
    return functions.stochastic_attention(
        query, key, value, permutation_key=_key(context), **_tokens(context), **options
    )


def _stochastic_mask(query, key, context, *, window, circular=False, num_sinks=0, **_):
    positions, segment_ids = context.tokens(query)
    permutation = permutations.draw_permutation(_key(context), segment_ids=segment_ids)
    mask = masks.stochastic(
        permutation, positions, segment_ids, window, context.is_causal, circular, num_sinks
    )
    return masks.with_heads(mask, query.shape[2])


def _local_stochastic(query, key, value, context, **options):
    return functions.local_stochastic_attention(
        query, key, value, permutation_key=_key(context), **_tokens(context), **options
    )


def _local_stochastic_mask(query, key, context, *, window, local_window, num_sinks=0, **_):
    positions, segment_ids = context.tokens(query)
    permutation = permutations.draw_permutation(_key(context), segment_ids=segment_ids)
    mask = masks.local_stochastic(
        permutation, positions, segment_ids, window, local_window, num_sinks
    )
    return masks.with_heads(mask, query.shape[2])


def _stochastic_partition(query, key, value, context, **options):
    return functions.stochastic_partition_attention(
        query, key, value, permutation_key=_key(context), **_tokens(context), **options
    )


def _stochastic_partition_mask(query, key, context, *, chunk_size, num_sinks=0, **_):
    positions, segment_ids = context.tokens(query)
    permutation = permutations.draw_permutation(_key(context), segment_ids=segment_ids)
    mask = masks.stochastic_partition(
        permutation, positions, segment_ids, chunk_size, context.is_causal, num_sinks
    )
    return masks.with_heads(mask, query.shape[2])


def _moba(query, key, value, context, **options):
    return functions.moba_attention(query, key, value, **_tokens(context), **options)


def _moba_mask(query, key, context, *, block_size, top_k, num_sinks=0, **_):
    tokens = context.tokens(query)
    return moba.mask(query, key, *tokens, block_size, top_k, num_sinks)


def _split_sliding_window(query, key, value, context, axis_name, *, num_sinks=0, **options):
    _check_splittable(num_sinks=num_sinks)
    return sequence_parallel.sliding_window_attention(
        query, key, value, axis_name=axis_name, **_tokens(context), **options
    )


def _split_stochastic(
    query, key, value, context, axis_name, *, circular=False, num_sinks=0, **options
):
    _check_splittable(circular=circular, num_sinks=num_sinks)
    return sequence_parallel.stochastic_attention(
        query,
        key,
        value,
        axis_name=axis_name,
        permutation_key=_key(context),
        is_causal=context.is_causal,
        segment_ids=context.segment_ids,
        **options,
    )


def _check_splittable(**options) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f'{name}={value} has no form for a sequence on several devices')


def _check_decodable(context: AttentionContext) -> None:
    has_tokens = context.positions is not None or context.segment_ids is not None
    if has_tokens or not context.is_causal:
        raise ValueError(
            'decoding is causal and of one document, at positions 0, 1, …; expected a context with '
            'is_causal=True and neither positions nor segment_ids'
        )


def _nothing_to_draw(context, n, **_):
    del n
    _check_decodable(context)
    return ()


def _draw_slots(context, n, **_):
    _check_decodable(context)
    permutation = permutations.draw_permutation(_key(context), length=n)
    return permutation, permutations.inverse_permutation(permutation)


def _sliding_window_neighbours(drawn, token, n, *, window, num_sinks=0, **_):
    del drawn
    return decoding.sliding_window_neighbours(token, n, window=window, num_sinks=num_sinks)


def _stochastic_neighbours(drawn, token, n, *, window, circular=False, num_sinks=0, **_):
    del n
    return decoding.stochastic_neighbours(
        *drawn, token, window=window, circular=circular, num_sinks=num_sinks
    )


def _local_stochastic_neighbours(drawn, token, n, *, window, local_window, num_sinks=0, **_):
    options = {'window': window, 'local_window': local_window, 'num_sinks': num_sinks}
    return decoding.local_stochastic_neighbours(*drawn, token, n, **options)


def _stochastic_partition_neighbours(drawn, token, n, *, chunk_size, num_sinks=0, **_):
    del n
    return decoding.stochastic_partition_neighbours(
        *drawn, token, chunk_size=chunk_size, num_sinks=num_sinks
    )


register_attention(
    'full',
    _full,
    mask=_full_mask,
    visible_keys=window.visible_keys_of('full'),
    decoding=Decoding(_nothing_to_draw, None),
)
register_attention(
    'sliding_window',
    _sliding_window,
    mask=_sliding_window_mask,
    visible_keys=window.visible_keys_of('sliding_window'),
    decoding=Decoding(_nothing_to_draw, _sliding_window_neighbours),
    split=_split_sliding_window,
)
register_attention(
    'stochastic',
    _stochastic,
    mask=_stochastic_mask,
    visible_keys=window.visible_keys_of('stochastic'),
    decoding=Decoding(_draw_slots, _stochastic_neighbours),
    split=_split_stochastic,
)
register_attention(
    'local_stochastic',
    _local_stochastic,
    mask=_local_stochastic_mask,
    visible_keys=window.visible_keys_of('local_stochastic'),
    decoding=Decoding(_draw_slots, _local_stochastic_neighbours),
)
register_attention(
    'stochastic_partition',
    _stochastic_partition,
    mask=_stochastic_partition_mask,
    visible_keys=window.visible_keys_of('stochastic_partition'),
    decoding=Decoding(_draw_slots, _stochastic_partition_neighbours),
)
register_attention('moba', _moba, mask=_moba_mask, visible_keys=window.visible_keys_of('moba'))
