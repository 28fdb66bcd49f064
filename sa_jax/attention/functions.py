"""The public attention functions, in the manner of `jax.nn.dot_product_attention`.

Common to all: query `[B, T, N, H]`, key and value `[B, S, K, H]` with K dividing N, output like
query, softmax statistics in float32. `segment_ids` `[B, T]`: 0 is padding, equal numbers >= 1 are
one document and contiguous. `positions` `[B, T]` strictly increase within a document; the index by
default. A valid query always sees itself; queries without keys, padding among them, give zeros.
`scale`, `logits_soft_cap` and all counts are static: known when tracing. NaN in padding reaches
nothing; in a value that a query doesn't see it still may, as 0 · NaN. On a mesh with explicit axes
call the functions inside `jax.shard_map`.
`implementation` is 'reference' (dense, float32, O(n²)), 'xla' (blockwise, any device), 'pallas'
(the kernels for NVIDIA GPUs from compute capability 8.0 on; not for circular windows, MoBA, or
queries and keys with tokens of their own), 'pallas_interpret' (the same kernels in Pallas'
interpreter, any device, slow) or None: the best that supports the call. On several devices None
takes the kernels only inside `jax.shard_map`, which then needs `check_vma=False`.
"""

import jax

from sa_jax.attention import inputs, paths


def full_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    num_sinks: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Attention to every key of the segment that is not later.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, K, H]`.
      value: `[B, S, K, H]`.
      is_causal: whether a query sees only positions up to its own.
      segment_ids: `[B, T]`, for T = S.
      positions: `[B, T]`, for T = S.
      query_positions: `[B, T]`; needed with the next three where T != S, in place of the two above.
      key_positions: `[B, S]`.
      query_segment_ids: `[B, T]`.
      key_segment_ids: `[B, S]`.
      scale: factor of the logits; 1/√H by default.
      logits_soft_cap: c in c·tanh(logits / c) (Gemma 2).
      sink_logits: `[N]`, a learned logit per head in the denominator only (gpt-oss).
      num_sinks: first tokens of a segment that are always visible (StreamingLLM); here all are.
      implementation: see the module.

    Returns:
      `[B, T, N, H]` in query's dtype.

    Raises:
      ValueError, TypeError: see `sa_jax.attention.inputs`; the message says what was expected.
    """
    return _in_own_order(**locals(), window=None)


def sliding_window_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    window: int,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    num_sinks: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Attention to the `window` nearest keys, the query's own included (SWA).

    `window` counts keys: causal, position p sees p - window + 1 … p; else ⌊window/2⌋ back and
    ⌊(window - 1)/2⌋ ahead. JAX's `local_window_size` and flash-attention count one less.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, K, H]`.
      value: `[B, S, K, H]`.
      window: keys a query sees, at least 1.
      is_causal: as for `full_attention`, like all that follow.
      segment_ids: `[B, T]`.
      positions: `[B, T]`.
      query_positions: `[B, T]`.
      key_positions: `[B, S]`.
      query_segment_ids: `[B, T]`.
      key_segment_ids: `[B, S]`.
      scale: factor of the logits.
      logits_soft_cap: the cap of the logits.
      sink_logits: `[N]`.
      num_sinks: first tokens of a segment that are visible beside the window.
      implementation: see the module.

    Returns:
      `[B, T, N, H]` in query's dtype.

    Raises:
      ValueError, TypeError: see `sa_jax.attention.inputs`.
    """
    inputs.check_count('window', window, 1)
    return _in_own_order(**locals())


def stochastic_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    window: int,
    permutation: jax.Array | None = None,
    permutation_key: jax.Array | None = None,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    circular: bool = False,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    num_sinks: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Stochastic attention: a window over randomly permuted tokens (paper, section 3).

    A query sees ⌊window/2⌋ slots back and ⌊(window - 1)/2⌋ on, its own included, and of these, if
    causal, only the tokens that are not later in the original order: (window + 1)/2 on average.
    Queries and keys carry their position encoding already: nothing here depends on the slot.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`.
      value: `[B, T, K, H]`.
      window: slots a query sees, at least 1.
      permutation: `[T]`, `[B, T]` or `[B, K, T]` (per key/value head, shared by its query group),
        the index of the token in each slot; used as given, masked by segment.
      permutation_key: a typed key to draw it from instead, within the segments, so that a document
        gets the same result alone, padded and packed. Shape `[]` draws one permutation for all,
        `[B]` one per example, `[B, K]` one per example and key/value head.
      is_causal: whether a query sees only positions up to its own.
      segment_ids: `[B, T]`.
      positions: `[B, T]`.
      scale: factor of the logits; 1/√H by default.
      circular: whether the window wraps around at the ends of a segment's slots, so that every
        query has exactly min(window, segment length) slots.
      logits_soft_cap: c in c·tanh(logits / c).
      sink_logits: `[N]`.
      num_sinks: first tokens of a segment that are visible beside the window.
      implementation: see the module.

    Returns:
      `[B, T, N, H]` in query's dtype, in the tokens' own order.

    Raises:
      ValueError, TypeError: see `sa_jax.attention.inputs`; also both or neither of `permutation`
        and `permutation_key`.
    """
    inputs.check_heads(query, key, value)
    inputs.check_same_length(query, key, 'stochastic attention')
    inputs.check_count('window', window, 1)
    _check_options(query, sink_logits, num_sinks)
    _check_tokens(query, positions, segment_ids)
    _check_draw(permutation, permutation_key, query, key)
    if circular and permutation is not None and segment_ids is not None:
        inputs.check_slots_contiguous(permutation, segment_ids)
    return paths.stochastic(
        query,
        key,
        value,
        permutation,
        permutation_key,
        positions,
        segment_ids,
        sink_logits,
        window=min(int(window), inputs.FARTHEST),
        is_causal=bool(is_causal),
        circular=bool(circular),
        scale=_scale(scale, query),
        logits_soft_cap=inputs.soft_cap(logits_soft_cap),
        num_sinks=num_sinks,
        implementation=implementation,
    )


