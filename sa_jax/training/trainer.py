"""The training loop: resume, step, record, evaluate, checkpoint."""

import collections
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from sa_jax.data.pipeline import TrainingIterator
from sa_jax.models.flops import training_flops_per_token
from sa_jax.training.checkpoints import Checkpoints
from sa_jax.training.configuration import to_json
from sa_jax.training.inputs import Inputs, load_inputs
from sa_jax.training.metrics import MetricsWriter, Progress, Throughput
from sa_jax.training.program import Program, build_program
from sa_jax.training.step import TrainState
from sa_jax.training.workdir import (
    check_workdir,
    claim_workdir,
    full_disk_reported,
    locked,
)


class NonFiniteError(FloatingPointError):
    """Training met a loss, gradient or parameter that is not a finite number."""


class StopOnSigterm:
    """While in context, turns SIGTERM into a request to stop after the step in progress."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> 'StopOnSigterm':
        self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _request(self, *_) -> None:
        self.requested = True


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has come to its end or was asked to stop.

    Attributes:
      program: what was compiled.
      inputs: what was read.
      state: the training state after the last step.
      checkpoint: the folder of the last checkpoint.
      finished: whether all steps are done.
      evaluated: whether the last step was done, and evaluated, just now.
    """

    program: Program
    inputs: Inputs
    state: TrainState
    checkpoint: Path
    finished: bool
    evaluated: bool


def train(
    config: ConfigDict,
    workdir: Path,
    data_dir: Path,
    *,
    stop: Any = None,
    devices: Sequence[jax.Device] | None = None,
) -> Run:
    """Trains, from the beginning or from where the workdir's last checkpoint left off.

    Everything that can be wrong with the configuration, the data or the workdir is checked
    before anything is compiled.

    Args:
      config: the run's configuration.
      workdir: receives config.json, metrics.jsonl, tensorboard/ and checkpoints/.
      data_dir: where built corpora and trained tokenizers are kept.
      stop: an object whose `requested` turns true when training shall save and return.
      devices: those to run on, by default all.

    Raises:
      ValueError: if the configuration doesn't fit itself, the devices, the data or the workdir.
      NonFiniteError: if a loss, gradient or parameter isn't finite; nothing is saved then.
      DiskFullError: if there is no space left in the workdir.
    """
    program = build_program(config, devices)
    inputs = load_inputs(config, data_dir)
    batches = inputs.training_batches()
    check_workdir(workdir, config)
    with (
        full_disk_reported(workdir),
        locked(workdir),
        contextlib.closing(
            Checkpoints(workdir / 'checkpoints', config.training.keep_checkpoints)
        ) as checkpoints,
    ):
        start, state = _start_or_resume(program, batches, checkpoints)
        claim_workdir(workdir, config)
        with contextlib.ExitStack() as stack:
            loop = _Loop(program, inputs, batches, checkpoints, workdir, start)
            stack.callback(loop.close)
            state, step = loop.run(state, start, stop)
        checkpoint = checkpoints.directory / str(step)
    finished = step == config.training.steps
    return Run(program, inputs, state, checkpoint, finished, evaluated=finished and step > start)


def _start_or_resume(
    program: Program, batches: TrainingIterator, checkpoints: Checkpoints
) -> tuple[int, TrainState]:
    """Returns the finished steps and the state to go on from."""
    checkpoints.set_damaged_aside()
    steps, latest = program.config.training.steps, checkpoints.latest_step()
    # 1. A new workdir, or one whose run was killed before its first checkpoint was complete.
    if latest is None:
        return 0, program.init()
    # 2. The run has gone further than it is now asked to: its model is not that of fewer steps.
    if latest > steps:
        raise ValueError(
            f'{checkpoints.directory} already holds step {latest}, but training.steps is {steps}: '
            f'ask for at least {latest}, or choose another --workdir.'
        )
    # 3. The run is unfinished: it continues. 4. It is finished: the loop has nothing to do.
    state, data = checkpoints.restore(latest, program.abstract_state)
    batches.set_state(data)
    print(f'Continuing from {checkpoints.directory / str(latest)}', file=sys.stderr, flush=True)
    return latest, state


