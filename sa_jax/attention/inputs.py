"""Checks of what callers pass in: each error names the value, what was expected and the remedy.

Values (as opposed to shapes) can only be read outside jit: inside, segments that aren't contiguous,
positions that don't increase or lie beyond 2**30, ids beyond int32, and permutations that aren't
are undefined behaviour.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

FARTHEST = 2**30  # positions lie within, so that no distance leaves int32


def check_heads(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Checks q `[B, T, N, H]`, k and v `[B, S, K, H]`, K dividing N, and floating dtypes."""
    for name, x in (('query', query), ('key', key), ('value', value)):
        check_array(name, x)
        if x.ndim != 4:
            raise ValueError(
                f'{name} has shape {x.shape}; expected [batch, length, heads, head_dim]'
            )
        if 0 in x.shape:
            raise ValueError(f'{name} has shape {x.shape}; expected no axis of size 0')
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f'{name} has dtype {x.dtype}; expected a floating-point dtype')
    if key.shape != value.shape:
        raise ValueError(f'key {key.shape} and value {value.shape} differ; expected one shape')
    batch, _, heads, head_dim = query.shape
    if (batch, head_dim) != (key.shape[0], key.shape[3]):
        raise ValueError(
            f'query {query.shape} and key {key.shape} differ in batch or head_dim; expected '
            'query [B, T, N, H] and key [B, S, K, H]'
        )
    if heads % key.shape[2]:
        raise ValueError(
            f'{heads} query heads cannot share {key.shape[2]} key/value heads; expected the number '
            'of query heads to be a multiple of it'
        )


def check_array(name: str, x: jax.Array) -> None:
    """Checks that something is an array at all."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f'{name} is a {type(x).__name__}; expected an array: jnp.asarray({name})')


def check_same_length(query: jax.Array, key: jax.Array, name: str) -> None:
    """Checks T = S."""
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f'{name} needs as many queries as keys, got {query.shape[1]} and {key.shape[1]}; only '
            'full and sliding-window attention take other lengths, with query and key positions'
        )


def check_count(name: str, value: int, minimum: int) -> None:
    """Checks a static integer option."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f'{name}={value!r}; expected a Python integer >= {minimum}')


def soft_cap(logits_soft_cap: float | None) -> float | None:
    """A soft cap as a Python number, checked to be positive and finite."""
    if logits_soft_cap is None:
        return None
    try:
        cap = float(logits_soft_cap)
    except (TypeError, ValueError):
        cap = math.nan
    if not 0 < cap < math.inf:
        raise ValueError(
            f'logits_soft_cap={logits_soft_cap!r}; expected a positive finite number known when '
            'tracing, or None for no cap'
        )
    return cap


def check_sink_logits(sink_logits: jax.Array | None, heads: int) -> None:
    """Checks sink logits `[N]`."""
    if sink_logits is None:
        return
    check_array('sink_logits', sink_logits)
    if sink_logits.shape != (heads,):
        raise ValueError(
            f'sink_logits has shape {sink_logits.shape}; expected one logit per query head, '
            f'({heads},)'
        )


