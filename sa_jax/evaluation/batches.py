"""Batches of few shapes for texts of many lengths, so that little is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sa_jax.models.buckets import bucket


class Batch(NamedTuple):
    """Texts that go through the model together.

    Attributes:
      members: Which texts, as indices.
      rows: Of the batch; those beyond the members are padding.
      length: Tokens of a row, no fewer than those of any member.
    """

    members: list[int]
    rows: int
    length: int


def plan_batches(
    lengths: Sequence[int], *, tokens_per_batch: int, longest: int, multiple: int = 1
) -> Iterator[Batch]:
    """Arranges texts in batches, long ones first: memory runs out at once or never.

    Args:
      lengths: The tokens of each text, at most `longest`.
      tokens_per_batch: What a batch holds, padding included, unless `multiple` rows are more.
      longest: What the model reads at most.
      multiple: The number of rows is a multiple of it.

    Yields:
      Batches of `multiple` times a power of two rows. Only the last one can have rows to spare.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        length = min(bucket(lengths[order[0]]), longest)
        groups = max(1, tokens_per_batch // (length * multiple))
        rows = multiple << (groups.bit_length() - 1)
        members, order = order[:rows], order[rows:]
        while rows > multiple and rows // 2 >= len(members):
            rows //= 2
        yield Batch(members, rows, length)
