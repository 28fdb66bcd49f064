r"""Scores a trained model on tasks that it wasn't trained for: the columns of Table 1.

    python -m experiments.zero_shot --checkpoint=runs/paper_360m --workdir=runs/zero_shot \
        --tasks=wikitext,lambada_openai,lambada_standard,piqa,hellaswag,winogrande,arc_easy

The checkpoint is a run's workdir, or what load_pretrained reads: a directory, a GGUF file, a
repository of the hub. Tasks are those of lm-evaluation-harness, or with --task_data=FOLDER local
files NAME.jsonl and NAME.txt. A model that permutes is scored under several draws.
"""

import math
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from sa_jax.evaluation.named_tasks import NamedTask, TaskOptions
from sa_jax.evaluation.scoring import Scorer
from sa_jax.models.decoder import Decoder
from sa_jax.models.pretrained import Pretrained, load_pretrained
from sa_jax.report import markdown
from sa_jax.training.restore import is_run, load_run
from sa_jax.training.results import write_result

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, "A run's workdir, or files.", required=True)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Receives result.json, zero_shot.md.', required=True
)
_TASKS = flags.DEFINE_list('tasks', None, 'Their names.', required=True)
_TASK_DATA = flags.DEFINE_string('task_data', None, 'Folder of local task files.')
_LIMIT = flags.DEFINE_integer('limit', None, 'Items of a task at most.', lower_bound=1)
_TEXT_WINDOW = flags.DEFINE_integer('text_window', 512, "Tokens of a text's window.")
_DRAWS = flags.DEFINE_integer('draws', 4, 'Of the permutations.', lower_bound=1)
_STEP = flags.DEFINE_integer('step', None, "Of the run's checkpoint; by default the latest.")
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'Of files only.')
_TOKENS_PER_BATCH = flags.DEFINE_integer('tokens_per_batch', 16384, 'Padding included.')
_DATA_DIR = flags.DEFINE_string(
    'data_dir', '~/.cache/sa_jax', 'Keeps built corpora and trained tokenizers.'
)


def load() -> Pretrained:
    """The model that --checkpoint names."""
    path = Path(_CHECKPOINT.value).expanduser()
    if is_run(path):
        return load_run(path, Path(_DATA_DIR.value).expanduser(), step=_STEP.value)
    return load_pretrained(_CHECKPOINT.value, dtype=_DTYPE.value)


def permutes(model: Decoder) -> bool:
    """Whether an attention path of a model draws permutations: it refuses to run without a key."""
    try:
        jax.eval_shape(lambda: model(jnp.zeros((1, 1), jnp.int32)).logits)
    except ValueError:
        return True
    return False


def over_draws(draws: list[dict]) -> dict:
    """A task's metrics over draws: the mean, their spread, and the standard error over items."""
    metrics = {}
    for name, first in draws[0]['metrics'].items():
        values = [draw['metrics'][name]['value'] for draw in draws]
        metrics[name] = {
            'value': statistics.fmean(values),
            'std': statistics.stdev(values) if len(values) > 1 else None,
            'stderr': first['stderr'],
        }
    kept = ('num_items', 'mean_tokens', 'num_truncated', 'num_dropped')
    return {'metrics': metrics, 'draws': len(draws)} | {name: draws[0][name] for name in kept}


def table(figures: dict) -> str:
    """The figures in Markdown."""
    rows = []
    for task, result in figures.items():
        for name, x in result['metrics'].items():
            numbers = [x['value'], x['std'], x['stderr']]
            cells = ['' if y is None or math.isnan(y) else f'{y:.4g}' for y in numbers]
            rows.append([task, name, *cells, str(result['num_items'] or '')])
    header = ['task', 'metric', 'value', 'over draws', 'error, items', 'items']
    return markdown.table(header, *rows, texts=2) + '\n'


def main(argv: list[str]) -> None:
    """Scores all tasks, and writes and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    # Below warnings, Orbax reports every file it reads.
    logging.set_verbosity(logging.WARNING)
    folder = _TASK_DATA.value and Path(_TASK_DATA.value).expanduser()
    try:
        options = TaskOptions(
            limit=_LIMIT.value, text_limit=_LIMIT.value, text_window=_TEXT_WINDOW.value
        )
        tasks = {name: NamedTask(name, folder, options) for name in _TASKS.value}
        model, tokenizer, length = load()
        if tokenizer is None:
            raise ValueError('The model has no tokenizer; put its tokenizer.json beside it.')
        for task in tasks.values():
            task.check(tokenizer, length)
    except (ImportError, RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from None
    figures = {}
    for name, task in tasks.items():
        draws = []
        for draw in range(_DRAWS.value if permutes(model) else 1):
            scorer = Scorer(
                model, max_length=length, tokens_per_batch=_TOKENS_PER_BATCH.value, draw=draw
            )
            draws.append(task.evaluate(scorer, tokenizer, progress=sys.stderr.isatty()))
        figures[name] = over_draws(draws)
        print(table({name: figures[name]}), flush=True)
    workdir = Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    write_result(
        workdir / 'result.json',
        config={'checkpoint': Path(_CHECKPOINT.value).name, 'limit': _LIMIT.value},
        figures=figures,
        seeds={'permutations': list(range(_DRAWS.value))},
    )
    (workdir / 'zero_shot.md').write_text(table(figures))


if __name__ == '__main__':
    app.run(main)
