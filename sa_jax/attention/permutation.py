"""Random permutations of the tokens, and moving rows through them.

A permutation is drawn over the valid tokens only and within each segment, from bits that depend on
a token's rank in its segment alone: so a document is permuted alike alone, padded, packed behind
another, and in any batch.
"""

import functools

import jax
import jax.numpy as jnp

from sa_jax.attention import inputs


def draw_permutation(
    key: jax.Array, *, length: int | None = None, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Draws a uniform permutation within each segment (paper, section 3; one per layer).

    Args:
      key: a typed key (`jax.random.key`). Its shape is the scope: `[]` one draw shared by batch and
        heads, `[B]` one per example, `[B, K]` one per example and key/value head.
      length: the number of tokens T, if there are no segment ids.
      segment_ids: `[T]` or `[B, T]`, 0 for padding, which goes to the last slots.

    Returns:
      int32 `[T]`, `[B, T]` or `[B, K, T]`: the index of the token in each slot.

    Raises:
      TypeError: the key is not a typed key.
      ValueError: neither or both of `length` and `segment_ids`; segments that aren't contiguous;
        a batch of keys and of segments that differ; partitionable threefry switched off.
    """
    inputs.check_key(key)
    if (length is None) == (segment_ids is None):
        raise ValueError(
            f'got length={length} and segment_ids={segment_ids}; give exactly one of them'
        )
    if not jax.config.jax_threefry_partitionable:
        raise ValueError(
            'jax_threefry_partitionable is off: a draw would depend on the length of the row, and '
            'a document on what it is packed with; leave it on, its default'
        )
    if key.ndim > 2:
        raise ValueError(f'the permutation key has shape {key.shape}; expected [], [B] or [B, K]')
    if segment_ids is None:
        inputs.check_count('length', length, 1)
        segment_ids = jnp.ones((length,), jnp.int32)
    else:
        inputs.check_array('segment_ids', segment_ids)
        rows = segment_ids if segment_ids.ndim == 2 else segment_ids[None]
        inputs.check_tokens(None, rows, rows.shape)
    if key.ndim and segment_ids.ndim == 1:
        segment_ids = segment_ids[None]
    if key.ndim and segment_ids.shape[0] not in (1, key.shape[0]):
        raise ValueError(
            f'got keys for {key.shape[0]} examples and segment_ids {segment_ids.shape}; expected '
            'one key per example: fold the example ids into one key with jax.vmap'
        )
    return _draw(key, segment_ids)


@jax.jit
def _draw(key: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Permutations for keys `[]`, `[B]` or `[B, K]` and segment ids `[T]`, `[1, T]` or `[B, T]`."""
    segment_ids, key = inputs.not_folded((segment_ids, key))
    if key.ndim == 0:
        # The bits are drawn once and shared by every example.
        draw = functools.partial(_draw_one, key)
        for _ in range(segment_ids.ndim - 1):
            draw = jax.vmap(draw)
        return draw(segment_ids)
    segment_ids = jnp.broadcast_to(segment_ids, (key.shape[0], segment_ids.shape[-1]))
    draw = _draw_one if key.ndim == 1 else jax.vmap(_draw_one, in_axes=(0, None))
    return jax.vmap(draw)(key, segment_ids)


def _draw_one(key: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """One permutation for `segment_ids` `[T]`."""
    (length,) = segment_ids.shape
    index = jnp.arange(length, dtype=jnp.int32)
    # A prefix of the bits doesn't depend on T with partitionable threefry, JAX's default.
    bits = jax.random.bits(key, (length,), 'uint32')[segment_rank(segment_ids)]
    is_padding = segment_ids == 0
    *_, permutation = jax.lax.sort((is_padding, segment_ids, bits, index), num_keys=4)
    return permutation


def segment_rank(segment_ids: jax.Array) -> jax.Array:
    """The rank of each token in its segment: int32, like `segment_ids` `[..., T]`."""
    index = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    return index - segment_start(segment_ids)


def segment_start(segment_ids: jax.Array) -> jax.Array:
    """The index of the first token of each token's segment: int32, like `segment_ids`."""
    index = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    first = jnp.concatenate(
        [
            jnp.ones_like(segment_ids[..., :1], bool),
            segment_ids[..., 1:] != segment_ids[..., :-1],
        ],
        axis=-1,
    )
    return jax.lax.cummax(jnp.where(first, index, 0), axis=segment_ids.ndim - 1)


def segment_length(segment_ids: jax.Array) -> jax.Array:
    """The number of tokens in each token's segment: int32, like `segment_ids`."""
    length = segment_ids.shape[-1]
    last = length - 1 - jnp.flip(segment_start(jnp.flip(segment_ids, -1)), -1)
    return last - segment_start(segment_ids) + 1


def inverse_permutation(permutation: jax.Array) -> jax.Array:
    """The slot of each token: int32, like `permutation` `[..., T]`."""
    slot = jnp.arange(permutation.shape[-1], dtype=jnp.int32)

    def invert(row):
        return jnp.zeros_like(slot).at[row].set(slot, unique_indices=True, mode='drop')

    # A scatter: an argsort takes a hundred times as long on the CPU.
    rows = permutation.reshape(-1, permutation.shape[-1])
    return jax.vmap(invert)(rows).reshape(permutation.shape)


def partition(
    permutation: jax.Array, segment_ids: jax.Array | None, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """Cuts the permuted tokens of each segment into chunks, and sorts each chunk by token.

    Args:
      permutation: `[B or 1, T]`; segments may be mixed.
      segment_ids: `[B or 1, T]`; None for a single segment without padding.
      chunk_size: tokens per chunk; the last one of a segment may have fewer.

    Returns:
      int32 `[B or 1, T]` both, by lane: the token, and a number for each chunk. Lanes of a chunk
      stand together, with the earliest token first; padding is behind all chunks, under one number.
    """
    length = permutation.shape[-1]
    slot = inputs.not_folded(jnp.arange(length, dtype=jnp.int32)[None])
    if segment_ids is None:
        whole = jnp.pad(permutation, ((0, 0), (0, -length % chunk_size)), constant_values=length)
        order = jnp.sort(whole.reshape(len(whole), -1, chunk_size), axis=-1)
        return order.reshape(len(whole), -1)[:, :length], slot // chunk_size
    segment = jnp.where(segment_ids > 0, segment_start(segment_ids), length)
    segment = take_rows(segment, permutation)
    operands = (segment, jnp.broadcast_to(slot, segment.shape), permutation)
    operands = (jnp.broadcast_to(x, segment.shape) for x in operands)
    segment, _, token = jax.lax.sort(tuple(operands), num_keys=2)
    rank = slot - segment_start(segment)
    number = jnp.where(segment < length, segment + rank // chunk_size, length)
    number, token = jax.lax.sort((number, token), num_keys=2)
    return token, number


@jax.custom_vjp
def permute(x: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    """Reads rows through a permutation; the gradient is the inverse gather, not a scatter-add.

    Args:
      x: `[B, T, ...]`.
      permutation: `[T]` or `[B, T]`, the row to put in each slot.
      inverse: its inverse, `inverse_permutation(permutation)`.

    Returns:
      `[B, T, ...]`, with `x[b, permutation[s]]` in slot s. `permute(y, inverse, permutation)`
      restores the order.
    """
    del inverse
    return take_rows(x, permutation)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """`x[b, rows[b]]` for x `[B, T, ...]` and rows `[S]` or `[B, S]`, B or 1, all within bounds."""
    if rows.ndim == 2 and rows.shape[0] == 1:
        rows = rows[0]
    if rows.ndim == 1:
        return jnp.take(x, rows, axis=1, mode='clip')
    take = functools.partial(jnp.take, axis=0, mode='clip')
    if x.shape[0] == 1:
        return jax.vmap(take, in_axes=(None, 0))(x[0], rows)
    return jax.vmap(take)(x, rows)


def _permute_forward(x, permutation, inverse):
    return take_rows(x, permutation), (permutation, inverse)


def _permute_backward(residuals, gradient):
    permutation, inverse = residuals
    return permute(gradient, inverse, permutation), None, None


permute.defvjp(_permute_forward, _permute_backward)
