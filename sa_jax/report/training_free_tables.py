"""Tables of training-free sweeps, from their result files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sa_jax.evaluation.patterns import mean_visible_keys
from sa_jax.report import markdown, paper
from sa_jax.report.training_free_scores import MEAN, Difference, Score, Scores

NOT_MEASURED = 'not measured'
LABELS = {
    'full': 'full',
    'swa': 'SWA',
    'sa': 'SA',
    'partition': 'SA, partition',
    'local_sa': 'SA ∪ SWA',
    'moba': 'MoBA',
}
# Against which patterns stochastic ones are held.
_STOCHASTIC, _RIVALS = ('sa', 'partition', 'local_sa'), ('swa', 'moba', 'full')
_PAPERS = ('full', 'swa', 'moba', 'sa')
_PROMISED_TOKENS = 1 << 20  # a sequence so long that its ends don't matter


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables in Markdown, one model after another, the paper's figures at the end.

    Args:
      results: Of the training-free experiment, one for each model.
    """
    parts = ['# Training-free attention patterns']
    for result in results:
        scores = Scores(result)
        parts += [
            f'## {scores.model}\n\n{_preface(result, scores)}',
            _accuracies(scores),
            _perplexities(scores),
            _differences(scores),
            _prompts(scores),
            _visible_keys(scores, result['config']),
        ]
    parts.append(_beside_paper(results))
    return '\n\n'.join(part for part in parts if part) + '\n'


def label(pattern: str) -> str:
    """A pattern's name for readers."""
    return LABELS.get(pattern, pattern)


def scale_label(result: Mapping[str, Any]) -> str:
    """How large the model is, and how much it was asked."""
    parameters = result['figures']['model']['parameters']
    size = f'{parameters / 1e9:.2f}B' if parameters >= 1e9 else f'{parameters / 1e6:.1f}M'
    limit = result['config']['limit']
    items = 'all items' if limit is None else f'at most {limit:,} items a task'
    return f'{size} parameters, {items}'


def _preface(result: Mapping[str, Any], scores: Scores) -> str:
    config, device = result['config'], result['device']
    host = device['host'] if device['platform'] == 'cpu' else device['kind']
    own = 'none' if config['task_data'] else "the task's own number"
    facts = [
        scale_label(result),
        result['figures']['model']['dtype'],
        f'solved items before each: {own if config["num_shots"] is None else config["num_shots"]}',
        f'{config["draws"]} draws of the permutations, scope: {config["permutation_scope"]}',
        f'on {host}',
    ]
    if config['num_sinks']:
        facts.append(f'the first {config["num_sinks"]} tokens visible from everywhere')
    if config['full_layers']:
        facts.append(f'full attention in the layers {", ".join(config["full_layers"])}')
    scored = (
        'A continuation is scored in one pass with its prompt, under the same pattern.'
        if config['continuation'] == 'prefill'
        else 'The prompt is read under the pattern; a continuation attends to all before it.'
    )
    lines = [
        '; '.join(facts) + '.',
        scored + ' ± is the sample standard deviation over the draws.',
    ]
    errors = [
        score.stderr
        for column in scores.columns()
        for task in scores.accuracies
        if (score := scores.accuracy(task, *column)) and score.stderr is not None
    ]
    if errors:
        lines.append(
            f'The standard error over the items is up to {max(errors):.1f} points in a task.'
        )
    lines += [
        f'No accuracy or perplexity is known of {task}, whose metrics are {", ".join(metrics)}.'
        for task, metrics in scores.unknown.items()
    ]
    minutes = sum(cell['seconds'] for cell in result['figures']['cells']) / 60
    lines.append(f'Scoring took {minutes:,.0f} min.')
    missing = result['figures']['missing']
    if missing:
        lines.append(f'Unfinished: {missing} cells are {NOT_MEASURED}.')
    return '\n'.join(lines)


def _accuracies(scores: Scores) -> str:
    if not scores.accuracies:
        return ''
    tasks = [*scores.accuracies, *([MEAN] if len(scores.accuracies) > 1 else [])]
    rows = [
        [
            f'{task} ({scores.accuracies[task]})' if task != MEAN else f'**{MEAN}**',
            *(_score(scores.accuracy(task, *column)) for column in scores.columns()),
        ]
        for task in tasks
    ]
    return '### Accuracy, %, by effective window\n\n' + _by_column(scores, rows)


def _perplexities(scores: Scores) -> str:
    rows = [
        [
            task if metric == 'perplexity' else f'{task} ({metric})',
            *(_score(scores.perplexity(task, *column), _digits) for column in scores.columns()),
        ]
        for task, metric in scores.perplexities.items()
    ]
    if not rows:
        return ''
    return '### Perplexity, by effective window\n\n' + _by_column(scores, rows)


def _by_column(scores: Scores, rows: list[list[str]]) -> str:
    header = [
        label(pattern) if window is None else f'{label(pattern)} {window}'
        for pattern, window in scores.columns()
    ]
    return markdown.table(['task', *header], *rows)