def local_stochastic_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    window: int,
    local_window: int,
    permutation: jax.Array | None = None,
    permutation_key: jax.Array | None = None,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    num_sinks: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Attention to the union of a sliding and a stochastic window, in one softmax.

    Where two gated paths would need training, this gives a trained model both its neighbourhood
    and random distant keys.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`.
      value: `[B, T, K, H]`.
      window: slots of the stochastic window, as for `stochastic_attention`.
      local_window: keys of the sliding window, the query's own included.
      permutation: as for `stochastic_attention`, like all that follow.
      permutation_key: a typed key to draw it from instead.
      is_causal: the union is only defined causally.
      segment_ids: `[B, T]`.
      positions: `[B, T]`.
      scale: factor of the logits.
      logits_soft_cap: the cap of the logits.
      sink_logits: `[N]`.
      num_sinks: first tokens of a segment that are visible beside both.
      implementation: see the module.

    Returns:
      `[B, T, N, H]` in query's dtype, in the tokens' own order.

    Raises:
      ValueError, TypeError: as `stochastic_attention`; also `is_causal=False`.
    """
    if not is_causal:
        raise ValueError('is_causal=False; local stochastic attention is only defined causally')
    inputs.check_heads(query, key, value)
    inputs.check_same_length(query, key, 'local stochastic attention')
    inputs.check_count('window', window, 1)
    inputs.check_count('local_window', local_window, 1)
    _check_options(query, sink_logits, num_sinks)
    _check_tokens(query, positions, segment_ids)
    _check_draw(permutation, permutation_key, query, key)
    return paths.local_stochastic_window(
        query,
        key,
        value,
        permutation,
        permutation_key,
        positions,
        segment_ids,
        sink_logits,
        window=min(int(window), inputs.FARTHEST),
        local_window=min(int(local_window), inputs.FARTHEST),
        scale=_scale(scale, query),
        logits_soft_cap=inputs.soft_cap(logits_soft_cap),
        num_sinks=num_sinks,
        implementation=implementation,
    )


def stochastic_partition_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    chunk_size: int,
    permutation: jax.Array | None = None,
    permutation_key: jax.Array | None = None,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    num_sinks: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Attention within the chunks of a random partition: SA without the half that causality masks.

    The permuted tokens of each segment are cut into chunks of `chunk_size`, the last one maybe
    shorter, and each is sorted by position: a batch of small causal problems. Any pair of n tokens
    shares a chunk with probability (chunk_size - 1)/(n - 1) if chunk_size divides n, as a window of
    chunk_size slots would connect it; a causal query sees (chunk_size + 1)/2 keys on average.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`.
      value: `[B, T, K, H]`.
      chunk_size: tokens per chunk, at least 1.
      permutation: as for `stochastic_attention`, like all that follow.
      permutation_key: a typed key to draw it from instead.
      is_causal: whether a query sees only positions up to its own.
      segment_ids: `[B, T]`.
      positions: `[B, T]`.
      scale: factor of the logits.
      logits_soft_cap: the cap of the logits.
      sink_logits: `[N]`.
      num_sinks: first tokens of a segment that are visible beside the chunk.
      implementation: see the module.

    Returns:
      `[B, T, N, H]` in query's dtype, in the tokens' own order.

    Raises:
      ValueError, TypeError: as `stochastic_attention`.
    """
    inputs.check_heads(query, key, value)
    inputs.check_same_length(query, key, 'stochastic partition attention')
    inputs.check_count('chunk_size', chunk_size, 1)
    _check_options(query, sink_logits, num_sinks)
    _check_tokens(query, positions, segment_ids)
    _check_draw(permutation, permutation_key, query, key)
    return paths.stochastic_partition(
        query,
        key,
        value,
        permutation,
        permutation_key,
        positions,
        segment_ids,
        sink_logits,
        chunk_size=min(int(chunk_size), inputs.FARTHEST),
        is_causal=bool(is_causal),
        scale=_scale(scale, query),
        logits_soft_cap=inputs.soft_cap(logits_soft_cap),
        num_sinks=num_sinks,
        implementation=implementation,
    )


def moba_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int,
    top_k: int,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    num_sinks: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Mixture of block attention (MoBA): each query head chooses `top_k` blocks of keys.

    A block's score is the query times the mean of its keys, in float32; the own block is always
    chosen and counts, later ones never, ties go to the earlier block. Blocks are taken of the rank
    within the segment. No gradient passes through the choice.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`.
      value: `[B, T, K, H]`.
      block_size: keys per block.
      top_k: blocks per query, the own one included.
      is_causal: MoBA is only defined causally.
      segment_ids: `[B, T]`.
      positions: `[B, T]`.
      scale: factor of the logits; 1/√H by default.
      logits_soft_cap: c in c·tanh(logits / c).
      sink_logits: `[N]`.
      num_sinks: first tokens of a segment that are visible beside the chosen blocks.
      implementation: see the module.

    Returns:
      `[B, T, N, H]` in query's dtype.

    Raises:
      ValueError, TypeError: see `sa_jax.attention.inputs`; also `is_causal=False`.
    """
    if not is_causal:
        raise ValueError('is_causal=False; MoBA chooses among past blocks and must be causal')
    inputs.check_heads(query, key, value)
    inputs.check_same_length(query, key, 'MoBA')
    inputs.check_count('block_size', block_size, 1)
    inputs.check_count('top_k', top_k, 1)
    _check_options(query, sink_logits, num_sinks)
    _check_tokens(query, positions, segment_ids)
    return paths.moba(
        query,
        key,
        value,
        positions,
        segment_ids,
        sink_logits,
        block_size=int(block_size),
        top_k=int(top_k),
        scale=_scale(scale, query),
        logits_soft_cap=inputs.soft_cap(logits_soft_cap),
        num_sinks=num_sinks,
        implementation=implementation,
    )


