"""A mixture of experts: each token goes through a few of many feed-forward layers.

The tokens are sorted by expert and cut into blocks of one expert each, so that the cost is that of
the chosen experts. `jax.lax.ragged_dot` would say the same, but off TPUs XLA computes every expert
for every token. The weights are those of all layers: XLA would copy a layer that is cut out of
them, and so all of its experts for a token that needs a few.

Shapes: M tokens, D the residual stream, L layers, E experts in each, C of them for each token, F an
expert's hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from sa_jax.models.layers import swiglu
from sa_jax.models.sharding import partition_spec

_MOST_ROWS = 512  # of a block
_BLOCKS = 8  # at a time: a block alone is too little work for a GPU


class Choice(NamedTuple):
    """The experts of each token.

    Attributes:
      experts: int32 `[M, C]`.
      weights: `[M, C]` float32.
    """

    experts: Array
    weights: Array


def choose(x: Array, router: Array, num_chosen: int, *, normalize: bool) -> Choice:
    """Picks the experts with the largest probability; of equal ones, those of lower index.

    Args:
      x: `[M, D]`.
      router: `[D, E]`.
      num_chosen: C.
      normalize: Whether the weights of a token are scaled to sum to one.

    Returns:
      The experts and their weights, which are softmax probabilities over all experts, float32.
    """
    probabilities = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, num_chosen)
    if normalize:
        weights /= weights.sum(axis=-1, keepdims=True)
    return Choice(experts, weights)


def mix(
    x: Array,
    choice: Choice,
    gate: Array,
    up: Array,
    down: Array,
    *,
    layer: Array | int,
    num_experts: int,
    first: Array | int = 0,
) -> Array:
    """The weighted sum of what each token's experts make of it.

    Args:
      x: `[M, D]`.
      choice: Of `choose`, among all experts of the layer.
      gate: `[L, E', D, F]`, of experts `first` … `first + E' - 1`; the others contribute nothing.
        Cast to x's type.
      up: `[L, E', D, F]`.
      down: `[L, E', F, D]`.
      layer: Which of the L.
      num_experts: E, of which E' are here.
      first: The expert that comes first.

    Returns:
      `[M, D]`, x's type.
    """
    (tokens, chosen), count = choice.experts.shape, gate.shape[1]
    expert = choice.experts.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)
    rows = min(_MOST_ROWS, max(1, tokens * chosen // num_experts))
    # As many blocks as there may be: all choices may fall on the experts here.
    blocks = (tokens * chosen + min(count, tokens * chosen) * (rows - 1)) // rows
    together = min(_BLOCKS, blocks)
    blocks = -(-blocks // together) * together

    # In each expert's first block its first row, and so on: a place for each token and choice.
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=count + 1)[:count]
    blocks_of = -(-sizes // rows)
    last_block = jnp.cumsum(blocks_of)  # one behind it
    first_block, first_choice = last_block - blocks_of, jnp.cumsum(sizes) - sizes
    sorted_expert = jnp.minimum(expert[order], count - 1)
    rank = jnp.arange(tokens * chosen) - first_choice[sorted_expert]
    place = first_block[sorted_expert] * rows + rank
    place = jnp.where(expert[order] < count, place, blocks * rows)
    token = jnp.full(blocks * rows, tokens).at[place].set(order // chosen, mode='drop')
    number = jnp.arange(blocks)
    block_expert = jnp.minimum(jnp.searchsorted(last_block, number, side='right'), count - 1)

    def run(index, expert):
        y = jnp.take(x, index, axis=0, mode='fill', fill_value=0)
        of_gate, of_up, of_down = (w[layer, expert].astype(x.dtype) for w in (gate, up, down))
        return swiglu(y, of_gate, of_up) @ of_down

    def skip(index, expert):
        return jnp.zeros_like(jnp.take(x, index, axis=0, mode='clip'))  # as spread as `run`'s

    def run_group(group):
        number, *group = group
        if blocks == together:
            return jax.vmap(run)(*group)
        # Most groups are empty where most experts are elsewhere.
        is_used = number[0] < last_block[-1]
        return jax.lax.cond(is_used, jax.vmap(run), jax.vmap(skip), *group)

    groups = (number, token.reshape(blocks, rows), block_expert)
    groups = [a.reshape(-1, together, *a.shape[1:]) for a in groups]
    y = jax.lax.map(run_group, tuple(groups))
    place = jnp.zeros_like(place).at[order].set(place).reshape(tokens, chosen)
    y = jnp.take(y.reshape(blocks * rows, -1), place, axis=0, mode='fill', fill_value=0)
    weighted = jnp.einsum('mcd,mc->md', y.astype(jnp.float32), choice.weights)
    return weighted.astype(x.dtype)


def mixture(
    x: Array,
    router: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    layer: Array | int,
    num_chosen: int,
    normalize: bool,
    mesh: Mesh | None = None,
) -> Array:
    """A feed-forward layer of experts.

    Args:
      x: `[B, T, D]`.
      router: `[D, E]`, of the layer.
      gate: `[L, E, D, F]`, of any type.
      up: `[L, E, D, F]`.
      down: `[L, E, F, D]`.
      layer: Which of the L.
      num_chosen: C.
      normalize: Whether the weights of a token are scaled to sum to one.
      mesh: Of `make_mesh`; each device runs its share of the experts for its tokens.

    Returns:
      `[B, T, D]`, x's type.
    """

    def run(x, router, gate, up, down, layer):
        flat = x.reshape(-1, x.shape[-1])
        choice = choose(flat, router, num_chosen, normalize=normalize)
        first = 0 if mesh is None else jax.lax.axis_index('tensor') * gate.shape[1]
        options = {'layer': layer, 'num_experts': router.shape[1], 'first': first}
        y = mix(flat, choice, gate, up, down, **options).reshape(x.shape)
        return y if mesh is None else jax.lax.psum(y, 'tensor')

    if mesh is None:
        return run(x, router, gate, up, down, layer)
    tokens, everywhere = partition_spec('batch', 'tokens', None), partition_spec()
    experts = partition_spec('layers', 'experts', None, None)
    specs = (tokens, everywhere, experts, experts, experts, everywhere)
    shard = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=tokens)
    return shard(x, router, gate, up, down, layer)
