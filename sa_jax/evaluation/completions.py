"""What a model continues texts with: the prompts under its pattern, then token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from sa_jax.evaluation.batches import plan_batches
from sa_jax.evaluation.scoring import Scorer
from sa_jax.models.decoder import Decoder
from sa_jax.models.generation import generate
from sa_jax.tokenization.tokenizers import Tokenizer

_SEED = 1


class Completion(NamedTuple):
    """The continuation of a prompt.

    Attributes:
      text: Without the text that stopped it.
      num_read: The prompt's tokens, but for those dropped.
      num_dropped: The tokens cut from the left because they didn't fit.
    """

    text: str
    num_read: int
    num_dropped: int


def complete(
    scorer: Scorer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    full_decoding: bool = True,
    add_bos: bool = False,
    progress: bool = True,
) -> list[Completion]:
    """Continues prompts.

    Args:
      scorer: With the model, the size of batches and the draw of the permutations.
      tokenizer: Of the model.
      prompts: Texts; an empty one is replaced by the token that begins documents.
      max_new_tokens: Tokens to add at most. Of prompts that don't leave room for them the
        right-most tokens are kept.
      stop: Texts that end a continuation, as the tokenizer's `eos_id` does.
      temperature: Divides the logits; 0 takes the likeliest token.
      top_p: Draw among the likeliest tokens that together have this probability.
      full_decoding: Whether new tokens attend to all before them, whatever the pattern of the
        prompt; otherwise the model's pattern holds for them as well.
      add_bos: Whether each prompt begins with the token that begins documents.
      progress: Whether to show a bar on standard error.

    Raises:
      ValueError: An argument is out of range, or no room is left for prompts.
    """
    longest = scorer.max_length - max_new_tokens
    if max_new_tokens < 1 or longest < 1:
        raise ValueError(
            f'max_new_tokens must be from 1 to {scorer.max_length - 1}, so that a model that reads '
            f'at most {scorer.max_length} tokens has room for a prompt; got {max_new_tokens}.'
        )
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    encoded = [[tokenizer.bos_id, *ids] if add_bos or not ids else ids for ids in encoded]
    kept = [ids[-longest:] for ids in encoded]
    texts = [''] * len(prompts)
    batches = plan_batches(
        [len(ids) + max_new_tokens for ids in kept],
        tokens_per_batch=scorer.tokens_per_batch,
        longest=scorer.max_length,
    )
    with tqdm(
        total=len(prompts), desc='Completing', leave=False, disable=not progress or None
    ) as bar:
        for number, batch in enumerate(batches):
            continuations = generate(
                scorer.model,
                [kept[member] for member in batch.members],
                max_new_tokens=max_new_tokens,
                tokenizer=tokenizer,
                prefill_attention=_pattern(scorer.model) if full_decoding else None,
                temperature=temperature,
                top_p=top_p,
                stop=stop,
                key=jax.random.fold_in(jax.random.key(_SEED), number),
                permutation_key=scorer.permutation_key,
            )
            for member, ids in zip(batch.members, continuations, strict=True):
                texts[member] = _cut(tokenizer.decode(ids), stop)
            bar.update(len(batch.members))
    return [
        Completion(text, len(kept_ids), len(ids) - len(kept_ids))
        for text, kept_ids, ids in zip(texts, kept, encoded, strict=True)
    ]


def _pattern(model: Decoder) -> dict[str, Any]:
    names = ('attention', 'attention_options', 'layer_attention')
    return {name: getattr(model.config, name) for name in names}


def _cut(text: str, stop: Sequence[str]) -> str:
    places = [text.find(end) for end in stop]
    return text[: min((place for place in places if place >= 0), default=len(text))]
