"""Attention of one new token over a cache of keys and values, in O(w).

A pattern is decoded by naming the tokens that token t sees, its *neighbours*: at most w rows, which
are gathered from the cache. Causality makes this exact: what a row of the full pattern holds beyond
t is never seen. The sequence is one document whose positions are the cache's rows, and a random
order is drawn beforehand, over all the tokens that the cache can hold.

Neighbours are int32 `[B or 1, K or 1, most]`, each token once and t itself among them, -1 for none.
`token` is t, a scalar or `[B]`. Permutations are `[N]`, `[B, N]` or `[B, K, N]`: of all N tokens,
the one in each slot; `slot` is the inverse. Only `decode_attention` without neighbours costs more
the more tokens there are.
"""

import functools

import jax
import jax.numpy as jnp

from sa_jax.attention import inputs, masks
from sa_jax.attention import permutation as permutations

# Where all rows of the cache are read: at least so many at a time, in at most so many parts.
_BLOCK, _PARTS = 1024, 8


def sliding_window_neighbours(
    token: jax.Array | int, length: int, *, window: int, num_sinks: int = 0
) -> jax.Array:
    """The tokens that a causal sliding window shows token t: t - window + 1 … t.

    Args:
      token: t, a scalar or `[B]`.
      length: rows of the cache.
      window: keys a token sees, itself included.
      num_sinks: first tokens that are visible beside the window.

    Returns:
      int32 `[B or 1, 1, most]`, -1 for none.

    Raises:
      ValueError: a count is out of range.
    """
    inputs.check_count('window', window, 1)
    tokens = _column(token) - jnp.arange(min(window, length), dtype=jnp.int32)
    return _visible(tokens, tokens >= 0, token, length, num_sinks)


def stochastic_neighbours(
    permutation: jax.Array,
    slot: jax.Array,
    token: jax.Array | int,
    *,
    window: int,
    circular: bool = False,
    num_sinks: int = 0,
) -> jax.Array:
    """The tokens that causal stochastic attention shows token t.

    Those within ⌊window/2⌋ slots back and ⌊(window - 1)/2⌋ on that are not later than t.

    Args:
      permutation: `[N]`, `[B, N]` or `[B, K, N]`, the token in each slot.
      slot: the slot of each token, `inverse_permutation(permutation)`.
      token: t, a scalar or `[B]`.
      window: slots a token sees.
      circular: whether the window wraps around at the ends.
      num_sinks: first tokens that are visible beside the window.

    Returns:
      int32 `[B or 1, K or 1, most]`, -1 for none.

    Raises:
      ValueError: a count is out of range.
    """
    inputs.check_count('window', window, 1)
    length = permutation.shape[-1]
    back, ahead = masks.window_sides(window)
    if circular:
        first, last = -back, -back + min(window, length) - 1
    else:
        first, last = -min(back, length - 1), min(ahead, length - 1)
    offsets = jnp.arange(first, last + 1, dtype=jnp.int32)
    slots = _look_up(slot, _column(token)) + offsets
    if circular:
        slots %= length
    return _in_slots(permutation, slots, token, num_sinks)


def local_stochastic_neighbours(
    permutation: jax.Array,
    slot: jax.Array,
    token: jax.Array | int,
    length: int,
    *,
    window: int,
    local_window: int,
    num_sinks: int = 0,
) -> jax.Array:
    """The tokens that local stochastic attention shows token t: those of either window, up to t.

    Args:
      permutation: `[N]`, `[B, N]` or `[B, K, N]`, the token in each slot.
      slot: the slot of each token, `inverse_permutation(permutation)`.
      token: t, a scalar or `[B]`.
      length: rows of the cache.
      window: slots a token sees.
      local_window: tokens of the sliding window, t included.
      num_sinks: first tokens that are visible beside both.

    Returns:
      int32 `[B or 1, K or 1, most]`, -1 for none.

    Raises:
      ValueError: a count is out of range.
    """
    near = sliding_window_neighbours(token, length, window=local_window, num_sinks=num_sinks)
    far = stochastic_neighbours(permutation, slot, token, window=window)
    is_near = (far > _column(token) - local_window) | (far < num_sinks)
    far = jnp.where(is_near, -1, far)
    shape = tuple(max(x) for x in zip(near.shape[:2], far.shape[:2], strict=True))
    parts = [jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (near, far)]
    return jnp.concatenate(parts, axis=-1)


