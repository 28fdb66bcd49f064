"""Joining the other processes of a run, on JAX's own distributed runtime."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import jax
from absl import flags

_TIMEOUTS = {
    # What is silent for so long is given up, and with it the run: the others end with an error.
    'heartbeat_timeout_seconds': 30,
    # At the end the others wait for the first, which counts, samples and plots.
    'shutdown_timeout_seconds': 3600,
}

MULTI_HOST = flags.DEFINE_boolean(
    'multi_host',
    False,
    'Join the other processes of a cluster that JAX recognises (Slurm, Kubernetes, TPU pods, MPI), '
    'or the one that --coordinator describes.',
)
COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'HOST:PORT of the first process, where no cluster is recognised.'
)
PROCESSES = flags.DEFINE_integer('processes', None, 'How many there are, with --coordinator.')
PROCESS = flags.DEFINE_integer('process', None, 'Which one this is, from 0, with --coordinator.')


def join() -> None:
    """Joins the cluster that the flags describe, if they describe one.

    Raises:
      ValueError: the flags contradict each other or lack one, or there is no cluster.
    """
    described = (COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if all(x is None for x in described):
        if not MULTI_HOST.value:
            return
        try:
            jax.distributed.initialize(**_TIMEOUTS)
        except ValueError as error:
            raise ValueError(
                '--multi_host, but JAX recognises no cluster here: give --coordinator=HOST:PORT, '
                f'--processes and --process. ({error})'
            ) from error
        return
    if any(x is None for x in described):
        raise ValueError(
            '--coordinator, --processes and --process belong together; got '
            f'{", ".join(map(str, described))}.'
        )
    if not 0 <= PROCESS.value < PROCESSES.value:
        raise ValueError(
            f'--process={PROCESS.value}; expected 0 to {PROCESSES.value - 1}, as of '
            f'--processes={PROCESSES.value}.'
        )
    jax.distributed.initialize(
        COORDINATOR.value,
        PROCESSES.value,
        PROCESS.value,
        cluster_detection_method='deactivate',  # Slurm's would leave one GPU of a host
        **_TIMEOUTS,
    )


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Makes an error of one process end the others, too.

    Python's orderly end would wait for them, and they, in the midst of a step, for this one.
    """
    try:
        yield
    except BaseException as error:
        is_failure = not isinstance(error, SystemExit) or error.code
        if jax.process_count() == 1 or not is_failure:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
