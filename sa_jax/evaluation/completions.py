"""What a model continues texts with: the prompts under its pattern, then token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from tqdm import tqdm

from sa_jax.evaluation.batches import plan_batches
from sa_jax.evaluation.scoring import Scorer
from sa_jax.models.generation import continuation_text, generate
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
    progress: bool = True,
) -> list[Completion]:
    """Continues prompts; new tokens attend to all before them, whatever the pattern of the prompt.

    What is drawn for a prompt depends on its place in the list only.

    Args:
      scorer: With the model, the size of batches and the draw of the permutations.
      tokenizer: Of the model.
      prompts: Texts. The token that begins documents is put before each if the tokenizer does so,
        and in the place of an empty one.
      max_new_tokens: Tokens to add at most. Of prompts that don't leave room for them the
        right-most tokens are kept.
      stop: Texts that end a continuation, as the tokenizer's `eos_id` does.
      temperature: Divides the logits; 0 takes the likeliest token.
      top_p: Draw among the likeliest tokens that together have this probability.
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
    encoded = [
        [tokenizer.bos_id, *ids] if tokenizer.adds_bos or not ids else ids for ids in encoded
    ]
    kept = [ids[-longest:] for ids in encoded]
    texts = [''] * len(prompts)
    names = ('attention', 'attention_options', 'layer_attention')
    pattern = {name: getattr(scorer.model.config, name) for name in names}
    batches = plan_batches(
        [len(ids) + max_new_tokens for ids in kept],
        tokens_per_batch=scorer.tokens_per_batch,
        longest=scorer.max_length,
    )
    with tqdm(
        total=len(prompts), desc='Completing', leave=False, disable=not progress or None
    ) as bar:
        for batch in batches:
            continuations = generate(
                scorer.model,
                [kept[member] for member in batch.members],
                max_new_tokens=max_new_tokens,
                tokenizer=tokenizer,
                prefill_attention=pattern,
                temperature=temperature,
                top_p=top_p,
                stop=stop,
                key=jax.random.key(_SEED),
                permutation_key=scorer.permutation_key,
                example_ids=batch.members,
            )
            for member, ids in zip(batch.members, continuations, strict=True):
                texts[member] = continuation_text(tokenizer, kept[member], ids, stop)
            bar.update(len(batch.members))
    return [
        Completion(text, len(kept_ids), len(ids) - len(kept_ids))
        for text, kept_ids, ids in zip(texts, kept, encoded, strict=True)
    ]
