"""The three kernels of windowed attention for Pallas-Triton: forward, dq, and dk with dv.

Tokens stand in lanes. A program owns a block of query lanes (of key lanes, for dk and dv) of one
head and meets the blocks of other lanes in its range. Rows are read and written through the
lanes' tokens, so that no permuted copy exists; Triton loads them ahead of the arithmetic.
Exponents are of base 2, statistics and sums float32; the backward computes the weights again.
"""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from sa_jax.attention.launch import Tile

# The least running maximum: finite, so that an unseen logit's -inf less it is no NaN.
_FLOOR = -1e30


class Lanes(NamedTuple):
    """What the kernels know of each lane: int32 arrays `[B or 1, K or 1, L]`, or None.

    Lane i sees lane j iff `query_segment[i] == key_segment[j] > 0`, -ahead ≤ coordinate[i] -
    coordinate[j] ≤ back and, if causal, token[j] ≤ token[i].

    Attributes:
      token: the token in each lane, T and more where there is none, each number once; None: lane l
        holds token l.
      read: the row to read in each lane: also where it has no valid token that of one, so that what
        padding holds, NaN included, reaches nothing; None: that of its token.
      query_segment: 0 where there is no valid token; None, as for the next: all are one segment.
      key_segment: query_segment, or less than 0 where the key is hidden.
      coordinate: what the window is measured in; None: the lane's number.
    """

    token: jax.Array | None = None
    read: jax.Array | None = None
    query_segment: jax.Array | None = None
    key_segment: jax.Array | None = None
    coordinate: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is fixed at trace time beside the tile.

    Attributes:
      back: the window's side towards smaller coordinates; None: no limit.
      ahead: the other side.
      is_causal: whether later tokens stay unseen; a window without an ahead needs no more.
      scale: of the logits, more than 0.
      logits_soft_cap: c in c·tanh(logits / c), or None.
      is_fused: whether rows are those of the lanes' tokens; else each lane has its own.
    """

    back: int | None
    ahead: int | None
    is_causal: bool
    scale: float
    logits_soft_cap: float | None
    is_fused: bool = False


class _Block(NamedTuple):
    """Lanes [start, start + size) as a kernel holds them."""

    run: Any  # where they are in an array of lanes
    read: Any  # where their rows are
    write: Any  # where their rows go
    token: jax.Array | None
    segment: jax.Array | None
    coordinate: jax.Array


def forward_kernel(
    q_ref, k_ref, v_ref, lanes, start_ref, stop_ref, output_ref, lse_ref, *, tile: Tile, rules
):
    """Output `[L, H]` by token and log-sum-exp `[L]` by lane, in base 2."""
    own = pl.program_id(1)
    factor = _factor(rules)
    queries = _block(lanes, own * tile.block_q, tile.block_q, lanes.query_segment, rules)
    q = q_ref[queries.read, :]

    def step(other, carry):
        largest, total, output = carry
        keys = _block(lanes, other * tile.block_k, tile.block_k, lanes.key_segment, rules)
        k, v = k_ref[keys.read, :], v_ref[keys.read, :]
        logits, _ = _logits(q, k, _sees(queries, keys, rules), rules)
        updated = jnp.maximum(largest, logits.max(1))
        weights = jnp.exp2(logits * factor - (updated * factor)[:, None])
        shrink = jnp.exp2((largest - updated) * factor)
        output = output * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return updated, total * shrink + weights.sum(1), output

    carry = (
        jnp.full((tile.block_q,), _FLOOR, jnp.float32),
        jnp.zeros((tile.block_q,), jnp.float32),
        jnp.zeros((tile.block_q, q.shape[1]), jnp.float32),
    )
    largest, total, output = lax.fori_loop(start_ref[own], stop_ref[own], step, carry)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    output_ref[queries.write, :] = (output / total[:, None]).astype(output_ref.dtype)
    lse_ref[queries.run] = jnp.where(is_empty, _FLOOR, largest * factor + jnp.log2(total))


def dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    lanes,
    start_ref,
    stop_ref,
    output_ref,
    do_ref,
    lse_ref,
    dlse_ref,
    dq_ref,
    delta_ref,
    *,
    tile: Tile,
    rules,
):
    """Gradient dq `[L, H]` by token; and delta, the sum of do · output less dlse, `[L]` by lane."""
    own = pl.program_id(1)
    queries = _block(lanes, own * tile.block_q, tile.block_q, lanes.query_segment, rules)
    q, do, output = (ref[queries.read, :] for ref in (q_ref, do_ref, output_ref))
    delta = (output.astype(jnp.float32) * do.astype(jnp.float32)).sum(1)
    if dlse_ref is not None:
        delta -= dlse_ref[queries.run]
    delta_ref[queries.run] = delta
    lse = lse_ref[queries.run]

    def step(other, dq):
        keys = _block(lanes, other * tile.block_k, tile.block_k, lanes.key_segment, rules)
        k, v = k_ref[keys.read, :], v_ref[keys.read, :]
        logits, slope = _logits(q, k, _sees(queries, keys, rules), rules)
        weights = jnp.exp2(logits * _factor(rules) - lse[:, None])
        dlogits = weights * (_dot(do, v, trans_b=True) - delta[:, None]) * slope
        return dq + _dot(dlogits.astype(k.dtype), k)

    dq = jnp.zeros((tile.block_q, q.shape[1]), jnp.float32)
    dq = lax.fori_loop(start_ref[own], stop_ref[own], step, dq)
    dq_ref[queries.write, :] = (dq * rules.scale).astype(dq_ref.dtype)


def dkv_kernel(
    q_ref,
    do_ref,
    lse_ref,
    delta_ref,
    k_ref,
    v_ref,
    lanes,
    start_ref,
    stop_ref,
    dk_ref,
    dv_ref,
    *,
    tile: Tile,
    rules,
):
    """Gradients dk and dv `[L, H]` by token, summed over the query heads that share them."""
    own = pl.program_id(1)
    keys = _block(lanes, own * tile.block_k, tile.block_k, lanes.key_segment, rules)
    k, v = k_ref[keys.read, :], v_ref[keys.read, :]

    def head(number, carry):
        def step(other, carry):
            # Everything is [keys, queries] here: the weights go into the product as they are.
            dk, dv = carry
            queries = _block(lanes, other * tile.block_q, tile.block_q, lanes.query_segment, rules)
            q, do = (ref[queries.read, number, :] for ref in (q_ref, do_ref))
            lse, delta = (ref[number, queries.run] for ref in (lse_ref, delta_ref))
            logits, slope = _logits(k, q, _sees(queries, keys, rules, keys_first=True), rules)
            weights = jnp.exp2(logits * _factor(rules) - lse[None, :])
            dv += _dot(weights.astype(do.dtype), do)
            dlogits = weights * (_dot(v, do, trans_b=True) - delta[None, :]) * slope
            return dk + _dot(dlogits.astype(q.dtype), q), dv

        return lax.fori_loop(start_ref[own], stop_ref[own], step, carry)

    zeros = jnp.zeros((tile.block_k, k.shape[1]), jnp.float32)
    group = q_ref.shape[1]
    carry = (zeros, zeros)
    dk, dv = head(0, carry) if group == 1 else lax.fori_loop(0, group, head, carry)
    dk_ref[keys.write, :] = (dk * rules.scale).astype(dk_ref.dtype)
    dv_ref[keys.write, :] = dv.astype(dv_ref.dtype)


def _block(lanes, start, size, segment, rules):
    """The lanes [start, start + size)."""
    run = pl.ds(start, size)
    token = lanes.token[run] if rules.is_fused or rules.is_causal else None
    write = token if rules.is_fused else run
    read = write if lanes.read is None else lanes.read[run]
    if lanes.coordinate is None:
        coordinate = start + jnp.arange(size, dtype=jnp.int32)
    else:
        coordinate = lanes.coordinate[run]
    return _Block(run, read, write, token, None if segment is None else segment[run], coordinate)


def _sees(queries, keys, rules, keys_first=False):
    """Visibility `[queries, keys]` or `[keys, queries]`; None if all is visible."""

    def pair(name):
        q, k = getattr(queries, name), getattr(keys, name)
        return (q[None, :], k[:, None]) if keys_first else (q[:, None], k[None, :])

    terms = []
    if rules.back is not None or rules.ahead is not None:
        q, k = pair('coordinate')
        if rules.back is None:
            terms.append(k - q <= rules.ahead)
        elif rules.ahead is None:
            terms.append(q - k <= rules.back)
        else:
            # Both sides in one comparison: what is less than 0 wraps around to a large number.
            distance = (q - k + rules.ahead).astype(jnp.uint32)
            terms.append(distance <= jnp.uint32(rules.back + rules.ahead))
    if rules.is_causal:
        q, k = pair('token')
        terms.append(k <= q)
    if queries.segment is not None:
        keys = keys._replace(segment=jnp.where(keys.segment > 0, keys.segment, -1))
        q, k = pair('segment')
        terms.append(q == k)
    return functools.reduce(operator.and_, terms) if terms else None


def _logits(a, b, mask, rules):
    """Masked logits a·b in units of `_factor`, and the derivative of the cap."""
    logits, slope = _dot(a, b, trans_b=True), 1.0
    if rules.logits_soft_cap is not None:
        logits = jnp.tanh(logits * (rules.scale / rules.logits_soft_cap))
        slope = 1 - logits * logits
    return logits if mask is None else jnp.where(mask, logits, -math.inf), slope


def _factor(rules):
    """What makes `_logits` exponents of 2: multiplied last, as part of the subtraction."""
    scale = rules.scale if rules.logits_soft_cap is None else rules.logits_soft_cap
    return scale * math.log2(math.e)


def _dot(a, b, trans_b=False):
    """a·b or a·bᵀ in float32; float32 operands in full precision, never TF32."""
    precision = 'highest' if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=trans_b, precision=precision)
