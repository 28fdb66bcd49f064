"""Joining the other processes of a run, on JAX's own distributed runtime."""

from __future__ import annotations

import jax
from absl import flags

# What is silent for so long is given up, and with it the run: the others end with an error.
_HEARTBEAT_TIMEOUT = 30  # seconds

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
            jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT)
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
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT,
    )
