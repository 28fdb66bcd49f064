"""What earlier tokens are worth: the same tokens predicted with less and less before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def context_lengths(sequence_length: int, scored: int) -> list[int]:
    """Powers of two times `scored`, and the whole row.

    Args:
      sequence_length: tokens of a row.
      scored: of them, those at its end that are predicted.

    Raises:
      ValueError: unless a row has more tokens than are predicted.
    """
    if not 0 < scored < sequence_length:
        raise ValueError(
            f'{scored} tokens of a row of {sequence_length} are to be predicted; expected 1 to '
            f'{sequence_length - 1}.'
        )
    lengths = [scored]
    while lengths[-1] < sequence_length:
        lengths.append(min(2 * lengths[-1], sequence_length))
    return lengths


def hide_earlier(batches: Iterable[dict], context: int, scored: int) -> Iterator[dict]:
    """Batches whose last tokens see nothing before the last `context` ones, and alone count.

    Rows keep their length, so that permutations and windows are those of the whole row. Only rows
    that one document fills count.

    Args:
      batches: host arrays [B, T]: segment_ids, positions, weights, and others.
      context: tokens at the end of a row that see each other and no earlier ones.
      scored: of those, the ones at the end that count.

    Raises:
      ValueError: if more tokens count than see each other.
    """
    if scored > context:
        raise ValueError(f"{scored} tokens can't be predicted within a context of {context}.")
    for batch in batches:
        segments = batch['segment_ids']
        length = segments.shape[1]
        hidden = np.arange(length) < length - context
        # Padding stays what it is, segment 0.
        apart = np.where(hidden & (segments > 0), segments.max() + segments, segments)
        counts = batch['positions'] >= length - scored
        yield batch | {
            'segment_ids': apart.astype(segments.dtype),
            'weights': batch['weights'] * counts,
        }
