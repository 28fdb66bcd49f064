"""Attention in blocks: each block of queries against its own run of keys, never n × n.

One engine serves every fast path. Tokens stand in *lanes* (in their own order, or permuted, or, for
circular windows, with wrapped copies); a query sees the keys whose lane lies in one interval and,
where the lanes don't tell, whose token lies in another. Since segments are contiguous and positions
increase within them, an interval of tokens says both "in my segment" and "not later than I".
`plans.py` finds the intervals. Softmax statistics are float32, and the backward recomputes the
weights at the forward's cost.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sa_jax.attention.permutation import take_rows

# Logits nobody sees, and the least running maximum: exp(UNSEEN - FLOOR) is 0, also in empty rows.
_UNSEEN, _FLOOR = -1e30, -5e29
# Logits computed at a time: enough to keep the cores busy, few enough to stay in the cache.
_LOGITS_PER_STEP = 2**20


class Interval(NamedTuple):
    """The numbers first, …, first + count - 1 for each query; int32 `[B or 1, Q]` both."""

    first: jax.Array
    count: jax.Array  # at least 0

    def holds(self, number: jax.Array) -> jax.Array:
        """Which of `number` `[B or 1, S]` lie in each query's: `[B or 1, Q, S]`."""
        # Numbers before the first wrap around to large ones: one comparison instead of two.
        distance = (number[:, None, :] - self.first[..., None]).astype(jnp.uint32)
        return distance < self.count[..., None].astype(jnp.uint32)


class Queries(NamedTuple):
    """Query lanes; every array is `[B or 1, Q]`, Q a multiple of the block."""

    lanes: Interval  # of the keys seen
    tokens: Interval | None  # of the keys seen; None: the lanes say it all
    is_valid: jax.Array | None  # False where no valid token stands; None: everywhere one does
    row: jax.Array | None  # the token in each lane; None for the tokens' own order
    lane: jax.Array | None  # `[B or 1, T]`, the lane of each token
    sinks: jax.Array | None  # `[B or 1, Q, num_sinks]`, lanes of first keys seen beside, or -1


class Keys(NamedTuple):
    """Key lanes; every array is `[B or 1, L]`."""

    row: jax.Array | None  # the token in each lane; None for the tokens' own order
    lanes: jax.Array | None  # `[B or 1, S, copies]`, the lanes of each token or -1
    is_valid: jax.Array | None  # False where no valid token stands; None: everywhere one does


