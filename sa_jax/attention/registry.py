"""Attention functions by name: what configs, experiments and tables refer to.

An attention function is pure: `function(query, key, value, context, **options) -> output`. Another
package registers one through the entry point group `sa_jax.attention`, whose value names an
`AttentionKind`; nothing here needs an edit.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sa_jax.attention import inputs

ENTRY_POINT_GROUP = 'sa_jax.attention'


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('positions', 'segment_ids', 'key', 'layer'),
    meta_fields=('is_causal',),
)
@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """What a pattern may need beside query, key and value.

    Attributes:
      positions: `[B, T]` int32, strictly increasing within a segment; None means the index.
      segment_ids: `[B, T]` int32, 0 for padding, equal numbers contiguous; None means one segment.
      key: a typed PRNG key for this step, layer and path. Its shape is the scope of a draw: `[]`
        one for all, `[B]` one per example, `[B, K]` one per example and key/value head.
      layer: the index of the layer.
      is_causal: whether a token sees only its predecessors.
    """

    positions: jax.Array | None = None
    segment_ids: jax.Array | None = None
    key: jax.Array | None = None
    layer: jax.Array | int = 0
    is_causal: bool = True

    def tokens(self, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions and segment ids, int32 `[B, T]`, with the defaults for a query filled in."""
        shape = query.shape[:2]
        inputs.check_tokens(self.positions, self.segment_ids, shape)
        tokens = inputs.tokens(self.positions, self.segment_ids, shape[1])
        return tuple(jnp.broadcast_to(x, shape) for x in tokens)


class Decoding(NamedTuple):
    """How a causal pattern is decoded, token by token, over a cache of n tokens.

    Attributes:
      prepare: `(context, n, **options)` to a tree of arrays, drawn once for the whole sequence,
        such as its permutation; it must be what the function draws for n tokens of one document.
      neighbours: `(prepared, token, n, **options)` to int32 `[B or 1, K or 1, most]`: the tokens
        that `token`, a scalar or `[B]`, sees, each once and itself among them, -1 for none. None
        if it sees all up to itself.
    """

    prepare: Callable[..., Any]
    neighbours: Callable[..., jax.Array] | None


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """A registered attention function.

    Attributes:
      name: what configs call it.
      function: `(query [B, T, N, H], key [B, T, K, H], value [B, T, K, H], context, **options)`
        to `[B, T, N, H]`.
      mask: `(query, key, context, **options)` to the boolean visibility
        `[B or 1, N or 1, T, T]`; None if the pattern has no dense specification.
      visible_keys: `(n, *, is_causal, **options)` to the expected number of keys a query sees in a
        sequence of n tokens, for FLOP counts; None counts as full attention.
      decoding: how it is decoded over a cache; None if it can't be.
      split: `function` with an `axis_name`, inside `jax.shard_map`, where each device of that mesh
        axis has its share of the tokens of query, key and value, and the context has those of the
        whole sequence; None if it can't be split.
    """

    name: str
    function: Callable[..., jax.Array]
    mask: Callable[..., jax.Array] | None = None
    visible_keys: Callable[..., float] | None = None
    decoding: Decoding | None = None
    split: Callable[..., jax.Array] | None = None


_KINDS: dict[str, AttentionKind] = {}


def register_attention(
    name: str,
    function: Callable[..., jax.Array],
    *,
    mask: Callable[..., jax.Array] | None = None,
    visible_keys: Callable[..., float] | None = None,
    decoding: Decoding | None = None,
    split: Callable[..., jax.Array] | None = None,
) -> AttentionKind:
    """Makes `function` available to configs under `name`; see `AttentionKind` for the arguments.

    Raises:
      ValueError: another function already has the name.
    """
    kind = AttentionKind(name, function, mask, visible_keys, decoding, split)
    if name in _KINDS and _KINDS[name] != kind:
        raise ValueError(f'attention {name!r} is already registered; choose another name')
    _KINDS[name] = kind
    return kind


def get_attention(name: str) -> AttentionKind:
    """The attention function called `name`, from this package or an installed one.

    Raises:
      ValueError: no such name; the message lists the known ones and the nearest.
    """
    if name in _KINDS:
        return _KINDS[name]
    # Looked up late: `import sa_jax` must load nothing that jax and numpy don't.
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in found:
        kind = found[name].load()
        if not isinstance(kind, AttentionKind):
            raise TypeError(
                f'the entry point {name!r} of {ENTRY_POINT_GROUP!r} gives {type(kind).__name__}; '
                'expected an AttentionKind, as register_attention returns it'
            )
        if kind.name != name:
            raise ValueError(
                f'the entry point {name!r} of {ENTRY_POINT_GROUP!r} gives the attention '
                f'{kind.name!r}; expected one name for both'
            )
        return _KINDS.setdefault(name, kind)
    known = sorted({*_KINDS, *found})
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ValueError(f'unknown attention {name!r}{hint} Known: {", ".join(known)}')
