"""Attention over a sequence that is split over a mesh axis; inside `jax.shard_map`.

Each of P devices holds T/P consecutive tokens of query, key and value. Stochastic attention sends
every token to the device that holds its slot (one all-to-all), borrows half a window of slots from
the neighbours (the halo), attends, and sends the outputs back: O(n·d/P) bytes a device, however far
apart the tokens of a window are. Sliding-window attention needs the halo alone.

What is O(n) without d, the permutation and the segment ids, is on every device. Each device runs
the function of `sa_jax.attention` on its tokens, with any implementation; `jax.shard_map` needs
`check_vma=False`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sa_jax.attention import functions, inputs, masks
from sa_jax.attention import permutation as permutations


def pair_capacity(length: int, devices: int) -> int:
    """Tokens that one device can send to another in one all-to-all.

    A random permutation moves n/P² on average between a pair; these are six standard deviations
    more. One pair in 10⁵ exceeds them where the mean is a single token, one in 5·10⁷ where it is
    64, one in 10⁹ where it is thousands, and takes the slower exact way.

    Args:
      length: tokens of the whole sequence, n.
      devices: P.
    """
    mean = length / devices**2
    return min(math.ceil(mean + 6 * math.sqrt(mean)), length // devices)


def stochastic_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    window: int,
    permutation: jax.Array | None = None,
    permutation_key: jax.Array | None = None,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    capacity: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`sa_jax.stochastic_attention` of a sequence that is split over `axis_name`.

    Args:
      query: `[B, T/P, N, H]`, this device's tokens.
      key: `[B, T/P, K, H]`.
      value: `[B, T/P, K, H]`.
      axis_name: the mesh axis, of P devices.
      window: slots a query sees; may exceed T/P.
      permutation: `[T]` or `[B, T]`, the same on all devices.
      permutation_key: a typed key `[]` or `[B]` to draw it from instead, the same on all devices.
      is_causal: whether a query sees only tokens up to its own.
      segment_ids: `[B, T]`, all of them on each device.
      capacity: tokens sent between two devices. Where a permutation moves more, all tokens visit
        all devices instead, which is as exact but sends O(n·d). By default `pair_capacity`, which
        suits a draw over the whole sequence; documents on two devices move more.
      scale: factor of the logits; 1/√H by default.
      logits_soft_cap: c in c·tanh(logits / c).
      sink_logits: `[N]`.
      implementation: see `sa_jax.attention.functions`.

    Returns:
      `[B, T/P, N, H]`, this device's tokens.

    Raises:
      ValueError, TypeError: as `sa_jax.stochastic_attention`; also a permutation per head.
    """
    inputs.check_heads(query, key, value)
    inputs.check_same_length(query, key, 'stochastic attention')
    inputs.check_count('window', window, 1)
    devices, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    batch, shard, heads, _ = query.shape
    length = shard * devices
    _check_segments(segment_ids, (batch, length))
    order = _order(permutation, permutation_key, segment_ids, (batch, length))
    if capacity is None:
        capacity = pair_capacity(length, devices)
    inputs.check_count('capacity', capacity, 1)
    there, back = _routes(order, here, devices, min(capacity, shard))
    move = functools.partial(_move, axis_name)

    # Rows in the order of their slots.
    rows = move(jnp.concatenate([query, key, value], axis=2), there, back)
    sides = [min(side, length - shard) for side in masks.window_sides(window)]
    rows = _with_halo(rows, heads, axis_name, *sides)
    slot = here * shard - sides[0] + jnp.arange(rows.shape[1], dtype=jnp.int32)
    # On one device tokens stand in their own order: those that are here, by their rank.
    is_there = (slot >= 0) & (slot < length)
    token = jnp.take(order, slot, axis=1, mode='clip')
    rank = jax.vmap(functools.partial(_ranks, length=length), in_axes=(0, None))(token, is_there)
    lane = permutations.inverse_permutation(rank)
    segment = is_there[None].astype(jnp.int32)
    if segment_ids is not None:
        segment = jnp.where(is_there, permutations.take_rows(segment_ids, token), 0)
    segment = jnp.broadcast_to(permutations.take_rows(segment, lane), (batch, rows.shape[1]))
    rows = permutations.permute(rows, lane, rank)
    query, key, value = jnp.split(rows, [heads, heads + key.shape[2]], axis=2)
    output = functions.stochastic_attention(
        query,
        key,
        value,
        window=window,
        permutation=rank if len(rank) == batch else rank[0],
        is_causal=is_causal,
        segment_ids=segment.astype(jnp.int32),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sink_logits=sink_logits,
        implementation=implementation,
    )
    output = permutations.permute(output, rank, lane)
    return move(output[:, sides[0] : sides[0] + shard], back, there)


