"""Attention in blocks: each block of queries against its own run of keys, never n × n.

One engine serves every fast path. Tokens stand in lanes: in their own order, or permuted, or, for
circular windows, with wrapped copies; `plans.py` says which lanes a query sees. Softmax statistics
are float32, and the backward recomputes the weights at the forward's cost.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sa_jax.attention.lanes import (
    LOGITS_PER_STEP,
    LaneReader,
    Plan,
    Settings,
    largest_divisor,
    zero_unless,
)

# Logits nobody sees, and the least running maximum: exp(UNSEEN - FLOOR) is 0, also in empty rows.
_UNSEEN, _FLOOR = -1e30, -5e29


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
        backward,
        settings,
        query,
        key,
        value,
        sink_logits,
        plan,
        output,
        lse,
        *gradients,
    )
    if sink_logits is not None and sink_logits.shape[0] == 1:
        dsinks = dsinks.sum(0, keepdims=True)
    return dq, dk, dv, dsinks, None


_attention.defvjp(_attention_forward, _attention_backward)


def _by_examples(function, settings, query, *arguments):
    """Runs `function` on as many examples at a time as the step's size allows."""
    batch, _, heads, _ = query.shape
    logits = heads * settings.block * settings.chunk
    size = largest_divisor(batch, LOGITS_PER_STEP // logits)
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
    lanes = LaneReader(settings, plan, query)
    query = lanes.pad(query)
    shape = (batch, kv_heads, heads // kv_heads, settings.block)
    nothing = (
        jnp.full(shape, _FLOOR, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )

    def block(index):
        q, queries = lanes.queries(index, query)
        q = _by_head(q, kv_heads)

        def chunk(number, state):
            k, v, mask, _ = lanes.keys(index, number, queries, key, value)
            return _accumulate(*state, _logits_and_slope(settings, q, k, mask)[0], v)

        if lanes.is_simple:
            k, v, mask, _ = lanes.keys(index, 0, queries, key, value)
            output, lse = _softmax(_logits_and_slope(settings, q, k, mask)[0], v)
            if queries.is_valid is not None:
                is_valid = queries.is_valid[:, None, None]
                output, lse = zero_unless(output, is_valid), jnp.where(is_valid, lse, _FLOOR)
        else:
            state = lanes.for_chunks(index, chunk, nothing)
            if queries.sinks is not None:
                k, v, mask, _ = lanes.sinks(queries, key, value)
                state = _accumulate(*state, _logits_and_slope(settings, q, k, mask)[0], v)
            largest, total, output = state
            total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
            output, lse = output / total[..., None], largest + jnp.log(total)
        if sink_logits is not None:
            joined = jnp.logaddexp(lse, sink_logits[..., None])
            output, lse = output * jnp.exp(lse - joined)[..., None], joined
        return (_by_token(output.astype(query.dtype)), _by_token(lse)), queries.row

    def step(totals, indices):
        return lanes.write(totals, *lanes.for_blocks(block, indices), indices[0]), None

    start = lanes.nothing((heads, head_dim), query.dtype), lanes.nothing((heads,), jnp.float32)
    (output, lse), _ = lax.scan(step, start, lanes.steps)
    return output[:, :length], lse[:, :length]


def _softmax(logits, value):
    """Output and log-sum-exp of a single chunk of keys."""
    # XLA fuses a softmax whose statistics nobody else uses, as where no gradient is wanted.
    largest = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    output = _weigh(weights.astype(value.dtype), value) / total
    return output, (largest + jnp.log(total))[..., 0]


def _accumulate(largest, total, output, logits, value):
    """Adds keys to a running softmax."""
    updated = jnp.maximum(largest, logits.max(-1))
    weights = jnp.exp(logits - updated[..., None])
    shrink = jnp.exp(largest - updated)
    output = output * shrink[..., None] + _weigh(weights.astype(value.dtype), value)
    return updated, total * shrink + weights.sum(-1), output


def _backward(settings, query, key, value, sink_logits, plan, output, lse, gradient, dlse):
    """Gradients of q, k, v and, per example, of the sink logits."""
    batch, length, _, head_dim = query.shape
    kv_heads = key.shape[2]
    lanes = LaneReader(settings, plan, query)
    delta = (output.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1) - dlse
    rows = tuple(lanes.pad(x) for x in (query, gradient, lse, delta))
    count = key.shape[1] if plan.keys.row is None else plan.keys.row.shape[-1]
    kv_shape = (batch, kv_heads, count, head_dim)

    def block(index, dk, dv):
        """A block's dq, rows and sinks' gradients; dk and dv, carried on or runs to be added."""
        arrays, queries = lanes.queries(index, rows)
        q, do, lse, delta = (_by_head(x, kv_heads) for x in arrays)

        def gradients(k, v, mask):
            """dq, and the weights and the logits' gradients that dv and dk are made of."""
            logits, slope = _logits_and_slope(settings, q, k, mask)
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

        if lanes.is_simple:
            k, v, mask, first = lanes.keys(index, 0, queries, key, value)
            dq, weights, dlogits = gradients(k, v, mask)
            dk, dv = (first, _gather_back(dlogits, q)), (first, _gather_back(weights, do))
        else:
            start = jnp.zeros(q.shape, jnp.float32)
            dq, dk, dv = lanes.for_chunks(index, chunk, (start, dk, dv))
        if queries.sinks is not None:
            k, v, mask, flat = lanes.sinks(queries, key, value)
            added, weights, dlogits = gradients(k, v, mask)
            dq += added
            dk = _add_rows(dk, _gather_back_own(dlogits, q), flat)
            dv = _add_rows(dv, _gather_back_own(weights, do), flat)
        dsinks = None
        if sink_logits is not None:
            dsinks = (jnp.exp(sink_logits[..., None] - lse) * delta).sum(-1)
        return _by_token(dq.astype(query.dtype)), queries.row, dsinks, dk, dv

    def step(carry, indices):
        dq, dk, dv, dsinks = carry
        if lanes.is_simple:
            one = functools.partial(block, dk=None, dv=None)
            added, row, dsink, *parts = lanes.for_blocks(one, indices)
            dk, dv = (_add_runs(x, *part) for x, part in zip((dk, dv), parts, strict=True))
            dsink = None if dsink is None else dsink.sum(0)
        else:
            added, row, dsink, dk, dv = block(indices[0], dk, dv)
            added, row = jax.tree.map(lambda x: x[None], (added, row))
        dsinks = None if dsinks is None else dsinks - dsink
        return (lanes.write(dq, added, row, indices[0]), dk, dv, dsinks), None

    start = (
        lanes.nothing(query.shape[2:], query.dtype),
        jnp.zeros(kv_shape, jnp.float32),
        jnp.zeros(kv_shape, jnp.float32),
        None if sink_logits is None else jnp.zeros((batch, *sink_logits.shape[1:]), jnp.float32),
    )
    (dq, dk, dv, dsinks), _ = lax.scan(step, start, lanes.steps)
    dk, dv = (lanes.keys_to_tokens(jnp.moveaxis(x, 1, 2)) for x in (dk, dv))
    return dq[:, :length], dk.astype(key.dtype), dv.astype(value.dtype), dsinks


def _by_head(x, kv_heads):
    """`[B, Q, N, ...]` as `[B, K, G, Q, ...]`."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _by_token(x):
    """`[B, K, G, Q, ...]` as `[B, Q, N, ...]`."""
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 2)


def _logits_and_slope(settings, q, k, mask):
    """Scaled, capped and masked logits `[B, K, G, Q, S]`; their derivative by uncapped ones."""
    logits = settings.scale * _score(q, k)
    slope = 1.0
    cap = settings.logits_soft_cap
    if cap is not None:
        tanh = jnp.tanh(logits / cap)
        logits, slope = cap * tanh, 1 - tanh**2
    return jnp.where(mask[:, None, None], logits, _UNSEEN), slope


def _einsum(spec, *operands):
    """float32 results; float32 operands are multiplied in full precision on every device."""
    precision = 'highest' if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=jnp.float32)


def _score(q, k):
    """q·k for shared keys `[B, K, S, H]` or each query's own `[B, K, Q, c, H]`."""
    if k.ndim == 5:
        return _einsum('bkgqh,bkqsh->bkgqs', q, k)
    # The CPU multiplies fastest if the contracted axis stands first and one axis is free.
    *batch, group, size, head_dim = q.shape
    q = jnp.moveaxis(q, -1, 2).reshape(*batch, head_dim, group * size)
    q, k = lax.optimization_barrier((q, jnp.moveaxis(k, -1, 2)))
    return _einsum('bkhm,bkhs->bkms', q, k).reshape(*batch, group, size, -1)


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


def _add_runs(total, first, added):
    """Adds runs, one behind the other since they overlap; both have a leading axis for them."""
    for start, run in zip(first, added, strict=True):
        total = _add_run(total, run, start)
    return total


def _add_run(total, added, first):
    """Adds to the lanes from `first` on."""
    present = lax.dynamic_slice_in_dim(total, first, added.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, present + added, first, axis=2)


def _add_rows(total, added, lanes):
    """Adds to scattered lanes `[B or 1, n]`."""
    lanes = jnp.broadcast_to(lanes, (total.shape[0], lanes.shape[-1]))
    return jax.vmap(lambda x, lanes, added: x.at[:, lanes].add(added))(total, lanes, added)