def stochastic_partition_neighbours(
    permutation: jax.Array,
    slot: jax.Array,
    token: jax.Array | int,
    *,
    chunk_size: int,
    num_sinks: int = 0,
) -> jax.Array:
    """The tokens that causal attention within random chunks shows token t: its chunk's, up to t.

    Args:
      permutation: `[N]`, `[B, N]` or `[B, K, N]`, the token in each slot.
      slot: the slot of each token, `inverse_permutation(permutation)`.
      token: t, a scalar or `[B]`.
      chunk_size: slots in a chunk; the last chunk may be short.
      num_sinks: first tokens that are visible beside the chunk.

    Returns:
      int32 `[B or 1, K or 1, most]`, -1 for none.

    Raises:
      ValueError: a count is out of range.
    """
    inputs.check_count('chunk_size', chunk_size, 1)
    members = jnp.arange(min(chunk_size, permutation.shape[-1]), dtype=jnp.int32)
    own = _look_up(slot, _column(token))
    return _in_slots(permutation, own - own % chunk_size + members, token, num_sinks)


def decode_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    neighbours: jax.Array | None = None,
    *,
    token: jax.Array | int | None = None,
    offset: jax.Array | int = 0,
    length: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Attention of one token per example to its neighbours, or to all tokens up to itself.

    Args:
      query: `[B, 1, N, H]`.
      key_cache: `[B, S, K, H]`, K dividing N, with the rows of the tokens so far, t's own included.
      value_cache: `[B, S, K, H]`.
      neighbours: int32 `[B or 1, K or 1, most]`, the tokens to attend to, -1 for none. Only their
        rows are read.
      token: t instead, a scalar or `[B]`, for attention to tokens 0 … t, in O(t).
      offset: the row of token 0, a scalar: one array may hold the caches of several layers.
      length: the most tokens there are, all rows by default; no more are read at a time.
      scale: factor of the logits; 1/√H by default.
      logits_soft_cap: c in c·tanh(logits / c).
      sink_logits: `[N]`, a logit per head in the denominator only.

    Returns:
      `[B, 1, N, H]` in query's dtype; statistics are float32. A query without neighbours gives
      zeros.

    Raises:
      ValueError, TypeError: shapes disagree; both or neither of `neighbours` and `token`.
    """
    _check_decoding(query, key_cache, value_cache, neighbours, token)
    inputs.check_sink_logits(sink_logits, query.shape[2])
    batch, rows, kv_heads, head_dim = key_cache.shape
    scale = head_dim**-0.5 if scale is None else float(scale)
    attend = functools.partial(
        _attend,
        query.reshape(batch, kv_heads, -1, head_dim),
        scale=scale,
        cap=inputs.soft_cap(logits_soft_cap),
    )
    state = _initial(batch, kv_heads, query.shape[2] // kv_heads, head_dim, sink_logits)
    if neighbours is not None:
        visible = neighbours >= 0
        index = jnp.where(visible, neighbours + offset, 0)
        state = attend(_take(key_cache, index), _take(value_cache, index), visible, state)
    else:
        token, length = _column(token), length or rows
        block = min(length, max(_BLOCK, -(-length // _PARTS)))

        def attend_to_block(number, state):
            start = jnp.minimum(offset + number * block, rows - block)
            index = start - offset + jnp.arange(block)
            visible = (number * block <= index) & (index <= token)
            keys, values = (
                jax.lax.dynamic_slice_in_dim(x, start, block, axis=1)
                for x in (key_cache, value_cache)
            )
            return attend(keys, values, visible, state)

        state = jax.lax.fori_loop(0, token.max() // block + 1, attend_to_block, state)
    _, total, output = state
    output /= jnp.where(total > 0, total, 1.0)
    return output.reshape(query.shape).astype(query.dtype)


def _check_decoding(query, key_cache, value_cache, neighbours, token):
    inputs.check_heads(query, key_cache, value_cache)
    if query.shape[1] != 1:
        raise ValueError(f'query has shape {query.shape}; expected one token, [B, 1, N, H]')
    if (neighbours is None) == (token is None):
        given = 'neither' if token is None else 'both'
        raise ValueError(
            f'got {given} of neighbours and token; give neighbours, or the token up to which all '
            'are visible'
        )
    batch, _, kv_heads, _ = key_cache.shape
    if neighbours is not None and not (
        neighbours.ndim == 3
        and neighbours.shape[0] in (1, batch)
        and neighbours.shape[1] in (1, kv_heads)
    ):
        raise ValueError(
            f'neighbours has shape {neighbours.shape}; expected [{batch} or 1, {kv_heads} or 1, '
            'most]: tokens per example and key/value head'
        )


def _initial(batch, kv_heads, group, head_dim, sink_logits):
    """The largest logit so far, the denominator relative to it, and the unnormalised output."""
    shape = (batch, kv_heads, group, 1)
    if sink_logits is None:
        largest, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:
        sinks = sink_logits.astype(jnp.float32).reshape(kv_heads, group, 1)
        largest, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape)
    return largest, total, jnp.zeros((batch, kv_heads, group, head_dim))


def _attend(query, keys, values, visible, state, *, scale, cap):
    """The state with those of keys and values `[B, R, K, H]` that are visible added.

    `visible` is `[B or 1, K or 1, R]`.
    """
    # float32 operands are multiplied in full precision on every device.
    precision = 'highest' if keys.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    logits = scale * einsum('bkgh,brkh->bkgr', query, keys)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
    before, total, output = state
    largest = jnp.maximum(before, logits.max(-1, keepdims=True))
    finite = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights, fade = jnp.exp(logits - finite), jnp.exp(before - finite)
    # What isn't seen may hold anything, NaN included.
    values = jnp.where(jnp.moveaxis(visible, 1, 2)[..., None], values, 0)
    total = fade * total + weights.sum(-1, keepdims=True)
    output = fade * output + einsum('bkgr,brkh->bkgh', weights.astype(values.dtype), values)
    return largest, total, output


def _column(token: jax.Array | int) -> jax.Array:
    """A scalar or `[B]` as `[B or 1, 1, 1]`."""
    return jnp.asarray(token, jnp.int32).reshape(-1, 1, 1)


def _look_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[b, k, index[b, k]]` for a table `[N]`, `[B, N]` or `[B, K, N]`."""
    table = table.reshape(*table.shape[:-1], *(1,) * (3 - table.ndim), table.shape[-1])
    examples, heads = (jnp.arange(size) for size in table.shape[:2])
    return table[examples[:, None, None], heads[:, None], index]