def sliding_window_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    window: int,
    is_causal: bool = True,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink_logits: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`sa_jax.sliding_window_attention` of a sequence that is split over `axis_name`.

    Args:
      query: `[B, T/P, N, H]`, this device's tokens.
      key: `[B, T/P, K, H]`.
      value: `[B, T/P, K, H]`.
      axis_name: the mesh axis, of P devices.
      window: keys a query sees; may exceed T/P.
      is_causal: whether a query sees only positions up to its own.
      segment_ids: `[B, T]`, all of them on each device.
      positions: `[B, T]`, all of them on each device.
      scale: factor of the logits; 1/√H by default.
      logits_soft_cap: c in c·tanh(logits / c).
      sink_logits: `[N]`.
      implementation: see `sa_jax.attention.functions`.

    Returns:
      `[B, T/P, N, H]`, this device's tokens.

    Raises:
      ValueError, TypeError: as `sa_jax.sliding_window_attention`.
    """
    inputs.check_heads(query, key, value)
    inputs.check_same_length(query, key, 'sliding-window attention')
    inputs.check_count('window', window, 1)
    devices, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    batch, shard, heads, _ = query.shape
    length = shard * devices
    _check_segments(segment_ids, (batch, length))
    inputs.check_tokens(positions, None, (batch, length))
    sides = (window - 1, 0) if is_causal else masks.window_sides(window)
    sides = [min(side, length - shard) for side in sides]
    rows = _with_halo(jnp.concatenate([query, key, value], axis=2), heads, axis_name, *sides)
    token = here * shard - sides[0] + jnp.arange(rows.shape[1], dtype=jnp.int32)
    is_there = (token >= 0) & (token < length)

    def local(x):
        return jnp.take(x, token, axis=1, mode='clip')

    segment = is_there.astype(jnp.int32)
    if segment_ids is not None:
        segment = jnp.where(is_there, local(segment_ids), 0)
    query, key, value = jnp.split(rows, [heads, heads + key.shape[2]], axis=2)
    output = functions.sliding_window_attention(
        query,
        key,
        value,
        window=window,
        is_causal=is_causal,
        segment_ids=jnp.broadcast_to(segment, (batch, rows.shape[1])).astype(jnp.int32),
        positions=None if positions is None else local(positions),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sink_logits=sink_logits,
        implementation=implementation,
    )
    return output[:, sides[0] : sides[0] + shard]


class _Route(NamedTuple):
    """How the rows of a sequence come from their old owners to their new ones, on one device."""

    sent: jax.Array  # `[B or 1, P, C]`, the own row for each device and place of its message
    taken: jax.Array  # `[B or 1, T/P]`, the place of each new row, in the messages or, behind, here
    source: jax.Array  # `[B or 1, T/P]`, where each new row is in the whole sequence
    is_exceeded: jax.Array  # `[]`, whether some message of some device is too small


def _check_segments(segment_ids, shape):
    if segment_ids is not None:
        inputs.check_tokens(None, segment_ids, shape)


def _order(permutation, permutation_key, segment_ids, shape):
    """The token in each slot: int32 `[B or 1, T]`."""
    batch, length = shape
    if (permutation is None) == (permutation_key is None):
        raise ValueError('give either permutation or permutation_key, alike on all devices')
    if permutation is None:
        of = {'length': length} if segment_ids is None else {'segment_ids': segment_ids}
        permutation = permutations.draw_permutation(permutation_key, **of)
    if permutation.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f'the permutation has shape {permutation.shape}; expected {(length,)} or '
            f'{(batch, length)}: of the whole sequence, and shared by the heads'
        )
    return jnp.atleast_2d(permutation).astype(jnp.int32)


def _ranks(token, is_there, *, length):
    """The rank `[L]` of each token among those that are there; the others are behind them."""
    present = jnp.zeros((length,), jnp.int32)
    present = present.at[jnp.where(is_there, token, length)].set(1, mode='drop')
    others = jnp.cumsum(~is_there, dtype=jnp.int32) - 1 + is_there.sum(dtype=jnp.int32)
    return jnp.where(is_there, jnp.cumsum(present)[token] - 1, others).astype(jnp.int32)


def _routes(order, here, devices, capacity):
    """From the tokens' owners to the slots', and back."""
    slot = permutations.inverse_permutation(order)
    shard = order.shape[1] // devices
    owner = order // shard
    pair = owner * devices + jnp.arange(order.shape[1], dtype=jnp.int32) // shard

    def count(pair, is_sent):
        return jnp.zeros((devices**2,), jnp.int32).at[pair].add(is_sent.astype(jnp.int32))

    is_sent = pair // devices != pair % devices
    # Devices of other mesh axes have other rows, but all have to send in the same way.
    most = lax.pmax(jax.vmap(count)(pair, is_sent).max(), _manual_axes())
    is_exceeded = most > capacity
    route = jax.vmap(functools.partial(_route, here=here, devices=devices, capacity=capacity))
    return tuple(
        _Route(*route(origin), origin_here, is_exceeded)
        for origin, origin_here in (
            (x, lax.dynamic_slice_in_dim(x, here * shard, shard, axis=1)) for x in (order, slot)
        )
    )


def _manual_axes():
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is jax.sharding.AxisType.Manual
    )


def _route(origin, *, here, devices, capacity):
    """`sent` and `taken` for rows that come from `origin` `[T]`.

    Messages are sorted by destination, so that both ends know the place of each row.
    """
    shard = len(origin) // devices
    owner = (origin // shard).reshape(devices, shard)
    is_mine = owner == here
    place = jnp.cumsum(is_mine, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(is_mine, place, capacity)
    to = jnp.broadcast_to(jnp.arange(devices)[:, None], place.shape)
    own = origin.reshape(devices, shard) - here * shard
    sent = jnp.zeros((devices, capacity), jnp.int32).at[to, place].set(own, mode='drop')

    wanted = lax.dynamic_slice_in_dim(origin, here * shard, shard)
    sender = wanted // shard
    before = jnp.cumsum(jax.nn.one_hot(sender, devices, dtype=jnp.int32), axis=0) - 1
    place = jnp.take_along_axis(before, sender[:, None], axis=1)[:, 0]
    kept = devices * capacity + wanted - here * shard
    return sent, jnp.where(sender == here, kept, sender * capacity + place)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(axis_name, x, route, inverse):
    """Sends rows `[B, T/P, ...]` along a route; the gradient goes along the inverse one."""
    del inverse
    batch = len(x)

    def send(x):
        sent = permutations.take_rows(x, route.sent.reshape(len(route.sent), -1))
        sent = sent.reshape(batch, *route.sent.shape[1:], *x.shape[2:])
        received = lax.all_to_all(sent, axis_name, split_axis=1, concat_axis=1, tiled=True)
        received = received.reshape(batch, -1, *x.shape[2:])
        return permutations.take_rows(jnp.concatenate([received, x], axis=1), route.taken)

    def pass_round(x):
        # Each device's rows visit all others: more messages, but never more memory.
        shard, devices = x.shape[1], lax.axis_size(axis_name)
        pairs = [(i, (i - 1) % devices) for i in range(devices)]

        def visit(hop, carry):
            rows, found = carry
            own = route.source - (lax.axis_index(axis_name) + hop) % devices * shard
            is_here = (own >= 0) & (own < shard)
            is_here = is_here.reshape(*is_here.shape, *(1,) * (x.ndim - 2))
            found = jnp.where(is_here, permutations.take_rows(rows, own.clip(0, shard - 1)), found)
            return lax.ppermute(rows, axis_name, pairs), found

        return lax.fori_loop(0, devices, visit, (x, jnp.zeros_like(x)))[1]

    if route.sent.shape[2] == x.shape[1]:
        return send(x)
    return lax.cond(route.is_exceeded, pass_round, send, x)


def _move_forward(axis_name, x, route, inverse):
    return _move(axis_name, x, route, inverse), (route, inverse)


def _move_backward(axis_name, residuals, gradient):
    route, inverse = residuals
    return _move(axis_name, gradient, inverse, route), None, None


_move.defvjp(_move_forward, _move_backward)


def _with_halo(rows, heads, axis_name, before, behind):
    """Rows `[B, T/P, N + 2K, H]` between the neighbours' keys and values; zeros beyond the ends.

    The queries there, which nobody asks for, are zeros.
    """
    rest, shard, devices = rows[:, :, heads:], rows.shape[1], lax.axis_size(axis_name)

    def from_device(x, hop):
        pairs = [(i, i + hop) for i in range(devices) if 0 <= i + hop < devices]
        return lax.ppermute(x, axis_name, pairs)

    def sizes(count):
        return [min(shard, count - at) for at in range(0, count, shard)]

    earlier = [from_device(rest[:, shard - n :], hop) for hop, n in enumerate(sizes(before), 1)]
    later = [from_device(rest[:, :n], -hop) for hop, n in enumerate(sizes(behind), 1)]
    rest = jnp.concatenate([*earlier[::-1], rest, *later], axis=1)
    query = jnp.pad(rows[:, :, :heads], ((0, 0), (before, behind), (0, 0), (0, 0)))
    return jnp.concatenate([query, rest], axis=2)
