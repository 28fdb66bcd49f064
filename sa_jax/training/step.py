"""One optimizer step as a pure function: loss, gradient accumulation, update, statistics."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sa_jax.evaluation.perplexity import token_losses
from sa_jax.training.optimizer import parameter_name

# Parameters under this name carry the layers on their leading axis.
_STACKED = 'layers/'


class TrainState(NamedTuple):
    """All that training carries from step to step, and all that a checkpoint holds of it.

    Attributes:
      params: the parameters, a nested dict of float32 arrays.
      opt_state: optax's state.
      step: the number of finished optimizer steps, a scalar.
      key: the run's typed PRNG key; never advanced, the step is folded into it.
    """

    params: dict
    opt_state: optax.OptState
    step: Array
    key: Array


def init_state(
    key: Array, init_params: Callable, optimizer: optax.GradientTransformation
) -> TrainState:
    """Returns the state before the first step; `init_params` maps a key to parameters."""
    params_key, run_key = jax.random.split(key)
    params = init_params(params_key)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), run_key)


def layer_norms(tree: dict) -> dict[str, Array]:
    """Returns the L2 norm of every parameter by its name, one for each layer where stacked."""

    def norm(name, x):
        axes = tuple(range(name.startswith(_STACKED), x.ndim))
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes))

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {name: norm(name, x) for name, x in ((parameter_name(p), x) for p, x in leaves)}


def train_step(
    state: TrainState,
    batch: dict[str, Array],
    *,
    forward: Callable,
    optimizer: optax.GradientTransformation,
    schedule: Callable,
    fresh_permutations: bool = True,
) -> tuple[TrainState, dict]:
    """Runs one optimizer step over all microbatches of a batch.

    The loss is the mean over all weighted tokens of the batch, however they are spread over
    microbatches. Permutations depend on the run's key, the step and the rows' `example_ids`
    only: neither on the microbatch a row is in, nor on the device or process that holds it.

    Args:
      state: the state before the step.
      batch: inputs, targets, segment_ids, positions and weights [A, B, T], and example_ids
        [A, B], the index of each row within the step; A counts microbatches.
      forward: maps (params, microbatch, permutation key) to logits [B, T, V] and the mean gates
        [L, P].
      optimizer: the optax transformation `state.opt_state` belongs to.
      schedule: the learning rate as a function of the finished steps, for the metrics.
      fresh_permutations: whether each step draws permutations of its own.

    Returns:
      The state after the step, and metrics: loss (nats per token), grad_norm (before clipping),
      learning_rate, tokens, gates [L, P], and the norms of the gradients and of the updated
      parameters by name and layer.
    """
    key = jax.random.fold_in(state.key, state.step) if fresh_permutations else state.key
    tokens = jnp.sum(batch['weights'], dtype=jnp.float32)

    def share_of_loss(params, micro):
        logits, gates = forward(params, micro, key)
        weights = micro['weights'].astype(jnp.float32) / jnp.maximum(tokens, 1)
        share = jnp.sum(token_losses(logits, micro['targets']) * weights)
        return share, gates * jnp.sum(weights)

    value_and_grad = jax.value_and_grad(share_of_loss, has_aux=True)

    def accumulate(total, micro):
        (loss, gates), grads = value_and_grad(state.params, micro)
        return jax.tree.map(jnp.add, total, (loss, gates, grads)), None

    shapes = jax.eval_shape(value_and_grad, state.params, jax.tree.map(lambda x: x[0], batch))
    (loss, gates), grads = shapes
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, gates, grads))
    (loss, gates, grads), _ = jax.lax.scan(accumulate, zeros, batch)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        'loss': loss,
        'grad_norm': optax.tree.norm(grads),
        'learning_rate': schedule(state.step),
        'tokens': tokens,
        'gates': gates,
        'norms': {'gradient': layer_norms(grads), 'parameter': layer_norms(params)},
    }
    return TrainState(params, opt_state, state.step + 1, state.key), metrics


def split_batch(batch: dict, accumulation: int) -> dict:
    """Splits the rows of a batch into microbatches: [A * B, ...] to [A, B, ...]."""
    return {name: x.reshape(accumulation, -1, *x.shape[1:]) for name, x in batch.items()}
