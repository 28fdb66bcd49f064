"""Checkpoints of a run: the training state, the data iterator's state, the configuration."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.experimental import multihost_utils

from sa_jax.data.pipeline import merge_states
from sa_jax.training import manifest
from sa_jax.untrusted import damage_reported


class Checkpoints:
    """Asynchronous Orbax checkpoints under a directory, one for each saved step.

    A checkpoint appears under its final name only once it is complete and has a manifest of its
    files, so a crash during a save leaves the one before as the latest. Arrays are copied to the
    host before `save` returns, so the state may be donated at once.

    Args:
      directory: where they are; created if it is missing.
      keep: how many of the latest to keep; None to read only, which disturbs nobody who saves.
    """

    def __init__(self, directory: Path, keep: int | None):
        self.directory = directory.resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            read_only=keep is None,
            cleanup_tmp_directories=keep is not None,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifests),
        )
        # Parameters hardly compress, and what isn't compressed can't need more memory than disk.
        handlers = {
            'state': ocp.PyTreeCheckpointHandler(use_compression=False),
            'data': ocp.JsonCheckpointHandler(),
            'config': ocp.JsonCheckpointHandler(),
        }
        with damage_reported(self.directory):
            self._manager = ocp.CheckpointManager(
                self.directory, options=options, item_handlers=handlers
            )

    def latest_step(self) -> int | None:
        """Returns the step of the last complete checkpoint, waiting for one being written."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints."""
        self._manager.wait_until_finished()
        return sorted(self._manager.all_steps())

    def set_damaged_aside(self) -> None:
        """Renames the latest checkpoints if they aren't what was written, up to a good one.

        Raises:
          ValueError: none is good; then all stay.
        """
        damaged = {}
        for step in reversed(self.steps()):
            damage = _agreed(lambda step=step: self.find_damage(step))
            if damage is None:
                break
            damaged[step] = damage
        if not damaged:
            return
        report = '\n'.join(f'  {step}: {damage}' for step, damage in damaged.items())
        if len(damaged) == len(self.steps()):
            raise ValueError(
                f'No checkpoint in {self.directory} is whole:\n{report}\n'
                'Restore one from a copy, or delete them all to begin anew.'
            )
        if jax.process_index() == 0:
            for step in damaged:
                self._set_aside(step)
            print(
                f'Damaged checkpoints in {self.directory} are set aside:\n{report}',
                file=sys.stderr,
                flush=True,
            )
        _agreed(lambda: None)  # all have been renamed
        self._manager.reload()

    def find_damage(self, step: int) -> str | None:
        """What is wrong with the files of a checkpoint; None if nothing is.

        One without a manifest is from before there were any, and taken as it is, unless others
        have one.
        """
        folder = self.directory / str(step)
        if (folder / manifest.NAME).exists():
            return manifest.find_damage(folder)
        others = (self.directory / str(x) / manifest.NAME for x in self.steps())
        return f'{manifest.NAME} is missing' if any(x.exists() for x in others) else None

    def save(self, step: int, state: Any, data: dict, config: dict) -> None:
        """Starts saving.

        Args:
          step: finished optimizer steps, naming the checkpoint.
          state: the pytree of arrays.
          data: this process' part of the data iterator's state, JSON.
          config: the run's configuration, JSON.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(state),
                data=ocp.args.JsonSave(_gather(data)),
                config=ocp.args.JsonSave(config),
            ),
        )

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict]:
        """Reads a checkpoint.

        Args:
          step: which one.
          abstract_state: the shapes, types and target shardings, which may differ from those
            the state was saved with.

        Returns:
          The state and the data iterator's state of all virtual shards.

        Raises:
          ValueError: if it is damaged, or holds another state.
        """
        targets = ocp.checkpoint_utils.construct_restore_args(abstract_state)
        with damage_reported(self.directory / str(step), Exception):
            _check_arrays(self.directory / str(step) / 'state')
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(abstract_state, restore_args=targets),
                    data=ocp.args.JsonRestore(),
                ),
            )
            return restored['state'], restored['data']

    def _set_aside(self, step: int) -> None:
        name, count = f'damaged-{step}', 1
        while (self.directory / name).exists():
            count += 1
            name = f'damaged-{step}-{count}'
        (self.directory / str(step)).rename(self.directory / name)

    def _write_manifests(self) -> None:
        """Of the checkpoint that has just been written, which doesn't have its name yet."""
        if jax.process_index() == 0:
            for folder in self.directory.glob('*.orbax-checkpoint-tmp'):
                manifest.write_manifest(folder)

    def close(self) -> None:
        """Waits for the save in progress and frees the threads."""
        self._manager.wait_until_finished()
        self._manager.close()


def _check_arrays(folder: Path) -> None:
    """Checks that reading stored arrays takes no more memory than they have elements.

    TensorStore reads whole chunks, whatever their size, and decompresses whatever there is.
    """
    if not (folder / 'manifest.ocdbt').is_file():
        raise ValueError(f'{folder} has no manifest.ocdbt.')
    base = {'driver': 'file', 'path': f'{folder}/'}
    store = tensorstore.KvStore.open({'driver': 'ocdbt', 'base': base}).result()
    for key in store.list().result():
        array, _, name = key.decode().rpartition('/')
        if name == 'zarr.json':
            raise ValueError(f'{folder}: array {array!r} is in Zarr 3; expected Zarr 2.')
        if name != '.zarray':
            continue
        stored = json.loads(store[key])
        if stored['compressor'] or stored['filters']:
            raise ValueError(
                f'{folder}: array {array!r} is compressed, and may need any amount of memory; '
                'arrays are written and read uncompressed.'
            )
        if math.prod(stored['chunks']) > max(math.prod(stored['shape']), 1):
            raise ValueError(
                f'{folder}: array {array!r} of shape {stored["shape"]} has chunks of '
                f'{stored["chunks"]}.'
            )


def _agreed(find: Callable[[], str | None]) -> str | None:
    """What the first process finds, on all of them."""
    if jax.process_count() == 1:
        return find()
    found = (find() or '') if jax.process_index() == 0 else ''
    text = np.zeros(500, np.uint8)
    encoded = np.frombuffer(found.encode()[:500], np.uint8)
    text[: len(encoded)] = encoded
    text = multihost_utils.broadcast_one_to_all(text)
    return bytes(text).rstrip(b'\0').decode(errors='ignore') or None


def _gather(part: dict) -> dict:
    """Joins the data iterator states of all processes; JSON travels as padded bytes."""
    if jax.process_count() == 1:
        return part
    text = np.frombuffer(json.dumps(part).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(text)))))
    padded = np.pad(text, (0, longest - len(text)), constant_values=ord(' '))
    rows = multihost_utils.process_allgather(padded)
    return merge_states([json.loads(row.tobytes()) for row in rows])