def _differences(scores: Scores) -> str:
    """Stochastic patterns against the others, on the same items."""
    pairs = [
        (pattern, rival)
        for pattern in _STOCHASTIC
        for rival in _RIVALS
        if {pattern, rival} <= set(scores.patterns)
    ]
    tasks = [*scores.accuracies, *([MEAN] if len(scores.accuracies) > 1 else [])]
    rows = [
        (
            [task, f'{label(pattern)} − {label(rival)}, points'],
            [
                _cell(scores.accuracy_difference(task, pattern, rival, n), _points)
                for n in scores.windows
            ],
        )
        for task in tasks
        for pattern, rival in pairs
    ] + [
        (
            [task, f'{label(pattern)} / {label(rival)}, perplexity'],
            [
                _cell(scores.perplexity_ratio(task, pattern, rival, n), _ratio)
                for n in scores.windows
            ],
        )
        for task in scores.perplexities
        for pattern, rival in pairs
    ]
    rows = [names + cells for names, cells in rows if set(cells) != {NOT_MEASURED}]
    if not rows:
        return ''
    note = (
        'The mean over the draws, ± its standard error, over items (the same for both) and draws. '
        'The spread of a single draw is not known and not in it.'
    )
    header = ['task', 'what', *map(str, scores.windows)]
    title = '### Stochastic attention against others, by effective window'
    return f'{title}\n\n{note}\n\n{markdown.table(header, *rows, texts=2)}'


def _prompts(scores: Scores) -> str:
    """How long the items are beside the windows."""
    rows = []
    for task in _tasks(scores):
        facts = scores.prompts(task)
        shares = [facts['share_longer'].get(str(n)) for n in scores.windows]
        rows.append(
            [
                task,
                _cell(facts['num_items'], '{:,}'.format),
                '–' if facts['num_shots'] is None else str(facts['num_shots']),
                _cell(facts['mean_tokens'], '{:.0f}'.format),
                *(_cell(share, lambda x: f'{100 * x:.0f}') for share in shares),
                _cell(facts['num_truncated'], '{:,}'.format),
                _cell(facts['num_dropped'], '{:,}'.format),
            ]
        )
    header = ['task', 'items', 'solved before each', 'tokens, mean']
    header += [*(f'> {n}, %' for n in scores.windows), 'requests cut', 'tokens cut']
    note = (
        'Tokens that the model reads of an item (for tasks of the harness, of a request) or of a '
        'window of text, and how many of these are longer than an effective window. – is not '
        'known, or differs within a group of tasks.'
    )
    return f'### Lengths\n\n{note}\n\n{markdown.table(header, *rows)}'


def _visible_keys(scores: Scores, config: Mapping[str, Any]) -> str:
    """The true mean of the keys that a query sees."""
    lengths = {task: scores.prompts(task)['mean_tokens'] for task in _tasks(scores)}
    places = [(f'{task}, {n:.0f} tokens', round(n)) for task, n in lengths.items() if n]
    places.append(('a very long text', _PROMISED_TOKENS))
    rows = [
        [
            where,
            label(pattern),
            *(
                f'{mean_visible_keys(pattern, window, n, num_sinks=config["num_sinks"]):.1f}'
                for window in scores.windows
            ),
        ]
        for where, n in places
        for pattern in scores.patterns
        if pattern != 'full'
    ]
    note = 'Expected over the permutations; a query near the beginning has fewer keys to see.'
    if config['full_layers']:
        note += f' In the layers {", ".join(config["full_layers"])} it sees all before it.'
    header = ['where', 'pattern', *map(str, scores.windows)]
    title = '### Keys that a query sees on average, by effective window'
    return f'{title}\n\n{note}\n\n{markdown.table(header, *rows, texts=2)}'


def _beside_paper(results: Sequence[Mapping[str, Any]]) -> str:
    """The paper's figures, each followed by ours for the same task and window."""
    every = [(Scores(result), scale_label(result)) for result in results]
    places: dict[tuple[str, int], list[list[str]]] = {}
    for (model, task, window), theirs in paper.TRAINING_FREE.items():
        what = f'{MEAN} of {len(paper.TRAINING_FREE_TASKS)} tasks' if task == MEAN else task
        row = ['the paper', model, str(window), what]
        row += ['–' if x is None else f'{x:.1f}' for x in theirs]
        places.setdefault((task, window), []).append(row)
    rows = []
    for (task, window), theirs in places.items():
        rows += theirs
        for scores, scale in every:
            if task != MEAN and task not in scores.accuracies:
                continue
            ours = [
                scores.accuracy(task, name, None if name == 'full' else window) for name in _PAPERS
            ]
            if not any(ours[1:]):
                continue
            what = f'{MEAN} of {", ".join(scores.accuracies)}' if task == MEAN else task
            row = ['ours', f'{scores.model}: {scale}', str(window), what]
            rows.append(row + [_score(score) for score in ours])
    header = ['from', 'model', 'w_eff', 'what']
    header += ['MoBA k=2' if name == 'moba' else label(name) for name in _PAPERS]
    note = (
        'Accuracy, %. The paper does not say what an effective window is, nor which metric of a '
        'task is meant; ours are named above. – is not known here.'
    )
    title = "## Beside the paper's Tables 4 and 5"
    return f'{title}\n\n{note}\n\n{markdown.table(header, *rows, texts=4)}'


def _tasks(scores: Scores) -> list[str]:
    return list(dict.fromkeys([*scores.accuracies, *scores.perplexities]))


def _score(score: Score | None, digits: Callable[[float], int] = lambda _: 1) -> str:
    if score is None:
        return NOT_MEASURED
    places = digits(score.value)
    text = f'{score.value:,.{places}f}'
    return text if score.spread is None else f'{text} ± {score.spread:,.{places}f}'


def _points(difference: Difference) -> str:
    return f'{difference.value:+.1f} ± {difference.stderr:.1f}'.replace('-', '−')


def _ratio(ratio: Difference) -> str:
    places = _digits(ratio.value)
    return f'{ratio.value:,.{places}f} ± {ratio.stderr:,.{places}f}'


def _digits(value: float) -> int:
    """Decimals of a perplexity or a ratio: four digits of most, all of large ones."""
    return 2 if value < 100 else 1 if value < 1000 else 0


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    return NOT_MEASURED if value is None else form(value)
