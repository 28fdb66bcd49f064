"""Models out of the checkpoints of runs, and into them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from sa_jax.models.pretrained import Pretrained
from sa_jax.training.checkpoints import Checkpoints
from sa_jax.training.configuration import to_json
from sa_jax.training.inputs import Inputs, load_inputs
from sa_jax.training.program import Program, build_program
from sa_jax.training.step import TrainState
from sa_jax.training.workdir import check_workdir, claim_workdir, locked
from sa_jax.untrusted import damage_reported, read_json


def is_run(path: Path) -> bool:
    """Whether a directory is the workdir of a run."""
    return (path / 'config.json').is_file() and (path / 'checkpoints').is_dir()


def load_run(workdir: Path, data_dir: Path, *, step: int | None = None) -> Pretrained:
    """Loads the model of a run from a checkpoint, onto one device; for the rest see `open_run`."""
    program, state, inputs = open_run(workdir, data_dir, step=step)
    model = nnx.merge(program.graph, state.params)
    return Pretrained(model, inputs.tokenizer, program.config.data.sequence_length)


def open_run(
    workdir: Path, data_dir: Path, *, step: int | None = None
) -> tuple[Program, TrainState, Inputs]:
    """Opens a checkpoint of a run, on one device, with the text that the run reads.

    Args:
      workdir: of the run.
      data_dir: where built corpora and trained tokenizers are kept.
      step: which checkpoint; None for the latest.

    Raises:
      ValueError: if there is no such run or checkpoint, it is damaged, or its text or tokenizer
        can't be had.
    """
    if not is_run(workdir):
        raise ValueError(
            f'{workdir} is no workdir of a run; expected config.json and checkpoints/ in it.'
        )
    path = workdir / 'config.json'
    with damage_reported(path):
        config = ConfigDict(read_json(path))
        config.mesh = {'data': 1, 'fsdp': 1, 'tensor': 1}
        program = build_program(config, jax.local_devices()[:1])
    with contextlib.closing(Checkpoints(workdir / 'checkpoints', keep=None)) as checkpoints:
        latest = checkpoints.latest_step()
        if latest is None or (step is not None and step not in checkpoints.steps()):
            raise ValueError(
                f'{checkpoints.directory} has no checkpoint of step {step or 0}; it has '
                f'{", ".join(map(str, checkpoints.steps())) or "none"}.'
            )
        step = latest if step is None else step
        if damage := checkpoints.find_damage(step):
            raise ValueError(
                f'{checkpoints.directory / str(step)} is damaged: {damage}; choose another step of '
                f'{", ".join(map(str, checkpoints.steps()))}.'
            )
        state, _ = checkpoints.restore(step, program.abstract_state)
    with damage_reported(path):
        return program, state, load_inputs(config, data_dir)


def begin_run(pretrained: Pretrained, config: ConfigDict, workdir: Path, data_dir: Path) -> None:
    """Begins a run with the parameters of a model: writes the checkpoint of step 0.

    Training with this configuration goes on from there.

    Args:
      pretrained: the model; its tokenizer has to be the configuration's.
      config: the run's configuration.
      workdir: of the run, which must not have begun.
      data_dir: where built corpora and trained tokenizers are kept.

    Raises:
      ValueError: if the model or the tokenizer is another than the configuration's, or a run has
        begun.
    """
    program = build_program(config)
    inputs = load_inputs(config, data_dir)
    fingerprint = pretrained.tokenizer and pretrained.tokenizer.fingerprint
    if inputs.tokenizer.fingerprint != fingerprint:
        raise ValueError(
            "The model's tokenizer is not the configuration's; set data.tokenizer.kind='file' and "
            "data.tokenizer.path to the model's directory."
        )
    check_workdir(workdir, config)
    params = nnx.to_pure_dict(nnx.state(pretrained.model))
    state = program.init()
    expected, found = (
        {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(x)}
        for x in (state.params, params)
    )
    if expected != found:
        names = sorted(x for x in expected | found if expected.get(x) != found.get(x))
        raise ValueError(
            f"The model's parameters don't fit the configuration: {', '.join(names[:20])} differ."
        )
    with (
        locked(workdir),
        contextlib.closing(
            Checkpoints(workdir / 'checkpoints', config.training.keep_checkpoints)
        ) as checkpoints,
    ):
        if checkpoints.latest_step() is not None:
            raise ValueError(f'{checkpoints.directory} holds a run already; choose another one.')
        claim_workdir(workdir, config)
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding),
            params,
            state.params,
        )
        data = inputs.training_batches().get_state()
        checkpoints.save(0, state._replace(params=placed), data, to_json(config))