class Plan(NamedTuple):
    """Which lanes each block of queries meets."""

    queries: Queries
    keys: Keys
    start: jax.Array  # `[B or 1, blocks]`, the first lane
    stop: jax.Array | None  # one behind the last; None: a single chunk holds them all


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed at trace time: lanes per block of queries and per chunk of keys, and logits."""

    block: int
    chunk: int
    scale: float
    logits_soft_cap: float | None


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sink_logits: jax.Array | None,
    plan: Plan,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attention of `[B, T, N, H]` to `[B, S, K, H]` by a plan; sink logits are `[B or 1, N]`.

    Returns:
      The output `[B, T, N, H]` and the log-sum-exp of the logits, float32 `[B, T, N]`; queries
      without keys have zeros and a log-sum-exp too small to weigh anything.
    """
    kv_heads = key.shape[2]
    if sink_logits is not None:
        sink_logits = sink_logits.astype(jnp.float32)
        sink_logits = sink_logits.reshape(-1, kv_heads, query.shape[2] // kv_heads)
    return _attention(settings, query, key, value, sink_logits, plan)


def heads_to_examples(x: jax.Array, kv_heads: int) -> jax.Array:
    """`[B, T, K·G, H]` as `[B·K, T, G, H]`, for heads that see tokens of their own."""
    batch, length, heads, head_dim = x.shape
    x = x.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    return jnp.moveaxis(x, 2, 1).reshape(batch * kv_heads, length, -1, head_dim)


def examples_to_heads(x: jax.Array, kv_heads: int) -> jax.Array:
    """`[B·K, T, G, H]` as `[B, T, K·G, H]`."""
    _, length, group, head_dim = x.shape
    x = jnp.moveaxis(x.reshape(-1, kv_heads, length, group, head_dim), 1, 2)
    return x.reshape(x.shape[0], length, kv_heads * group, head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings, query, key, value, sink_logits, plan):
    return _attention_forward(settings, query, key, value, sink_logits, plan)[0]


def _attention_forward(settings, query, key, value, sink_logits, plan):
    forward = functools.partial(_forward, settings)
    output, lse = _by_examples(forward, settings, query, key, value, sink_logits, plan)
    return (output, lse), (query, key, value, sink_logits, plan, output, lse)


def _attention_backward(settings, residuals, gradients):
    query, key, value, sink_logits, plan, output, lse = residuals
    backward = functools.partial(_backward, settings)
    dq, dk, dv, dsinks = _by_examples(
        backward, settings, query, key, value, sink_logits, plan, output, lse, *gradients
    )
    if sink_logits is not None and sink_logits.shape[0] == 1:
        dsinks = dsinks.sum(0, keepdims=True)
    return dq, dk, dv, dsinks, None


_attention.defvjp(_attention_forward, _attention_backward)


def _by_examples(function, settings, query, *arguments):
    """Runs `function` on as many examples at a time as the step's size allows."""
    batch, _, heads, _ = query.shape
    most = max(1, _LOGITS_PER_STEP // (heads * settings.block * settings.chunk))
    size = next(s for s in range(min(batch, most), 0, -1) if batch % s == 0)
    arguments = (query, *arguments)
    if size == batch:
        return function(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    per_example = [x.shape[0] == batch for x in leaves]
    mapped = [
        x.reshape(-1, size, *x.shape[1:]) for x, own in zip(leaves, per_example, strict=True) if own
    ]

    def run(mapped):
        own = iter(mapped)
        full = [next(own) if is_own else x for x, is_own in zip(leaves, per_example, strict=True)]
        return function(*jax.tree.unflatten(tree, full))

    result = lax.map(run, mapped)
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), result)


def _forward(settings, query, key, value, sink_logits, plan):
    """Output `[B, T, N, H]` and log-sum-exp `[B, T, N]`."""
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    lanes = _LaneReader(settings, plan)
    query = lanes.pad(query)
    shape = (batch, kv_heads, heads // kv_heads, settings.block)
    nothing = (
        jnp.full(shape, _FLOOR, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )

    def block(_, index):
        q, queries = lanes.queries(index, query)
        q = _by_head(q, kv_heads)

        def chunk(number, carry):
            k, v, mask, _ = lanes.keys(index, number, queries, key, value)
            return _accumulate(carry, lanes.logits(q, k, mask), v)

        if plan.stop is None:
            largest, total, output = chunk(0, None)
            is_seeing = largest > _FLOOR
            largest = jnp.maximum(largest, _FLOOR)
            total, output = _valid(total, is_seeing), _valid(output, is_seeing)
        else:
            largest, total, output = lanes.for_chunks(index, chunk, nothing)
        if queries.sinks is not None:
            k, v, mask, _ = lanes.sinks(queries, key, value)
            carry = (largest, total, output)
            largest, total, output = _accumulate(carry, lanes.logits(q, k, mask), v)
        if sink_logits is not None:
            sinks = sink_logits[..., None]
            final = jnp.maximum(largest, sinks)
            shrink = jnp.exp(largest - final)
            total = total * shrink + jnp.exp(sinks - final)
            output, largest = output * shrink[..., None], final
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        output = (output / total[..., None]).astype(query.dtype)
        lse = largest + jnp.log(total)
        return None, (_by_token(output), _by_token(lse))

    _, (output, lse) = lax.scan(block, None, jnp.arange(lanes.blocks))
    return lanes.to_tokens(output, length), lanes.to_tokens(lse, length)


def _accumulate(carry, logits, value):
    """Adds keys to a running softmax, or starts one that knows no empty rows."""
    updated = logits.max(-1)
    if carry is not None:
        updated = jnp.maximum(carry[0], updated)
    weights = jnp.exp(logits - updated[..., None])
    total, output = weights.sum(-1), _weigh(weights.astype(value.dtype), value)
    if carry is not None:
        shrink = jnp.exp(carry[0] - updated)
        total += carry[1] * shrink
        output += carry[2] * shrink[..., None]
    return updated, total, output


def _backward(settings, query, key, value, sink_logits, plan, output, lse, gradient, dlse):
    """Gradients of q, k, v and, per example, of the sink logits."""
    batch, length, _, head_dim = query.shape
    kv_heads = key.shape[2]
    lanes = _LaneReader(settings, plan)
    rows = tuple(lanes.pad(x) for x in (query, output, gradient, lse, dlse))
    count = key.shape[1] if plan.keys.row is None else plan.keys.row.shape[-1]
    kv_shape = (batch, kv_heads, count, head_dim)

    def block(carry, index):
        arrays, queries = lanes.queries(index, rows)
        q, o, do, lse, dlse = (_by_head(x, kv_heads) for x in arrays)
        delta = (o.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1) - dlse

        def gradients(k, v, mask):
            """dq, and the weights and the logits' gradients that dv and dk are made of."""
            logits, slope = lanes.logits_and_slope(q, k, mask)
            weights = jnp.exp(logits - lse[..., None])
            dlogits = weights * (_score(do, v) - delta[..., None]) * slope
            dlogits = (dlogits * settings.scale).astype(k.dtype)
            return _weigh(dlogits, k), weights.astype(do.dtype), dlogits

        def chunk(number, carry):
            dq, dk, dv = carry
            k, v, mask, first = lanes.keys(index, number, queries, key, value)
            added, weights, dlogits = gradients(k, v, mask)
            dk = _add_run(dk, _gather_back(dlogits, q), first)
            dv = _add_run(dv, _gather_back(weights, do), first)
            return dq + added, dk, dv

        dk, dv, dsinks = carry
        dq, dk, dv = lanes.for_chunks(index, chunk, (jnp.zeros(q.shape, jnp.float32), dk, dv))
        if queries.sinks is not None:
            k, v, mask, flat = lanes.sinks(queries, key, value)
            added, weights, dlogits = gradients(k, v, mask)
            dq += added
            dk = _add_rows(dk, _gather_back_own(dlogits, q), flat)
            dv = _add_rows(dv, _gather_back_own(weights, do), flat)
        if sink_logits is not None:
            dsinks -= (jnp.exp(sink_logits[..., None] - lse) * delta).sum(-1)
        return (dk, dv, dsinks), _by_token(dq.astype(query.dtype))

    start = (
        jnp.zeros(kv_shape, jnp.float32),
        jnp.zeros(kv_shape, jnp.float32),
        None if sink_logits is None else jnp.zeros((batch, *sink_logits.shape[1:]), jnp.float32),
    )
    (dk, dv, dsinks), dq = lax.scan(block, start, jnp.arange(lanes.blocks))
    dk, dv = (lanes.keys_to_tokens(jnp.moveaxis(x, 1, 2)) for x in (dk, dv))
    dq = lanes.to_tokens(dq, length)
    return dq, dk.astype(key.dtype), dv.astype(value.dtype), dsinks


class _LaneReader:
    """Reads and writes tokens by lane, for one plan."""

    def __init__(self, settings: Settings, plan: Plan):
        self.settings, self.plan = settings, plan
        self.blocks = plan.start.shape[-1]

    def pad(self, x: jax.Array) -> jax.Array:
        """`[B, T, ...]` to whole blocks; rows read by index need none."""
        missing = self.blocks * self.settings.block - x.shape[1]
        if self.plan.queries.row is not None or not missing:
            return x
        return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))

    def queries(self, index, tree):
        """The block's rows of each array, zeroed where there is no valid token, and its lanes."""
        start, size = index * self.settings.block, self.settings.block
        queries = _slice(self.plan.queries._replace(lane=None), start, size)

        def read(x):
            rows = _slice(x, start, size) if queries.row is None else take_rows(x, queries.row)
            return rows if queries.is_valid is None else _valid(rows, queries.is_valid)

        return jax.tree.map(read, tree), queries

    def for_chunks(self, index, chunk, carry):
        """Runs `chunk(number, carry)` over the block's chunks of keys."""
        if self.plan.stop is None:
            return chunk(0, carry)
        run = self.plan.stop[:, index].max() - self.plan.start[:, index].min()
        return lax.fori_loop(0, -(-run // self.settings.chunk), chunk, carry)

    def keys(self, index, number, queries, key, value):
        """A chunk's k and v `[B, K, chunk, H]`, mask `[B or 1, block, chunk]` and first lane."""
        size = self.settings.chunk
        row = self.plan.keys.row
        count = key.shape[1] if row is None else row.shape[-1]
        wanted = self.plan.start[:, index].min() + number * size
        first = jnp.clip(wanted, 0, count - size)
        keys = _slice(self.plan.keys._replace(lanes=None), first, size)
        lane = first + jnp.arange(size)[None]
        mask = queries.lanes.holds(lane)
        if queries.tokens is not None:
            mask &= queries.tokens.holds(keys.row)
        if self.plan.stop is not None:
            # The last chunk is moved back to end within bounds: lanes already met stay out.
            mask &= lane >= wanted
        if row is None:
            k, v = _slice((key, value), first, size)
        else:
            k, v = (take_rows(x, keys.row) for x in (key, value))
        if keys.is_valid is not None:
            k, v = (_valid(x, keys.is_valid) for x in (k, v))
        k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))
        return k, v, mask, first

    def sinks(self, queries, key, value):
        """Each query's first tokens: k, v `[B, K, block, c, H]`, mask `[.., block, c]`, lanes."""
        lanes = queries.sinks
        flat = jnp.maximum(lanes, 0).reshape(lanes.shape[0], -1)
        row = self.plan.keys.row
        row = flat if row is None else take_rows(row, flat)
        mask = lanes >= 0
        shape = (key.shape[0], *lanes.shape[1:], *key.shape[2:])
        k, v = (_valid(take_rows(x, row).reshape(shape), mask) for x in (key, value))
        k, v = (jnp.moveaxis(x, 3, 1) for x in (k, v))
        return k, v, mask, flat

    def logits(self, q, k, mask):
        """Scaled, capped and masked logits, float32 `[B, K, G, block, keys]`."""
        return self.logits_and_slope(q, k, mask)[0]

    def logits_and_slope(self, q, k, mask):
        """The logits and their derivative by the uncapped ones."""
        logits = self.settings.scale * _score(q, k)
        slope = 1.0
        cap = self.settings.logits_soft_cap
        if cap is not None:
            tanh = jnp.tanh(logits / cap)
            logits, slope = cap * tanh, 1 - tanh**2
        return jnp.where(mask[:, None, None], logits, _UNSEEN), slope

    def to_tokens(self, x, length):
        """Blocks of query lanes `[blocks, B, block, ...]` to tokens `[B, T, ...]`."""
        x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        lane = self.plan.queries.lane
        return x[:, :length] if lane is None else take_rows(x, lane)

    def keys_to_tokens(self, x):
        """Sums each token's lanes: `[B, L, ...]` to `[B, S, ...]`."""
        lanes = self.plan.keys.lanes
        if lanes is None:
            return x
        copies = (lanes[..., c] for c in range(lanes.shape[-1]))
        return sum(_valid(take_rows(x, jnp.maximum(lane, 0)), lane >= 0) for lane in copies)


def _slice(tree, start, size):
    """Lanes [start, start + size) of every array `[B, L, ...]`."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1), tree)


def _valid(x, is_valid):
    """Zeros rows that hold no token: NaN there must reach nothing."""
    return jnp.where(is_valid.reshape(*is_valid.shape, *(1,) * (x.ndim - is_valid.ndim)), x, 0)


def _by_head(x, kv_heads):
    """`[B, Q, N, ...]` as `[B, K, G, Q, ...]`."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _by_token(x):
    """`[B, K, G, Q, ...]` as `[B, Q, N, ...]`."""
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 2)


