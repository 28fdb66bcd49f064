"""A sweep of attention patterns over tasks, for a model whose weights stay as they are.

A cell is a task under a pattern at an effective window with a draw of the permutations. Each
finished cell is a file, and a sweep that was stopped goes on behind the last of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from sa_jax.benchmarks.training_free_settings import Cell, Sweep
from sa_jax.data.speech_tasks import write_speech_tasks
from sa_jax.evaluation.named_tasks import NamedTask, TaskOptions
from sa_jax.evaluation.scoring import Scorer
from sa_jax.models.pretrained import Pretrained
from sa_jax.models.pretrained.fingerprint import fingerprint
from sa_jax.training.files import write_atomically
from sa_jax.training.results import describe_device, git_revision, versions
from sa_jax.untrusted import read_json

# Stands for a folder of tasks.
SPEECHES = 'sotu'


class SweepError(ValueError):
    """A sweep can't be scored or reported here."""


def load_tasks(
    sweep: Sweep, task_data: str | None, workdir: Path, *, confirm_run_unsafe_code: bool = False
) -> dict[str, NamedTask]:
    """The tasks of a sweep, by name.

    Args:
      sweep: The settings.
      task_data: The folder of local task files; 'sotu' for tasks that are made from the default
        corpus, into the workdir; None for tasks of lm-evaluation-harness.
      workdir: Where files are kept.
      confirm_run_unsafe_code: That programs of the model may be run on this machine.

    Raises:
      ValueError: A task doesn't exist or is damaged, would run programs unconfirmed, or has no
        continuations to decode.
      RuntimeError: Programs can't be confined here.
      ImportError: A package is missing.
    """
    folder = None if task_data is None else Path(task_data).expanduser()
    if task_data == SPEECHES:
        folder = workdir / 'tasks'
        write_speech_tasks(folder)
    options = TaskOptions(
        limit=sweep.limit,
        num_shots=sweep.num_shots,
        text_window=sweep.text_window,
        text_limit=sweep.text_limit,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
    )
    tasks = {name: NamedTask(name, folder, options) for name in sweep.tasks}
    texts = [name for name, task in tasks.items() if task.is_text]
    if texts and sweep.continuation == 'decode':
        raise ValueError(
            f'{", ".join(texts)}: in a text everything follows the first token, so that with '
            "continuation = 'decode' every pattern is full attention; leave it out."
        )
    return tasks


def run_sweep(
    sweep: Sweep, tasks: Mapping[str, NamedTask], pretrained: Pretrained, workdir: Path
) -> None:
    """Scores the cells that aren't scored yet, each into a file under `workdir/cells`.

    Args:
      sweep: The settings.
      tasks: Of `load_tasks`.
      pretrained: The model.
      workdir: Where files are kept.

    Raises:
      SweepError: The workdir has cells of another model or other settings, which the message names,
        or a damaged one; or the model has no tokenizer, can't have a pattern, or can't be asked a
        task.
    """
    model, tokenizer, context_length = pretrained
    if tokenizer is None:
        raise SweepError('The model has no tokenizer; put its tokenizer.json beside its weights.')
    settings = {
        'model': fingerprint(pretrained),
        'dtype': model.config.compute_dtype,
        **sweep.fixed_settings(),
    }
    cells = sweep.cells()
    try:
        for task in tasks.values():
            task.check(tokenizer, context_length)
        models = {cell.matched: model.with_config(**sweep.changes(cell)) for cell in cells}
    except ValueError as error:
        raise SweepError(str(error)) from error
    (workdir / 'cells').mkdir(parents=True, exist_ok=True)
    records = _read(workdir, settings, {name: task.fingerprint for name, task in tasks.items()})
    seconds = {cell: record['seconds'] for cell, record in records.items()}
    todo = [cell for cell in cells if cell not in seconds]
    num_done = len(cells) - len(todo)
    with tqdm(
        total=len(cells),
        initial=num_done,
        bar_format='{desc} |{bar}| {n_fmt} of {total_fmt}{postfix}',
        dynamic_ncols=True,
        disable=None,
    ) as bar:
        for number, cell in enumerate(todo, 1):
            bar.set_description_str(str(cell))
            start = time.monotonic()
            scorer = Scorer(
                models[cell.matched],
                max_length=context_length,
                tokens_per_batch=sweep.tokens_per_batch,
                draw=cell.draw,
                continuation=sweep.continuation,
            )
            scores = tasks[cell.task].evaluate(
                scorer,
                tokenizer,
                effective_windows=sweep.effective_windows,
                progress=sys.stderr.isatty(),
            )
            seconds[cell] = time.monotonic() - start
            record = {
                **cell._asdict(),
                'model': _describe_model(pretrained),
                'attention_options': models[cell.matched].config.attention_options.unfreeze(),
                **scores,
                'num_shots': tasks[cell.task].num_shots,
                'seconds': seconds[cell],
                'settings': settings | {'task': tasks[cell.task].fingerprint},
                'git_revision': git_revision(),
                'versions': versions(),
                'device': describe_device(),
            }
            text = json.dumps(record, indent=1)
            write_atomically(workdir / 'cells' / cell.file_name, text + '\n')
            left = _describe_left(todo[number:], seconds)
            bar.update()
            bar.set_postfix_str(left)
            bar.write(f'{num_done + number} of {len(cells)}: {cell}: {_metrics(scores)}; {left}')


