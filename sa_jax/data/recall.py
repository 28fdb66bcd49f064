"""Multi-query associative recall, with the distance to what is recalled under control.

A row is noise but for pairs of a key and its value, side by side, and for queries: keys that come
again, behind which their value is to be predicted. Values and noise are drawn anew for each row, so
that nothing but attention to the pair tells the value.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_TRIES = 100


@dataclasses.dataclass(frozen=True)
class Recall:
    """What rows are made of.

    Attributes:
      length: tokens of a row, T.
      pairs: pairs of a row, each with one query.
      num_keys: different keys; a row has each once at most.
      num_values: different values; guessing is right once in so many.
      num_noise: different tokens of noise.

    Raises:
      ValueError: a number is out of range, or a row has no room for its pairs.
    """

    length: int = 128
    pairs: int = 4
    num_keys: int = 32
    num_values: int = 32
    num_noise: int = 32

    def __post_init__(self):
        for name, least in (('pairs', 1), ('num_keys', 1), ('num_values', 2), ('num_noise', 1)):
            if getattr(self, name) < least:
                raise ValueError(f'{name}={getattr(self, name)}; expected at least {least}')
        if self.length < 6 * self.pairs:
            raise ValueError(
                f'length={self.length} for pairs={self.pairs}; expected at least 6 tokens for each'
            )
        if self.pairs > self.num_keys:
            raise ValueError(
                f'pairs={self.pairs}; expected at most num_keys={self.num_keys}: a row has a key '
                'once'
            )

    @property
    def vocab_size(self) -> int:
        """Keys first, then values, then noise."""
        return self.num_keys + self.num_values + self.num_noise

    def batch(self, rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Makes rows.

        Args:
          rng: draws everything.
          rows: B.

        Returns:
          What a training step takes, `[B, T]` each: inputs, targets, segment_ids, positions and
          weights, which are 1 at the queries; example_ids `[B]`; and distances `[B, T]`, at a query
          the number of tokens back to the value, elsewhere 0.
        """
        shape = rows, self.length
        inputs = rng.integers(self.vocab_size - self.num_noise, self.vocab_size, shape)
        targets, distances = np.zeros((2, *shape), np.int32)
        is_free = np.ones(shape, bool)
        keys = rng.permuted(np.tile(np.arange(self.num_keys), (rows, 1)), axis=1)
        for pair in range(self.pairs):
            value_at, query_at = self._place(rng, is_free)
            row = np.arange(rows)
            value = self.num_keys + rng.integers(0, self.num_values, rows)
            inputs[row, value_at - 1] = inputs[row, query_at] = keys[:, pair]
            inputs[row, value_at] = targets[row, query_at] = value
            distances[row, query_at] = query_at - value_at
        return {
            'inputs': inputs.astype(np.int32),
            'targets': targets,
            'segment_ids': np.ones(shape, np.int32),
            'positions': np.tile(np.arange(self.length, dtype=np.int32), (rows, 1)),
            'weights': (distances > 0).astype(np.float32),
            'example_ids': np.arange(rows, dtype=np.int32),
            'distances': distances,
        }

    def _place(self, rng, is_free) -> tuple[np.ndarray, np.ndarray]:
        """Where the value and the query of a pair go in each row; takes their slots.

        All distances from 1 to T - 2 are as likely, but for those that don't fit any more.
        """
        rows = len(is_free)
        value_at, query_at = np.zeros((2, rows), int)
        open_rows = np.arange(rows)
        for _ in range(_TRIES):
            distance = rng.integers(1, self.length - 1, len(open_rows))
            at = 1 + (rng.random(len(open_rows)) * (self.length - 1 - distance)).astype(int)
            slots = np.stack([at - 1, at, at + distance], axis=1)
            fits = is_free[open_rows[:, None], slots].all(1)
            placed = open_rows[fits]
            value_at[placed], query_at[placed] = at[fits], (at + distance)[fits]
            is_free[placed[:, None], slots[fits]] = False
            open_rows = open_rows[~fits]
            if not len(open_rows):
                return value_at, query_at
        raise ValueError(
            f'{self.pairs} pairs found no room in {self.length} tokens; make rows longer'
        )
