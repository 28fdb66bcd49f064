"""Tasks of EleutherAI's lm-evaluation-harness, with neither torch nor transformers."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from sa_jax.evaluation.completions import Completion, complete
from sa_jax.evaluation.requests import Request, encode_request, rolling_requests
from sa_jax.evaluation.scoring import Score, Scorer
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
      num_read: The tokens that the model read of each request so far.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        *,
        progress: bool = True,
    ):
        """Wraps a model.

        Args:
          scorer: With the model, its pattern and the draw of the permutations.
          tokenizer: Of the model.
          progress: Whether to show bars on standard error.
        """
        super().__init__()
        self.truncation = Truncation(0, 0)
        self.num_read: list[int] = []
        self._scorer = scorer
        self._text_tokenizer = tokenizer
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
        """The tokens of a text, behind the one that begins documents if the tokenizer adds it."""
        del kwargs
        add_bos = (
            self._text_tokenizer.adds_bos if add_special_tokens is None else add_special_tokens
        )
        return [self.prefix_token_id] * add_bos + self._text_tokenizer.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return tuple(encode_request(self._text_tokenizer, context, continuation))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        scores = self._scorer.score(
            [Request(context, continuation) for _, context, continuation in requests],
            progress=self._progress and not disable_tqdm,
        )
        self._count(scores)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log probabilities of whole texts, in disjoint windows.

        Raises:
          ValueError: Continuations are to be decoded, which a text has none of.
        """
        if self._scorer.continuation == 'decode':
            raise ValueError(
                "A text has no prompt: with continuation = 'decode' every pattern is full "
                "attention. Score it with 'prefill', or leave the task out."
            )
        windows = [
            rolling_requests(
                self.tok_encode(request.args[0]),
                prefix=self.prefix_token_id,
                max_length=self.max_length,
            )
            for request in requests
        ]
        scores = self._scorer.score(
            [window for of_text in windows for window in of_text],
            progress=self._progress and not disable_tqdm,
        )
        self._count(scores)
        scores = iter(scores)
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
                progress=self._progress and not disable_tqdm,
            )
            self._count(completions)
            for index, completion in zip(members, completions, strict=True):
                texts[index] = completion.text
        return texts

    def _count(self, results: Sequence[Score | Completion]) -> None:
        self.num_read += [result.num_read for result in results]
        cut = [result.num_dropped for result in results if result.num_dropped]
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


class LoadedTasks(NamedTuple):
    """Tasks of the harness with their items.

    Attributes:
      found: Tasks and groups as the harness gives them.
      num_shots: By task and group the solved examples before each item; None for a group whose
        tasks have different numbers.
    """

    found: Mapping[str, Any]
    num_shots: Mapping[str, int | None]

    @property
    def has_texts(self) -> bool:
        """Whether a task is the perplexity of whole texts."""
        return any(
            task.OUTPUT_TYPE == 'loglikelihood_rolling' for task in self.found['tasks'].values()
        )


def load_tasks(
    tasks: Sequence[str | Mapping[str, Any]],
    *,
    num_shots: int | None = None,
    task_folder: str | os.PathLike | None = None,
) -> LoadedTasks:
    """Loads tasks of the harness and their data.

    Args:
      tasks: Names of tasks, groups or tags, or configurations.
      num_shots: Solved examples before each item; None for the task's own number. Tasks that say 0
        keep it, which is logged.
      task_folder: Where to look for further tasks, in the harness's YAML.

    Raises:
      ValueError: There is no task, one runs programs, or one can't be loaded.
    """
    if not tasks:
        raise ValueError('No task is given; expected at least one.')
    _seed()
    try:
        found = _tasks.TaskManager(include_path=task_folder).load(list(tasks))
    except Exception as error:  # Of the harness, of the library datasets, or of the network.
        raise ValueError(
            f'lm-evaluation-harness cannot load {", ".join(map(str, tasks))}: {error!r}. Its data '
            'come from the hub; where that cannot be reached, use local files.'
        ) from error
    for name, task in found['tasks'].items():
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
        elif num_shots not in (None, own):
            logging.warning('%s takes no solved examples, instead of %d.', name, num_shots)
    return LoadedTasks(found, _num_shots(found))


def evaluate_tasks(
    models: Sequence[HarnessLM], tasks: LoadedTasks, *, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Evaluates tasks of the harness, once for each draw of the permutations.

    Args:
      models: The same model under one draw each; a single one where nothing is permuted.
      tasks: Of `load_tasks`; they can be evaluated again.
      limit: The first items of each task only; None for all.

    Returns:
      By task or group `metrics` and `num_items` (None for a group). A metric has its `mean` and
      sample standard deviation `std` over the draws (None for a single one), the `values` of the
      draws, and `stderr`, the standard error over the items, of the first draw (None where the
      harness gives none).

    Raises:
      ValueError: There is no model.
    """
    if not models:
        raise ValueError('No model is given; expected at least one.')
    drawn = [_evaluate(model, tasks.found, limit) for model in models]
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


def _evaluate(model, found, limit) -> dict[str, dict[str, Any]]:
    """The harness's figures of one model, by task and group.

    Its `simple_evaluate` does the same, but also imports torch where that is installed.
    """
    _seed()
    for task in found['tasks'].values():
        task.set_fewshot_seed(_OTHER_SEED)
    with _in_this_process():
        figures = _evaluator.evaluate(
            model,
            found,
            limit=limit,
            bootstrap_iters=_BOOTSTRAP_DRAWS,
            log_samples=False,
        )
    counts = figures['n-samples']
    return {
        name: {**metrics, 'num_items': counts[name]['effective'] if name in counts else None}
        for name, metrics in (figures['results'] | figures.get('groups', {})).items()
    }


def _seed() -> None:
    random.seed(_SEED)
    np.random.seed(_OTHER_SEED)  # noqa: NPY002


@contextlib.contextmanager
def _in_this_process() -> Iterator[None]:
    """Keeps the harness's bootstrap from forking this process, with all threads of JAX."""
    name = 'DISABLE_MULTIPROC'
    before = os.environ.get(name)
    os.environ[name] = '1'
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _num_shots(found) -> dict[str, int | None]:
    children = found.get('group_map', {})

    def numbers(name):
        if name in found['tasks']:
            return {found['tasks'][name].get_config('num_fewshot')}
        return set().union(*map(numbers, children.get(name, ())))

    of_all = {name: numbers(name) for name in (*found['tasks'], *children)}
    return {name: of.pop() if len(of) == 1 else None for name, of in of_all.items()}


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
