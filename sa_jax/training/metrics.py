"""Where training writes its figures: metrics.jsonl, TensorBoard, Weights & Biases."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from sa_jax.training.files import write_atomically
from sa_jax.untrusted import damage_reported

# tensorboardX imports PyTorch wherever it is installed, seconds for nothing at each start.
_is_hidden = sys.modules.setdefault('torch', None) is None
try:
    from tensorboardX import SummaryWriter
finally:
    if _is_hidden:
        del sys.modules['torch']

# Fields of a metrics record that depend on the clock; all others repeat exactly.
TIME_FIELDS = ('tokens_per_s', 'mfu', 'step_seconds', 'input_wait', 'save_seconds')

# Dense bfloat16 peak of one device, FLOP/s, from the vendors' data sheets; the first name that
# occurs in `jax.Device.device_kind` counts.
_PEAK_FLOPS = {
    'B200': 2250e12,
    'H200': 989e12,
    'GH200': 989e12,
    'H100 PCIe': 756e12,
    'H100': 989e12,
    'A100': 312e12,
    'L40S': 362e12,
    'L4': 121e12,
    'A10G': 70e12,
    'V100': 125e12,
    'RTX 4090': 165e12,
    'TPU v6': 918e12,
    'TPU v5p': 459e12,
    'TPU v5': 197e12,
    'TPU v4': 275e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Returns the bfloat16 peak of a device in FLOP/s, or None where it is not known."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device.device_kind), None)


class Throughput:
    """Tokens per second, model FLOPs utilisation and where time goes, between two records.

    Args:
      flops_per_token: of training, forward and backward.
      devices: those that share the work.
    """

    def __init__(self, flops_per_token: float, devices: list[jax.Device]):
        peak = peak_flops(devices[0])
        self._peak_tokens = peak and peak * len(devices) / flops_per_token
        self.restart()

    def restart(self) -> None:
        """Starts the clock anew, after anything that is not training."""
        self._tokens, self._waited, self._ends = 0, 0.0, [time.perf_counter()]

    def add(self, tokens: float) -> None:
        """Counts the tokens of a step that has just finished."""
        self._tokens += tokens
        self._ends.append(time.perf_counter())

    @contextlib.contextmanager
    def waiting(self, is_busy: Callable[[], bool]) -> Iterator[None]:
        """Around whatever brings the next batch.

        Args:
          is_busy: whether the devices still have a step in hand; then none of them waited.
        """
        start = time.perf_counter()
        yield
        if not is_busy():
            self._waited += time.perf_counter() - start

    def read(self) -> dict[str, Any]:
        """The figures of the steps since the last restart, which begins anew.

        Returns:
          tokens_per_s; mfu (0 to 1) where the peak is known; step_seconds, the median and the
          most; input_wait, the share of the time (0 to 1) at most that the devices waited for a
          batch.
        """
        elapsed = max(time.perf_counter() - self._ends[0], 1e-9)
        rate, seconds = self._tokens / elapsed, np.diff(self._ends)
        figures = {
            'tokens_per_s': rate,
            'step_seconds': {'median': float(np.median(seconds)), 'most': float(seconds.max())},
            'input_wait': self._waited / elapsed,
        }
        if self._peak_tokens:
            figures['mfu'] = rate / self._peak_tokens
        self.restart()
        return figures


def read_metrics(path: Path) -> list[dict]:
    """Reads the complete records of a metrics.jsonl; a line cut off by a crash is left out."""
    if not path.exists():
        return []
    with damage_reported(path):
        lines = path.read_text().split('\n')[:-1]
        return [json.loads(line) for line in lines]


def truncate_metrics(path: Path, step: int) -> None:
    """Drops the records after `step`, atomically: they are about to be computed again."""
    with damage_reported(path):
        kept = [record for record in read_metrics(path) if record['step'] <= step]
    write_atomically(path, ''.join(json.dumps(record) + '\n' for record in kept))


class MetricsWriter:
    """Appends records to a workdir's metrics.jsonl, TensorBoard and Weights & Biases.

    Opening it cuts all of them back to the step training continues from.

    Args:
      workdir: the run's directory.
      step: the last step whose records stay.
      wandb_project: the Weights & Biases project, or empty for none.
      config: the run's configuration, for Weights & Biases.

    Raises:
      ModuleNotFoundError: if a project is named and wandb is not installed.
    """

    def __init__(self, workdir: Path, step: int, wandb_project: str = '', config: Any = None):
        self._wandb = _start_wandb(wandb_project, workdir, config) if wandb_project else None
        truncate_metrics(workdir / 'metrics.jsonl', step)
        self._file = open(workdir / 'metrics.jsonl', 'a', buffering=1)  # noqa: SIM115
        self._tensorboard = SummaryWriter(str(workdir / 'tensorboard'), purge_step=step + 1)

    def write(self, record: dict) -> None:
        """Writes one record, a nested dict of numbers and lists of numbers with a 'step'."""
        self._file.write(json.dumps(record) + '\n')
        step, scalars = record['step'], flatten_scalars(record)
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(scalars, step=step)

    def flush(self) -> None:
        """Puts all records on disk; no checkpoint may be newer than its metrics."""
        os.fsync(self._file.fileno())
        self._tensorboard.flush()

    def close(self) -> None:
        """Flushes and closes everything."""
        self.flush()
        self._file.close()
        self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def flatten_scalars(record: dict, prefix: str = '') -> dict[str, float]:
    """Returns the numbers of a nested record by their slash-separated names, without 'step'."""
    scalars = {}
    for name, value in record.items():
        if isinstance(value, dict):
            scalars |= flatten_scalars(value, f'{prefix}{name}/')
        elif isinstance(value, list):
            scalars |= {f'{prefix}{name}/{index}': x for index, x in enumerate(value)}
        elif name != 'step':
            scalars[prefix + name] = value
    return scalars


def _start_wandb(project: str, workdir: Path, config: Any):
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'logging.wandb_project is {project!r}, but wandb is not installed: '
            'pip install wandb, or leave the field empty.'
        ) from error
    logging.info('Logging to the Weights & Biases project %s', project)
    return wandb.init(project=project, dir=workdir, config=config, id=workdir.name, resume='allow')


class Progress:
    """A progress bar; where standard error is no terminal, a line for each record instead.

    Args:
      step: the step training continues from.
      steps: the step it ends with.
    """

    def __init__(self, step: int, steps: int):
        self._steps = steps
        self._bar = tqdm(
            initial=step, total=steps, unit='step', dynamic_ncols=True, disable=None, leave=True
        )

    def advance(self) -> None:
        """Counts a step."""
        self._bar.update()

    def show(self, record: dict) -> None:
        """Shows the figures of a record."""
        figures = {'loss': f'{record["loss"]:.3f}', 'tokens/s': f'{record["tokens_per_s"]:,.0f}'}
        if 'mfu' in record:
            figures['MFU'] = f'{record["mfu"]:.1%}'
        if 'evaluation' in record:
            figures['held-out perplexity'] = f'{record["evaluation"]["perplexity"]:.1f}'
        if self._bar.disable:
            text = ', '.join(f'{name} {value}' for name, value in figures.items())
            print(f'step {record["step"]}/{self._steps}: {text}', file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix(figures)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()