def _in_own_order(
    *,
    query,
    key,
    value,
    window,
    is_causal,
    segment_ids,
    positions,
    query_positions,
    key_positions,
    query_segment_ids,
    key_segment_ids,
    scale,
    logits_soft_cap,
    sink_logits,
    num_sinks,
    implementation,
):
    """Full and sliding-window attention."""
    inputs.check_heads(query, key, value)
    _check_options(query, sink_logits, num_sinks)
    separate = (query_positions, key_positions, query_segment_ids, key_segment_ids)
    query_shape, key_shape = query.shape[:2], key.shape[:2]
    is_separate = any(x is not None for x in separate)
    if is_separate:
        if any(x is None for x in separate) or positions is not None or segment_ids is not None:
            raise ValueError(
                'queries and keys with tokens of their own need all four of query_positions, '
                'key_positions, query_segment_ids and key_segment_ids, and neither positions nor '
                'segment_ids'
            )
        inputs.check_tokens(query_positions, query_segment_ids, query_shape, 'query_')
        inputs.check_tokens(key_positions, key_segment_ids, key_shape, 'key_')
    elif query_shape != key_shape:
        raise ValueError(
            f'{query_shape[1]} queries and {key_shape[1]} keys: which stand where? Pass '
            'query_positions, key_positions, query_segment_ids and key_segment_ids'
        )
    else:
        _check_tokens(query, positions, segment_ids)
    return paths.own_order(
        query,
        key,
        value,
        (query_positions, query_segment_ids) if is_separate else (positions, segment_ids),
        (key_positions, key_segment_ids) if is_separate else None,
        sink_logits,
        window=None if window is None else min(int(window), inputs.FARTHEST),
        is_causal=bool(is_causal),
        scale=_scale(scale, query),
        logits_soft_cap=inputs.soft_cap(logits_soft_cap),
        # Without a window the first tokens are visible as it is.
        num_sinks=0 if window is None else num_sinks,
        implementation=implementation,
    )


def _check_tokens(query, positions, segment_ids):
    inputs.check_tokens(positions, segment_ids, query.shape[:2])


def _check_draw(permutation, permutation_key, query, key):
    """Checks that exactly one of the two is given, and its shape."""
    if (permutation is None) == (permutation_key is None):
        given = 'neither' if permutation is None else 'both'
        raise ValueError(
            f'got {given} of permutation and permutation_key; give exactly one: an array of token '
            'indices by slot, or a typed jax.random.key to draw it from'
        )
    batch, length, _, _ = query.shape
    kv_heads = key.shape[2]
    if permutation is not None:
        inputs.check_permutation(permutation, batch, length, kv_heads)
        return
    inputs.check_key(permutation_key)
    if permutation_key.shape not in ((), (batch,), (batch, kv_heads)):
        raise ValueError(
            f'permutation_key has shape {permutation_key.shape}; expected (), ({batch},) for a '
            f'draw per example or ({batch}, {kv_heads}) for one per key/value head'
        )


def _check_options(query, sink_logits, num_sinks):
    inputs.check_count('num_sinks', num_sinks, 0)
    inputs.check_sink_logits(sink_logits, query.shape[2])


def _scale(scale, query):
    return query.shape[-1] ** -0.5 if scale is None else float(scale)
