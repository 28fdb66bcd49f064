"""The probability that a decoder gives to continuations of texts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from sa_jax.attention.registry import AttentionContext
from sa_jax.evaluation.batches import plan_batches
from sa_jax.evaluation.requests import Request
from sa_jax.models.attending import attend_to_sequence
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder, run_layers, unembed
from sa_jax.models.sharding import MESH_AXES

# Texts are always scored under the same permutations: draw d folds d into this key.
_DRAWS_SEED = 0
# Logits over the whole vocabulary exist for this many tokens at a time.
_LOGIT_ROWS = 128
CONTINUATIONS = ('prefill', 'decode')


class Score(NamedTuple):
    """The score of a request.

    Attributes:
      log_probability: In nats, summed over the scored tokens.
      is_greedy: Whether each of them is the likeliest at its place.
      num_scored: The continuation's tokens, but for those dropped.
      num_read: The tokens that the model read.
      num_dropped: The tokens cut from the left because they didn't fit.
    """

    log_probability: float
    is_greedy: bool
    num_scored: int
    num_read: int
    num_dropped: int


class _Text(NamedTuple):
    """What the model reads of a request: all but the last token."""

    inputs: tuple[int, ...]
    # The first tokens, which attend under the model's pattern.
    num_prefilled: int


class _Fitted(NamedTuple):
    """A request that fits: `targets` are what the last ones of the inputs predict."""

    text: _Text
    targets: tuple[int, ...]
    num_dropped: int


class Scorer:
    """Scores continuations, each with one forward pass over context and continuation.

    A score doesn't depend on the batches: padding is masked, and permutations are drawn over the
    request's own tokens. With a permutation_scope of 'example' it does depend on the request's
    place in the list, as another permutation is drawn for each; requests that share their forward
    pass have that of the first. Otherwise it doesn't depend on the other requests either.

    Attributes:
      model: The decoder.
      max_length: The tokens that it reads at most.
      tokens_per_batch: Tokens of a batch, padding included.
      continuation: How the tokens of continuations attend, 'prefill' or 'decode'.
      permutation_key: A typed key, of the draw.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_length: int,
        tokens_per_batch: int = 4096,
        draw: int = 0,
        continuation: str = 'prefill',
        mesh: Mesh | None = None,
    ):
        """Prepares to score.

        Args:
          model: The decoder; its configuration has the attention pattern.
          max_length: The tokens that it reads at most. Of what is longer the right-most tokens
            are kept, the continuation's before the context's.
          tokens_per_batch: Tokens of a batch, padding included.
          draw: Which permutations are drawn, where the pattern permutes: 0, 1, …
          continuation: How the tokens of continuations attend: 'prefill' under the model's pattern,
            as one text with the context; 'decode' to all before them, as when they are generated
            from a full cache. The first one is predicted by the context either way, so that
            continuations of one token score alike.
          mesh: Of `make_mesh`; None for a single device.

        Raises:
          ValueError: A number is out of range, `continuation` is unknown, or continuations can't
            be decoded since the model has several attention paths.
        """
        for name, value, least in (
            ('max_length', max_length, 1),
            ('tokens_per_batch', tokens_per_batch, 1),
            ('draw', draw, 0),
        ):
            if value < least:
                raise ValueError(f'{name} must be at least {least}, got {value}.')
        if continuation not in CONTINUATIONS:
            raise ValueError(f'continuation must be one of {CONTINUATIONS}, got {continuation!r}.')
        if continuation == 'decode' and len(model.config.attention) > 1:
            raise ValueError(
                f"continuation='decode' replaces the pattern by full attention, but the model has "
                f"gates for the paths {model.config.attention}; use 'prefill'."
            )
        self.model = model
        self.max_length = max_length
        self.tokens_per_batch = tokens_per_batch
        self.continuation = continuation
        self._mesh = mesh
        self.permutation_key = jax.random.fold_in(jax.random.key(_DRAWS_SEED), draw)

    def score(self, requests: Sequence[Request], *, progress: bool = True) -> list[Score]:
        """Scores requests.

        Args:
          requests: In any order. Those that differ only in their last token share a forward pass.
          progress: Whether to show a bar on standard error.

        Returns:
          A score for each.

        Raises:
          ValueError: A context or a continuation is empty.
          FloatingPointError: A score is no number.
        """
        fitted = [self._fit(index, *request) for index, request in enumerate(requests)]
        sharing: dict[_Text, list[int]] = {}
        for index, (text, _, _) in enumerate(fitted):
            sharing.setdefault(text, []).append(index)
        texts = list(sharing)
        batches = plan_batches(
            [len(text.inputs) for text in texts],
            tokens_per_batch=self.tokens_per_batch,
            longest=self.max_length,
            multiple=_ways_of_batch(self._mesh),
        )
        log_probabilities = np.zeros(len(requests))
        is_greedy = np.ones(len(requests), bool)
        split = nnx.split(self.model)
        with tqdm(
            total=len(requests), desc='Scoring', leave=False, disable=not progress or None
        ) as bar:
            for batch in batches:
                members = [texts[member] for member in batch.members]
                requests_of = [sharing[text] for text in members]
                residual = self._residual(
                    split, members, [of_text[0] for of_text in requests_of], batch
                )
                asked = [
                    (index, row, len(text.inputs) - len(fitted[index].targets) + place, target)
                    for row, (text, of_text) in enumerate(zip(members, requests_of, strict=True))
                    for index in of_text
                    for place, target in enumerate(fitted[index].targets)
                ]
                owners, *places = np.array(asked, np.int32).T
                found = self._token_scores(split, residual, *places)
                np.add.at(log_probabilities, owners, found[0])
                np.logical_and.at(is_greedy, owners, found[1])
                bar.update(sum(map(len, requests_of)))
        if np.isnan(log_probabilities).any():
            raise FloatingPointError(
                f'The score of request {int(np.isnan(log_probabilities).argmax())} is no number; '
                "expected token ids below the model's vocab_size and finite parameters."
            )
        return [
            Score(float(total), bool(greedy), len(targets), len(text.inputs), dropped)
            for total, greedy, (text, targets, dropped) in zip(
                log_probabilities, is_greedy, fitted, strict=True
            )
        ]

    def _fit(self, index: int, context: Sequence[int], continuation: Sequence[int]) -> _Fitted:
        if not len(context) or not len(continuation):
            raise ValueError(
                f'Request {index} has {len(context)} tokens of context and {len(continuation)} of '
                'continuation; expected at least one each. A context may be the token that begins '
                'documents.'
            )
        tokens = (*context, *continuation)
        dropped = max(0, len(tokens) - 1 - self.max_length)
        tokens = tokens[dropped:]
        inputs, num_targets = tokens[:-1], min(len(continuation), len(tokens) - 1)
        decoded = num_targets - 1 if self.continuation == 'decode' else 0
        return _Fitted(
            _Text(inputs, len(inputs) - decoded), tokens[len(tokens) - num_targets :], dropped
        )

    def _residual(self, split, texts, example_ids, batch) -> Array:
        tokens = np.zeros((batch.rows, batch.length), np.int32)
        lengths, num_prefilled, ids = np.zeros((3, batch.rows), np.int32)
        ids[: len(texts)] = example_ids
        for row, text in enumerate(texts):
            lengths[row], num_prefilled[row] = len(text.inputs), text.num_prefilled
            tokens[row, : lengths[row]] = text.inputs
        decodes = bool((num_prefilled < lengths).any())
        return _residual(
            *split,
            tokens,
            lengths,
            num_prefilled if decodes else None,
            ids,
            self.permutation_key,
            self._mesh,
        )

    def _token_scores(self, split, residual, rows, positions, targets) -> np.ndarray:
        """Log probability and whether it is the likeliest, `[2, N]`, of each of N targets."""
        count = len(targets)
        padded = np.zeros((3, -(-count // _LOGIT_ROWS) * _LOGIT_ROWS), np.int32)
        padded[:, :count] = rows, positions, targets
        found = [
            _token_scores(*split, residual, *padded[:, start : start + _LOGIT_ROWS], self._mesh)
            for start in range(0, count, _LOGIT_ROWS)
        ]
        return np.concatenate([np.asarray(part, np.float64) for part in found], axis=1)[:, :count]


@functools.partial(jax.jit, static_argnames=('graph', 'mesh'))
def _residual(graph, state, tokens, lengths, num_prefilled, example_ids, key, mesh) -> Array:
    """The residual stream `[B, T, D]` behind all layers."""
    model = nnx.merge(graph, state)
    segment_ids = _first_tokens(lengths, tokens)

    def heads(config, segment_ids, layer, *query_key_value):
        return attend_to_sequence(
            *query_key_value,
            config=config,
            context=AttentionContext(None, segment_ids, key),
            layer=layer,
            example_ids=example_ids,
            mesh=mesh,
        )

    def attend(query, key, value, layer, memory):
        if num_prefilled is None:
            return heads(model.config, segment_ids, layer, query, key, value), memory
        # Two passes, since what is decoded doesn't take part in the permutations of the context.
        prefilled = _first_tokens(num_prefilled, tokens)
        (sparse,) = heads(model.config, prefilled, layer, query, key, value)
        (full,) = heads(_full(model.config), segment_ids, layer, query, key, value)
        return (jnp.where(prefilled[:, :, None, None] > 0, sparse, full),), memory

    return run_layers(model, tokens, attend, segment_ids=segment_ids, mesh=mesh)[0]


def _first_tokens(lengths, tokens) -> Array:
    """Segment ids `[B, T]`: 1 for the first tokens of each row, 0 for the others."""
    return (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)


def _full(config: DecoderConfig) -> DecoderConfig:
    return dataclasses.replace(
        config, attention=('full',), attention_options={}, layer_attention={}
    )


@functools.partial(jax.jit, static_argnames=('graph', 'mesh'))
def _token_scores(graph, state, residual, rows, positions, targets, mesh) -> Array:
    # The logits of all tokens would be the largest array by far.
    kept = residual[rows, positions][:, None]
    logits = unembed(nnx.merge(graph, state), kept, mesh)[:, 0]
    log_probabilities = jax.nn.log_softmax(logits)
    of_targets = jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]
    return jnp.stack([of_targets, (logits.argmax(-1) == targets).astype(jnp.float32)])


def _ways_of_batch(mesh: Mesh | None) -> int:
    axes = MESH_AXES['batch']
    return 1 if mesh is None else int(np.prod([mesh.shape[axis] for axis in axes]))