def _in_slots(permutation, slots, token, num_sinks):
    length = permutation.shape[-1]
    tokens = _look_up(permutation, jnp.clip(slots, 0, length - 1))
    return _visible(tokens, (slots >= 0) & (slots < length), token, length, num_sinks)


def _visible(tokens, exists, token, length, num_sinks):
    """Candidates `[B or 1, K or 1, most]` that exist and aren't later than t, and the sinks."""
    inputs.check_count('num_sinks', num_sinks, 0)
    token = _column(token)
    tokens = jnp.where(exists & (tokens <= token) & (tokens >= num_sinks), tokens, -1)
    if not num_sinks:
        return tokens
    sinks = jnp.arange(min(num_sinks, length), dtype=jnp.int32)
    sinks = jnp.where(sinks <= token, sinks, -1)
    shape = (max(tokens.shape[0], sinks.shape[0]), tokens.shape[1])
    parts = [jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (sinks, tokens)]
    return jnp.concatenate(parts, axis=-1)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """`x[b, rows[b, k], k]` as `[B, most, K, H]`, for x `[B, S, K, H]`."""
    if rows.shape[1] == 1:
        return permutations.take_rows(x, rows[:, 0])
    batch, _, kv_heads, _ = x.shape
    examples, heads = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)
    return x[examples, jnp.moveaxis(rows, 1, 2), heads]
