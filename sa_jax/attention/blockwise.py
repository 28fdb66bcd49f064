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
    logits = heads * settings.sizes.block * settings.sizes.chunk
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
    _, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    lanes = LaneReader(settings, plan, query)
    query = lanes.pad(query)

    def block(stair, index):
        q, queries = lanes.queries(index, stair, query)
        q = _by_head(q, kv_heads)

        def chunk(number, state):
            k, v, mask, _ = lanes.keys(index, stair, number, queries, key, value)
            return _accumulate(*state, _logits(settings, q, k, mask), v)

        if lanes.is_simple:
            k, v, mask, _ = lanes.keys(index, stair, 0, queries, key, value)
            output, lse = _softmax(_logits(settings, q, k, mask), v)
            if queries.is_valid is not None:
                is_valid = queries.is_valid[:, None, None]
                output, lse = zero_unless(output, is_valid), jnp.where(is_valid, lse, _FLOOR)
        else:
            nothing = jnp.zeros(q.shape[:-1], jnp.float32)
            state = nothing + _FLOOR, nothing, jnp.zeros(q.shape, jnp.float32)
            state = lanes.for_chunks(index, chunk, state)
            if queries.sinks is not None:
                k, v, mask, _ = lanes.sinks(queries, key, value)
                state = _accumulate(*state, _logits(settings, q, k, mask), v)
            largest, total, output = state
            total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
            output, lse = output / total[..., None], largest + jnp.log(total)
        if sink_logits is not None:
            joined = jnp.logaddexp(lse, sink_logits[..., None])
            output, lse = output * jnp.exp(lse - joined)[..., None], joined
        return (_by_token(output.astype(query.dtype)), _by_token(lse)), queries.row

    def step(totals, indices):
        for stair in settings.stairs:
            rows, row = lanes.for_blocks(functools.partial(block, stair), indices)
            totals = lanes.write(totals, rows, row, indices[0])
        return totals, None

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
    of_queries = tuple(lanes.pad(x) for x in (query, gradient, lse, delta))
    count = key.shape[1] if plan.keys.row is None else plan.keys.row.shape[-1]
    kv_shape = (batch, kv_heads, count, head_dim)

    def block(stair, index, dk, dv):
        """A stair's dq, rows and sinks' gradients; dk and dv, carried on or runs to be added."""
        arrays, queries = lanes.queries(index, stair, of_queries)
        q, do, lse, delta = (_by_head(x, kv_heads) for x in arrays)
        # Two numbers a query: gathered once rather than for each of its keys.
        lse, delta = lax.optimization_barrier((lse, delta))

        def gradients(k, v, mask):
            """What a chunk adds to dq, and its dk and dv."""
            logits, slope = _capped(settings, _score_by_key(q, k))
            logits = jnp.where(jnp.moveaxis(mask, -1, 1)[:, None, :, None], logits, _UNSEEN)
            weights = jnp.exp(logits - lse[:, :, None])
            dlogits = weights * (_score_by_key(do, v) - delta[:, :, None]) * slope
            dlogits = (dlogits * settings.scale).astype(k.dtype)
            dk, dv = _gather_back(dlogits, q, k), _gather_back(weights.astype(do.dtype), do, v)
            return _weigh_by_key(dlogits, k), dk, dv

        def chunk(number, carry):
            dq, dk, dv = carry
            k, v, mask, first = lanes.keys(index, stair, number, queries, key, value)
            added, *runs = gradients(k, v, mask)
            dk, dv = (_add_run(x, run, first) for x, run in zip((dk, dv), runs, strict=True))
            return dq + added, dk, dv

        if lanes.is_simple:
            k, v, mask, first = lanes.keys(index, stair, 0, queries, key, value)
            dq, *runs = gradients(k, v, mask)
            dk, dv = ((first, run) for run in runs)
        else:
            start = jnp.zeros(q.shape, jnp.float32)
            dq, dk, dv = lanes.for_chunks(index, chunk, (start, dk, dv))
        if queries.sinks is not None:
            k, v, mask, flat = lanes.sinks(queries, key, value)
            added, *own = gradients(k, v, mask)
            dq += added
            dk, dv = (_add_rows(x, rows, flat) for x, rows in zip((dk, dv), own, strict=True))
        dsinks = None
        if sink_logits is not None:
            # Lanes without a token were read as zeros, from which a large sink would overflow.
            weights = jnp.exp(jnp.minimum(sink_logits[..., None] - lse, 0))
            dsinks = (weights * delta).sum(-1)
        return _by_token(dq.astype(query.dtype)), queries.row, dsinks, dk, dv

    def step(carry, indices):
        dq, dk, dv, dsinks = carry
        for stair in settings.stairs:
            if lanes.is_simple:
                one = functools.partial(block, stair, dk=None, dv=None)
                added, row, dsink, *runs = lanes.for_blocks(one, indices)
                dk, dv = (_add_runs(x, *run) for x, run in zip((dk, dv), runs, strict=True))
                dsink = None if dsink is None else dsink.sum(0)
            else:
                added, row, dsink, dk, dv = block(stair, indices[0], dk, dv)
                added, row = jax.tree.map(lambda x: x[None], (added, row))
            dq = lanes.write(dq, added, row, indices[0])
            dsinks = None if dsinks is None else dsinks - dsink
        return (dq, dk, dv, dsinks), None

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


