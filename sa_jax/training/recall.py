"""A small decoder learns associative recall; its accuracy by distance."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from sa_jax.data.recall import Recall
from sa_jax.evaluation.perplexity import draw_keys
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.training.optimizer import learning_rate_schedule, make_optimizer
from sa_jax.training.step import init_state, split_batch, train_step

_EVALUATED_ROWS = 256


def learn(
    config: DecoderConfig,
    recall: Recall,
    optimizer_config: ConfigDict,
    *,
    steps: int,
    rows: int,
    seed: int,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Decoder:
    """Trains a decoder on rows that never come twice.

    Args:
      config: its architecture.
      recall: the rows.
      optimizer_config: as a run's `optimizer`.
      steps: optimizer steps.
      rows: of a step.
      seed: of parameters, rows and permutations.
      on_step: called with the loss of each step, nats per query.
    """

    def create(key):
        return Decoder(config, rngs=nnx.Rngs(key))

    graph, _ = nnx.split(nnx.eval_shape(create, jax.random.key(0)))
    optimizer = make_optimizer(optimizer_config, steps)
    step = functools.partial(
        train_step,
        forward=functools.partial(_forward, graph),
        optimizer=optimizer,
        schedule=learning_rate_schedule(optimizer_config, steps),
    )
    init = functools.partial(
        init_state,
        init_params=lambda key: nnx.to_pure_dict(nnx.state(create(key))),
        optimizer=optimizer,
    )
    state = jax.jit(init)(jax.random.key(seed))
    step = jax.jit(step, donate_argnums=0)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        batch = recall.batch(rng, rows)
        del batch['distances']
        state, metrics = step(state, split_batch(batch, 1))
        on_step(float(metrics['loss']))
    return nnx.merge(graph, state.params)


def accuracy_by_distance(
    model: Decoder, recall: Recall, edges: Sequence[int], *, batches: int, draws: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The share of queries whose value is the likeliest token, by distance.

    Args:
      model: of `learn`.
      recall: the rows.
      edges: ascending; bin b holds the distances edges[b], …, edges[b + 1] - 1.
      batches: of 256 rows each, for each draw.
      draws: of the permutations.
      seed: of the rows.

    Returns:
      Accuracy `[bins]`, NaN for bins without queries, and the queries `[bins]`.
    """
    graph, params = nnx.split(model)
    forward = jax.jit(functools.partial(_forward, graph))
    rng = np.random.default_rng([seed, 1])
    right, count = np.zeros((2, len(edges) - 1), np.int64)
    for key in draw_keys(draws):
        for _ in range(batches):
            batch = recall.batch(rng, _EVALUATED_ROWS)
            distances = batch.pop('distances')
            logits, _ = forward(params, batch, key)
            is_right = np.asarray(logits.argmax(-1)) == batch['targets']
            is_query = distances > 0
            counted, _ = np.histogram(distances[is_query], edges)
            hits, _ = np.histogram(distances[is_query & is_right], edges)
            count += counted
            right += hits
    return np.where(count > 0, right / np.maximum(count, 1), np.nan), count


def _forward(graph, params, batch, key):
    output = nnx.merge(graph, params)(
        batch['inputs'],
        positions=batch['positions'],
        segment_ids=batch['segment_ids'],
        permutation_key=key,
        example_ids=batch['example_ids'],
    )
    return output.logits, output.gate_means