def check_key(key: jax.Array) -> None:
    """Checks for a typed PRNG key."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        kind = getattr(key, 'dtype', type(key).__name__)
        raise TypeError(
            f'the permutation key is {kind}; expected a typed key: jax.random.key(seed), or '
            'jax.random.wrap_key_data(old) for an old-style one'
        )


def check_tokens(
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    shape: tuple[int, int],
    prefix: str = '',
) -> None:
    """Checks positions and segment ids `[B, T]`.

    Raises:
      ValueError: other shapes; outside jit also negative or scattered segment ids, and positions
        that don't strictly increase within a segment.
    """
    for name, x in ((prefix + 'positions', positions), (prefix + 'segment_ids', segment_ids)):
        if x is None:
            continue
        check_array(name, x)
        if x.shape != shape:
            raise ValueError(f'{name} has shape {x.shape}; expected [batch, length] = {shape}')
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f'{name} has dtype {x.dtype}; expected integers')
    if segment_ids is not None and is_concrete(segment_ids):
        check_segments(np.asarray(segment_ids), prefix)
    if positions is not None and is_concrete(positions, segment_ids):
        segments = np.ones(shape, int) if segment_ids is None else np.asarray(segment_ids)
        _check_positions(np.asarray(positions), segments, prefix)


def tokens(
    positions: jax.Array | None, segment_ids: jax.Array | None, length: int
) -> tuple[jax.Array, jax.Array]:
    """Positions and segment ids as int32 `[B or 1, T]`: by default the index, and one segment."""
    if segment_ids is None:
        segment_ids = not_folded(jnp.ones((1, length), jnp.int32))
    if positions is None:
        positions = not_folded(jnp.arange(length, dtype=jnp.int32)[None])
    return positions.astype(jnp.int32), segment_ids.astype(jnp.int32)


def check_permutation(permutation: jax.Array, batch: int, length: int, kv_heads: int) -> None:
    """Checks a caller's permutation: `[T]`, `[B, T]` or `[B, K, T]`, each token once."""
    check_array('permutation', permutation)
    expected = ((length,), (batch, length), (batch, kv_heads, length))
    if permutation.shape not in expected:
        raise ValueError(
            f'permutation has shape {permutation.shape}; expected [T], [B, T] or [B, K, T]: one of '
            f'{expected}'
        )
    if not jnp.issubdtype(permutation.dtype, jnp.integer):
        raise TypeError(f'permutation has dtype {permutation.dtype}; expected integers')
    if not is_concrete(permutation):
        return
    rows = np.asarray(permutation).reshape(-1, length)
    for row in rows:
        counts = np.bincount(row[(row >= 0) & (row < length)], minlength=length)
        if (counts != 1).any():
            token = int(np.flatnonzero(counts != 1)[0])
            raise ValueError(
                f'permutation is not one: token {token} stands in {counts[token]} slots; expected '
                f'each of 0 … {length - 1} once'
            )


def check_slots_contiguous(permutation: jax.Array, segment_ids: jax.Array) -> None:
    """Checks that every segment fills a run of slots, which a circular window needs."""
    if not is_concrete(permutation, segment_ids):
        return
    order = np.asarray(permutation)
    segments = np.asarray(segment_ids)
    segments = segments[:, None] if order.ndim == 3 else segments
    order, segments = np.broadcast_arrays(order, segments)
    slots = np.take_along_axis(segments, order, -1).reshape(-1, order.shape[-1])
    for row in slots:
        runs = row[np.flatnonzero(np.diff(row, prepend=row[0] - 1))]
        runs = runs[runs > 0]
        if len(runs) != len(set(runs.tolist())):
            raise ValueError(
                'a circular window needs every segment in a run of slots of its own, but the given '
                'permutation mixes segments; draw it with draw_permutation(key, segment_ids=…)'
            )


def not_folded(x: jax.Array) -> jax.Array:
    """Hides a constant from XLA, which would evaluate sorts and loops over it for minutes."""
    return jax.lax.optimization_barrier(x)


def is_concrete(*arrays: jax.Array) -> bool:
    """Whether the values can be read now, that is outside jit."""
    return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_segments(segment_ids: np.ndarray, prefix: str = '') -> None:
    """Checks the values of segment ids `[B, T]`."""
    if (segment_ids < 0).any() or (segment_ids >= 2**31).any():
        worst = segment_ids.min() if (segment_ids < 0).any() else segment_ids.max()
        raise ValueError(
            f'{prefix}segment_ids holds {worst}; expected 0 for padding and numbers from 1 to '
            '2**31 - 1 for documents'
        )
    for example, row in enumerate(segment_ids):
        runs = row[np.flatnonzero(np.diff(row, prepend=-1))]
        runs = runs[runs > 0]
        numbers, counts = np.unique(runs, return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f'{prefix}segment_ids of example {example}: segment {numbers[counts > 1][0]} is '
                'split into several runs; expected equal numbers to be contiguous: renumber them'
            )


def _check_positions(positions: np.ndarray, segment_ids: np.ndarray, prefix: str) -> None:
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    positions = positions.astype(np.int64)
    if (abs(positions) >= FARTHEST).any():
        raise ValueError(
            f'{prefix}positions holds {positions.flat[abs(positions).argmax()]}; expected numbers '
            f'between -2**30 and 2**30: subtract an offset'
        )
    bad = (same & (np.diff(positions, axis=1) <= 0)).nonzero()
    if len(bad[0]):
        example, token = int(bad[0][0]), int(bad[1][0])
        raise ValueError(
            f'{prefix}positions of example {example} go from {positions[example, token]} to '
            f'{positions[example, token + 1]} at token {token + 1}; expected them to increase '
            'strictly within a segment'
        )