def _einsum(spec, *operands):
    """float32 results; float32 operands are multiplied in full precision on every device."""
    precision = 'highest' if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=jnp.float32)


def _score(q, k):
    """q·k for shared keys `[B, K, S, H]` or each query's own `[B, K, Q, c, H]`."""
    return _einsum('bkgqh,bksh->bkgqs' if k.ndim == 4 else 'bkgqh,bkqsh->bkgqs', q, k)


def _weigh(weights, value):
    """Weighted sums `[B, K, G, Q, H]` of shared or each query's own rows."""
    spec = 'bkgqs,bksh->bkgqh' if value.ndim == 4 else 'bkgqs,bkqsh->bkgqh'
    return _einsum(spec, weights, value)


def _gather_back(weights, x):
    """What queries `[B, K, G, Q, H]` give back to shared keys: `[B, K, S, H]`."""
    return _einsum('bkgqs,bkgqh->bksh', weights, x)


def _gather_back_own(weights, x):
    """What queries give back to their own keys: `[B, K, Q·c, H]`."""
    own = _einsum('bkgqs,bkgqh->bkqsh', weights, x)
    return own.reshape(*own.shape[:2], -1, own.shape[-1])


def _add_run(total, added, first):
    """Adds to the lanes from `first` on."""
    present = lax.dynamic_slice_in_dim(total, first, added.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, present + added, first, axis=2)


def _add_rows(total, added, lanes):
    """Adds to scattered lanes `[B or 1, n]`."""
    lanes = jnp.broadcast_to(lanes, (total.shape[0], lanes.shape[-1]))
    return jax.vmap(lambda x, lanes, added: x.at[:, lanes].add(added))(total, lanes, added)
