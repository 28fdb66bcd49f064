"""Multi-query associative recall, with the distance to what is recalled under control.

A row is noise but for pairs of a key and a value and for queries: keys, behind which the value of
their pair is to be predicted. Pairs and noise are drawn anew for each row, so that nothing but
attention to the pair tells the value. A pair is one token, so that reach alone is in question: no
layer has to bind a value to the key in front of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Recall:
    """What rows are made of.

    Attributes:
      length: tokens of a row, T.
      pairs: pairs of a row.
      query_share: of the other tokens behind the first pair, how many ask for an earlier pair.
      num_keys: different keys; a row has a pair of each at most.
      num_values: different values; guessing is right once in so many.
      num_noise: different tokens of noise.

    Raises:
      ValueError: a number is out of range, or a row has no room for its pairs.
    """

    length: int = 128
    pairs: int = 2
    query_share: float = 0.25
    num_keys: int = 16
    num_values: int = 16
    num_noise: int = 16

    def __post_init__(self):
        for name, least in (('pairs', 1), ('num_keys', 1), ('num_values', 2), ('num_noise', 1)):
            if getattr(self, name) < least:
                raise ValueError(f'{name}={getattr(self, name)}; expected at least {least}')
        if not 0 < self.query_share <= 1:
            raise ValueError(f'query_share={self.query_share}; expected more than 0, at most 1')
        if self.length < 4 * self.pairs:
            raise ValueError(
                f'length={self.length} for pairs={self.pairs}; expected at least 4 tokens for each'
            )
        if self.pairs > self.num_keys:
            raise ValueError(
                f'pairs={self.pairs}; expected at most num_keys={self.num_keys}: a row has a pair '
                'of each'
            )

    @property
    def vocab_size(self) -> int:
        """Keys first, then values, then noise, then pairs."""
        return self.num_keys + self.num_values + self.num_noise + self.num_keys * self.num_values

    def batch(self, rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Makes rows.

        Args:
          rng: draws everything.
          rows: B.

        Returns:
          What a training step takes, `[B, T]` each: inputs, targets, segment_ids, positions and
          weights, which are 1 at the queries; example_ids `[B]`; and distances `[B, T]`, at a query
          the number of tokens back to the pair, elsewhere 0.
        """
        shape = rows, self.length
        row = np.arange(rows)[:, None]
        keys = rng.permuted(np.tile(np.arange(self.num_keys), (rows, 1)), axis=1)[:, : self.pairs]
        values = rng.integers(0, self.num_values, (rows, self.pairs))
        pair_at = self._places(rng, rows)
        # Whatever is earlier than a token can be asked for there, each pair as likely.
        is_earlier = pair_at[:, None] < np.arange(self.length)[:, None]  # [B, T, pairs]
        asked = np.where(is_earlier, rng.random(is_earlier.shape), -1).argmax(-1)
        is_query = is_earlier.any(-1) & (rng.random(shape) < self.query_share)
        is_query[row, pair_at] = False

        first_noise = self.num_keys + self.num_values
        noise = rng.integers(first_noise, first_noise + self.num_noise, shape)
        inputs = np.where(is_query, keys[row, asked], noise)
        inputs[row, pair_at] = first_noise + self.num_noise + keys * self.num_values + values
        return {
            'inputs': inputs.astype(np.int32),
            'targets': np.where(is_query, self.num_keys + values[row, asked], 0).astype(np.int32),
            'segment_ids': np.ones(shape, np.int32),
            'positions': np.tile(np.arange(self.length, dtype=np.int32), (rows, 1)),
            'weights': is_query.astype(np.float32),
            'example_ids': np.arange(rows, dtype=np.int32),
            'distances': np.where(is_query, np.arange(self.length) - pair_at[row, asked], 0),
        }

    def _places(self, rng, rows) -> np.ndarray:
        """Where the pairs are, [B, pairs]; more often early, for the far queries."""
        likelihood = 1 / np.sqrt(1 + np.arange(self.length - 1))
        # The largest of these are a draw without replacement, as likely as they should be.
        scores = np.log(rng.random((rows, self.length - 1))) / likelihood
        return np.argsort(-scores, axis=1)[:, : self.pairs]