class _Loop:
    """The loop and what it writes to."""

    def __init__(
        self,
        program: Program,
        inputs: Inputs,
        batches: TrainingIterator,
        checkpoints: Checkpoints,
        workdir: Path,
        start: int,
    ):
        config = program.config
        self._program, self._inputs, self._batches = program, inputs, batches
        self._checkpoints = checkpoints
        self._json_config = to_json(config)
        self._throughput = Throughput(
            training_flops_per_token(program.model_config, config.data.sequence_length),
            list(program.mesh.devices.flat),
        )
        # Metrics of dispatched steps not yet looked at, oldest first.
        self._pending: collections.deque = collections.deque()
        # How long the last checkpoint kept steps waiting, for the next record.
        self._saving: dict[str, float] = {}
        self._progress = self._writer = None
        if jax.process_index() == 0:
            project = config.get('logging', {}).get('wandb_project', '')
            self._writer = MetricsWriter(workdir, start, project, self._json_config)
            self._progress = Progress(start, config.training.steps)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
            self._progress.close()

    def run(self, state: TrainState, start: int, stop: Any) -> tuple[TrainState, int]:
        """Trains until the last step or a request to stop; returns the state and its step."""
        training = self._program.config.training
        if start == training.steps:
            return state, start
        compiled_step = self._program.compile_step()
        self._throughput.restart()
        for step in range(start + 1, training.steps + 1):
            with self._throughput.waiting(self._is_busy):
                batch = self._program.place_batch(next(self._batches))
            # An accidental copy between host and device in here would stall every step.
            with jax.transfer_guard('disallow'):
                state, metrics = compiled_step(state, batch)
            self._pending.append((step, metrics))
            last = step == training.steps
            stopping = self._stopping(stop, step)
            saves = last or stopping or step % training.checkpoint_every == 0
            evaluates = last or self._every(self._program.config.evaluation.every, step)
            logs = last or evaluates or step % training.log_every == 0
            # One step stays in flight while its predecessor is looked at, so that the device
            # never waits for the host; before anything is written down, all are looked at.
            metrics = self._settle(in_flight=0 if logs or saves else 1)
            if logs:
                self._record(step, metrics, state, draws=self._draws(evaluates, last))
            if saves:
                self._save(step, state)
            if stopping:
                break
        return state, step

    def _is_busy(self) -> bool:
        """Whether a dispatched step isn't finished."""
        return bool(self._pending) and not self._pending[-1][1]['loss'].is_ready()

    def _settle(self, in_flight: int) -> dict | None:
        """Waits for all but some steps; returns the metrics of the last one it waited for."""
        metrics = None
        while len(self._pending) > in_flight:
            step, metrics = self._pending.popleft()
            metrics = jax.device_get(metrics)
            self._check_finite(step, metrics)
            self._throughput.add(float(metrics['tokens']))
            if self._progress:
                self._progress.advance()
        return metrics

    def _record(self, step: int, metrics: dict, state: TrainState, draws: int) -> None:
        record = {
            'step': step,
            'loss': float(metrics['loss']),
            'perplexity': float(np.exp(np.float64(metrics['loss']))),
            'grad_norm': float(metrics['grad_norm']),
            'learning_rate': float(metrics['learning_rate']),
            'tokens': int(metrics['tokens']),
        }
        record |= self._throughput.read() | self._saving
        self._saving = {}
        if metrics['gates'].size:
            paths = enumerate(self._program.model_config.attention)
            record['gates'] = {
                f'{path}_{name}': metrics['gates'][:, path].tolist() for path, name in paths
            }
        if draws:
            record['evaluation'] = self._program.evaluate(
                state,
                lambda: self._inputs.held_out,
                token_bytes=self._inputs.tokenizer.token_bytes,
                draws=draws,
            )
        if self._writer:
            self._writer.write(record)
            self._progress.show(record)
        self._throughput.restart()

    def _save(self, step: int, state: TrainState) -> None:
        start = time.perf_counter()
        if self._writer:
            self._writer.flush()
        self._checkpoints.save(step, state, self._batches.get_state(), self._json_config)
        self._saving = {'save_seconds': time.perf_counter() - start}
        self._throughput.restart()

    def _draws(self, evaluates: bool, last: bool) -> int:
        """How many permutation draws to evaluate: on the way one gives the picture."""
        if not evaluates:
            return 0
        return self._program.config.evaluation.permutation_draws if last else 1

    def _check_finite(self, step: int, metrics: dict) -> None:
        scalars = np.array([metrics['loss'], metrics['grad_norm']])
        norms = metrics['norms']
        if np.isfinite(scalars).all() and all(
            np.isfinite(x).all() for kind in norms.values() for x in kind.values()
        ):
            return
        latest = self._checkpoints.latest_step()
        good = 'none yet' if latest is None else self._checkpoints.directory / str(latest)
        raise NonFiniteError(
            f'Step {step}: loss {metrics["loss"]}, gradient norm {metrics["grad_norm"]}.\n'
            f'{describe_norms(norms)}\n'
            f'Last good checkpoint: {good}. Lower the learning rate or clip_norm, or look at the '
            'first layer listed with a non-finite gradient.'
        )

    @staticmethod
    def _every(interval: int, step: int) -> bool:
        return interval > 0 and step % interval == 0

    def _stopping(self, stop: Any, step: int) -> bool:
        """Whether to stop now; processes agree on it, at logged steps since agreeing takes time."""
        if jax.process_count() == 1:
            return stop is not None and stop.requested
        if step % self._program.config.training.log_every:
            return False
        requested = np.array(stop is not None and stop.requested)
        return bool(np.any(multihost_utils.process_allgather(requested)))


def describe_norms(norms: dict[str, dict[str, np.ndarray]]) -> str:
    """Tabulates gradient and parameter norms by layer, marking what isn't finite.

    Args:
      norms: 'gradient' and 'parameter' norms by parameter name: one per layer, or a scalar.
    """
    lines = []
    for name in norms['gradient']:
        rows = np.atleast_1d(norms['gradient'][name]), np.atleast_1d(norms['parameter'][name])
        for layer, (gradient, parameter) in enumerate(zip(*rows, strict=True)):
            where = f'{name}[{layer}]' if np.ndim(norms['gradient'][name]) else name
            mark = '' if np.isfinite([gradient, parameter]).all() else '   <- not finite'
            lines.append(f'  {where}: gradient {gradient:.4g}, parameter {parameter:.4g}{mark}')
    return 'Norms of the gradients and of the updated parameters:\n' + '\n'.join(lines)
