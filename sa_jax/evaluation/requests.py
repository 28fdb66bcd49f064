"""Texts and their continuations as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sa_jax.tokenization.tokenizers import Tokenizer


class Request(NamedTuple):
    """What is to be scored.

    Attributes:
      context: The tokens before the continuation, at least one.
      continuation: The tokens whose probability is asked for, at least one.
    """

    context: Sequence[int]
    continuation: Sequence[int]


def encode_request(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """The tokens of a text and of its continuation, as lm-evaluation-harness takes them.

    Both are encoded as one text, so that tokens reach over spaces as they do in running text; what
    the context's tokens don't cover is the continuation. Spaces at the end of the context go to
    the continuation. The token that begins documents is put before the context if the tokenizer
    does so.

    Args:
      tokenizer: Of the model.
      context: May be empty; then that token takes its place.
      continuation: What is to be scored.

    Raises:
      ValueError: No token is left for the continuation.
    """
    kept = context.rstrip()
    ids = tokenizer.encode(kept) if kept else []
    whole = tokenizer.encode(context + continuation)
    if len(whole) <= len(ids):
        raise ValueError(
            f'The continuation {continuation!r} has no token of its own behind its context; '
            'expected text, usually with a space before it.'
        )
    prefix = [tokenizer.bos_id] if tokenizer.adds_bos or not ids else []
    return Request(prefix + ids, whole[len(ids) :])


def rolling_requests(ids: Sequence[int], *, prefix: int, max_length: int) -> list[Request]:
    """The requests that score a whole text, each of its tokens once.

    The first window is predicted from the prefix and each further one from the token before it;
    the last window, which may be shorter, is preceded by as many tokens as it leaves room for.
    These are the windows of lm-evaluation-harness.

    Args:
      ids: The tokens of the text.
      prefix: The token before it, such as the one that begins documents.
      max_length: The tokens that the model reads at most.
    """
    ids, requests = list(ids), []
    for start in range(0, len(ids), max_length):
        end = min(start + max_length, len(ids))
        context = ids[max(0, end - max_length - 1) : start]
        requests.append(Request(context or [prefix], ids[start:end]))
    return requests
