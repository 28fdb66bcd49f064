"""Tasks of EleutherAI's lm-evaluation-harness, with neither torch nor transformers."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from absl import logging

from sa_jax.evaluation.completions import complete
from sa_jax.evaluation.requests import Request, encode_request, rolling_requests
from sa_jax.evaluation.scoring import Scorer
from sa_jax.extras import optional_import
from sa_jax.tokenization.tokenizers import Tokenizer

# Imported one by one: what the package loads beyond these may need torch.
_model = optional_import('lm_eval.api.model', 'tasks of lm-evaluation-harness', 'eval')
_evaluator = optional_import('lm_eval.evaluator', 'tasks of lm-evaluation-harness', 'eval')
_tasks = optional_import('lm_eval.tasks', 'tasks of lm-evaluation-harness', 'eval')

# The harness's own defaults.
_SEED, _OTHER_SEED = 0, 1234
_MAX_NEW_TOKENS = 256
_BOOTSTRAP_DRAWS = 1000
# What tasks call the number of new tokens.
_LENGTH_OPTIONS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')


class Truncation(NamedTuple):
    """What was cut from the left because it didn't fit.

    Attributes:
      requests: How many of them were cut.
      tokens: How many were dropped.
    """

    requests: int
    tokens: int


class HarnessLM(_model.TemplateLM):
    """A model as the harness calls it.

    Attributes:
      truncation: What was cut so far.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        *,
        full_decoding: bool = True,
        add_bos: bool = False,
        progress: bool = True,
    ):
        """Wraps a model.

        Args:
          scorer: With the model, its pattern and the draw of the permutations.
          tokenizer: Of the model.
          full_decoding: Whether generated tokens attend to all before them, as for `complete`.
          add_bos: Whether every text begins with the token that begins documents; some models were
            trained so.
          progress: Whether to show bars on standard error.
        """
        super().__init__()
        self.truncation = Truncation(0, 0)
        self._scorer = scorer
        self._text_tokenizer = tokenizer
        self._full_decoding = full_decoding
        self._add_bos = add_bos
        self._progress = progress

    @property
    def max_length(self) -> int:
        """The tokens that the model reads at most."""
        return self._scorer.max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends documents."""
        return self._text_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before what has no context: the one that begins documents."""
        return self._text_tokenizer.bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The tokens of a text."""
        del kwargs
        add_bos = self._add_bos if add_special_tokens is None else add_special_tokens
        return [self.prefix_token_id] * add_bos + self._text_tokenizer.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        request = encode_request(self._text_tokenizer, context, continuation, add_bos=self._add_bos)
        return tuple(request)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        scores = self._scorer.score(
            [Request(context, continuation) for _, context, continuation in requests],
            progress=self._progress and not disable_tqdm,
        )
        self._count(score.num_dropped for score in scores)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log probabilities of whole texts, in disjoint windows."""
        windows = [
            rolling_requests(
                self._text_tokenizer.encode(request.args[0]),
                prefix=self.prefix_token_id,
                max_length=self.max_length,
            )
            for request in requests
        ]
        scores = iter(
            self._scorer.score(
                [window for of_text in windows for window in of_text],
                progress=self._progress and not disable_tqdm,
            )
        )
        return [sum(next(scores).log_probability for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues prompts as their options say.

        Raises:
          ValueError: An option isn't known.
        """
        texts = [''] * len(requests)
        groups: dict[tuple, list[int]] = {}
        for index, request in enumerate(requests):
            options = tuple(sorted(_generation_options(request.args[1]).items()))
            groups.setdefault(options, []).append(index)
        for options, members in groups.items():
            completions = complete(
                self._scorer,
                self._text_tokenizer,
                [requests[index].args[0] for index in members],
                **dict(options),
                full_decoding=self._full_decoding,
                add_bos=self._add_bos,
                progress=self._progress and not disable_tqdm,
            )
            self._count(completion.num_dropped for completion in completions)
            for index, completion in zip(members, completions, strict=True):
                texts[index] = completion.text
        return texts

    def _count(self, num_dropped) -> None:
        cut = [dropped for dropped in num_dropped if dropped]
        if cut:
            logging.warning(
                'Cut %d tokens from the left of %d requests, which are longer than the %d that '
                'the model reads.',
                sum(cut),
                len(cut),
                self.max_length,
            )
        requests, tokens = self.truncation
        self.truncation = Truncation(requests + len(cut), tokens + sum(cut))


def evaluate_tasks(
    models: Sequence[HarnessLM],
    tasks: Sequence[str | Mapping[str, Any]],
    *,
    limit: int | None = None,
    num_shots: int | None = None,
    task_folder: str | os.PathLike | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluates tasks of the harness, once for each draw of the permutations.

    Args:
      models: The same model under one draw each; a single one where nothing is permuted.
      tasks: Names of tasks, groups or tags, or configurations.
      limit: The first items of each task only; None for all.
      num_shots: Solved examples before each item; None for the task's own number.
      task_folder: Where to look for further tasks, in the harness's YAML.

    Returns:
      By task or group `metrics` and `num_items` (None for a group). A metric has its `mean` and
      sample standard deviation `std` over the draws (None for a single one), the `values` of the
      draws, and `stderr`, the standard error over the items, of the first draw (None where the
      harness gives none).

    Raises:
      ValueError: There is no model or task, or a task runs programs.
    """
    if not models or not tasks:
        raise ValueError(
            f'Expected at least one model and task, got {len(models)} and {len(tasks)}.'
        )
    manager = _tasks.TaskManager(include_path=task_folder)
    drawn = [_evaluate(model, manager, tasks, limit, num_shots) for model in models]
    results = {}
    for name, first in drawn[0].items():
        metrics = {}
        for key, value in first.items():
            metric, _, variant = key.partition(',')
            if not variant or metric.endswith('_stderr') or not isinstance(value, int | float):
                continue
            values = [float(of_draw[name][key]) for of_draw in drawn]
            stderr = first.get(f'{metric}_stderr,{variant}')
            metrics[metric if variant == 'none' else key] = {
                'mean': float(np.mean(values)),
                'std': float(np.std(values, ddof=1)) if len(values) > 1 else None,
                'values': values,
                'stderr': float(stderr) if isinstance(stderr, int | float) else None,
            }
        results[name] = {'metrics': metrics, 'num_items': first['num_items']}
    return results


def _evaluate(model, manager, tasks, limit, num_shots) -> dict[str, dict[str, Any]]:
    """The harness's figures of one model, by task and group.

    Its `simple_evaluate` does the same, but also imports torch where that is installed.
    """
    random.seed(_SEED)
    np.random.seed(_OTHER_SEED)  # noqa: NPY002
    loaded = manager.load(list(tasks))
    for name, task in loaded['tasks'].items():
        if getattr(task, 'UNSAFE_CODE', False):
            raise ValueError(
                f'{name} runs programs that the model writes, which is not done within the '
                'harness; for HumanEval use sa_jax.evaluation.programs.'
            )
        own = task.get_config('num_fewshot')
        # A task that says 0 can't have any.
        if num_shots is not None and own != 0:
            task.set_config('num_fewshot', num_shots)
        elif own is None:
            task.set_config('num_fewshot', 0)
        task.set_fewshot_seed(_OTHER_SEED)
    # Its bootstrap would fork this process, with all threads of JAX.
    with mock.patch.dict(os.environ, DISABLE_MULTIPROC='1'):
        found = _evaluator.evaluate(
            model,
            loaded,
            limit=limit,
            bootstrap_iters=_BOOTSTRAP_DRAWS,
            log_samples=False,
        )
    counts = found['n-samples']
    return {
        name: {**metrics, 'num_items': counts[name]['effective'] if name in counts else None}
        for name, metrics in (found['results'] | found.get('groups', {})).items()
    }


def _generation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's options as those of `complete`."""
    options = dict(options)
    until = options.pop('until', None) or ()
    lengths = [options.pop(name) for name in _LENGTH_OPTIONS if name in options]
    do_sample = options.pop('do_sample', None)
    temperature = options.pop('temperature', None)
    if temperature is None:
        temperature = 1.0 if do_sample else 0.0
    elif do_sample is False:
        temperature = 0.0
    top_p = float(options.pop('top_p', None) or 1.0)
    if options:
        raise ValueError(
            f'Unknown options of generation: {", ".join(sorted(options))}; expected until, '
            'max_gen_toks, do_sample, temperature and top_p.'
        )
    return {
        'stop': (until,) if isinstance(until, str) else tuple(until),
        'max_new_tokens': int(lengths[0]) if lengths else _MAX_NEW_TOKENS,
        'temperature': float(temperature),
        'top_p': top_p,
    }