def read_figures(sweep: Sweep, workdir: Path) -> dict[str, Any]:
    """What is known of a sweep.

    Returns:
      `model`, what it is; `cells`, the records of those that are finished, in the sweep's order;
      `missing`, the number of the others.

    Raises:
      SweepError: The cells have other settings, aren't all of one model, are damaged, or none is
        finished.
    """
    settings = sweep.fixed_settings()
    records = _read(workdir, settings)
    if records:
        first = next(iter(records.values()))['settings']
        records = _read(workdir, settings | {name: first[name] for name in ('model', 'dtype')})
    cells = sweep.cells()
    found = [records[cell] for cell in cells if cell in records]
    if not found:
        raise SweepError(f'{workdir} has no finished cell of this sweep; leave out --report_only.')
    return {'model': found[0]['model'], 'cells': found, 'missing': len(cells) - len(found)}


def _describe_model(pretrained: Pretrained) -> dict[str, Any]:
    leaves = jax.tree.leaves(nnx.state(pretrained.model))
    return {
        'parameters': sum(leaf.size for leaf in leaves),
        'layers': pretrained.model.config.num_layers,
        'context_length': pretrained.context_length,
        'dtype': pretrained.model.config.compute_dtype,
    }


def _read(
    workdir: Path, settings: Mapping[str, Any], tasks: Mapping[str, str] | None = None
) -> dict[Cell, dict[str, Any]]:
    """All records, once their settings, and those tasks' fingerprints, are as expected."""
    records = {}
    for path in sorted((workdir / 'cells').glob('*.json')):
        try:
            record = read_json(path)
            cell = Cell(*(record[name] for name in Cell._fields))
            found = dict(record['settings'])
            _ = float(record['seconds']), dict(record['metrics'])
            if cell.file_name != path.name:
                raise ValueError(f'it holds {cell.file_name}')
        except (ValueError, KeyError, TypeError) as error:
            raise SweepError(
                f'{path} is damaged ({error!r}); delete it to score it anew.'
            ) from error
        expected = dict(settings)
        if tasks and cell.task in tasks:
            expected['task'] = tasks[cell.task]
        differences = [
            f'{name}: {found.get(name)!r} -> {value!r}'
            for name, value in expected.items()
            if found.get(name) != value
        ]
        if differences:
            raise SweepError(
                f'{path} has other settings; choose another --workdir, or repeat the command that '
                'wrote it. Different are\n  ' + '\n  '.join(differences)
            )
        records[cell] = record
    return records


def _describe_left(todo: Sequence[Cell], seconds: Mapping[Cell, float]) -> str:
    """How long the other cells take, by those of the same task."""
    if not todo:
        return 'done'
    by_task: dict[str, list[float]] = {}
    for cell, value in seconds.items():
        by_task.setdefault(cell.task, []).append(value)
    every = list(seconds.values())
    left = sum(float(np.median(by_task.get(cell.task, every))) for cell in todo)
    return f'about {left / 60:.0f} min left' if left > 90 else f'about {left:.0f} s left'


def _metrics(scores: Mapping[str, Any]) -> str:
    return ', '.join(f'{name} {x["value"]:.4g}' for name, x in scores['metrics'].items())