def _logits(settings, q, k, mask):
    """Scaled, capped and masked logits `[B, K, G, Q, S]`."""
    logits, _ = _capped(settings, _score(q, k))
    return jnp.where(mask[:, None, None], logits, _UNSEEN)


def _capped(settings, score):
    """Scaled and capped logits, and their derivative by uncapped ones."""
    logits, cap = settings.scale * score, settings.logits_soft_cap
    if cap is None:
        return logits, 1.0
    tanh = jnp.tanh(logits / cap)
    return cap * tanh, 1 - tanh**2


def _einsum(spec, *operands):
    """float32 results; float32 operands are multiplied in full precision on every device."""
    precision = 'highest' if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=jnp.float32)


# Keys and values are shared by a block's queries, `[B, K, S, H]`, or each query's own,
# `[B, K, Q, S, H]`. The backward keeps keys in front, where three of its five products need them.


def _weigh(weights, value):
    """Values weighted by `[B, K, G, Q, S]`: `[B, K, G, Q, H]`."""
    return _einsum(f'bkgqs,{_axes(value)}->bkgqh', weights, value)


def _score(q, k):
    """Products of queries and keys, `[B, K, G, Q, S]`."""
    if k.ndim == 4 and jax.__version_info__ < (0, 11):
        # Before 0.11 XLA's product has one CPU thread, unless the contracted axes stand first.
        *batch, group, size, head_dim = q.shape
        q = jnp.moveaxis(q, -1, 2).reshape(*batch, head_dim, group * size)
        q, k = lax.optimization_barrier((q, jnp.moveaxis(k, -1, 2)))
        return _einsum('bkhm,bkhs->bkms', q, k).reshape(*batch, group, size, -1)
    return _einsum(f'bkgqh,{_axes(k)}->bkgqs', q, k)


def _score_by_key(x, keys):
    """Products with the queries' rows `[B, K, G, Q, H]`: `[B, K, S, G, Q]`."""
    return _einsum(f'{_axes(keys)},bkgqh->bksgq', keys, x)


def _weigh_by_key(weights, keys):
    """Keys weighted by `[B, K, S, G, Q]`: `[B, K, G, Q, H]`."""
    # Without the barrier XLA would transpose the weights rather than the result.
    weighed = lax.optimization_barrier(_einsum(f'{_axes(keys)},bksgq->bkhgq', keys, weights))
    return jnp.moveaxis(weighed, 2, -1)


def _gather_back(weights, x, keys):
    """What the queries' rows give back, by `[B, K, S, G, Q]`: `[B, K, S or Q·S, H]`."""
    back = _einsum(f'bksgq,bkgqh->{_axes(keys)}', weights, x)
    return back.reshape(*back.shape[:2], -1, back.shape[-1])


def _axes(keys):
    """Of keys or values, in an einsum."""
    return 'bksh' if keys.ndim == 4 else 'bkqsh'


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
