"""Functions made ready to be called again and again, through JAX."""

import functools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sa_jax.benchmarks.patterns import Attention
from sa_jax.benchmarks.settings import DTYPES, Inputs


class NotAvailableError(Exception):
    """A case cannot run here; the message says why."""


class Runner(NamedTuple):
    """A compiled case.

    Attributes:
      run: calls it so many times and waits for the last result.
      outputs: the output `[B, T, N, H]` and, with a backward pass, the gradients of query, key and
        value, float32.
      needed_bytes: memory of arguments, temporaries and results together; None if unknown.
      peak_bytes: of temporaries and results, to be asked after a call; None if unknown.
      notes: seconds spent beforehand, by what on.
    """

    run: Callable[[int], None]
    outputs: Callable[[], list[np.ndarray]]
    needed_bytes: int | None
    peak_bytes: Callable[[], int | None]
    notes: dict[str, float]


def threads() -> int:
    """The CPUs this process may use: as many threads as XLA takes."""
    has_affinity = hasattr(os, 'sched_getaffinity')
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def prepare_jax(function: Attention, inputs: Inputs, dtype: str, mode: str) -> Runner:
    """Compiles an attention function for inputs, with its backward pass or without."""

    def forward(query, key, value, gradient, draw):
        del gradient
        return (function(query, key, value, draw),)

    def forward_backward(query, key, value, gradient, draw):
        output, pull = jax.vjp(lambda *x: function(*x, draw), query, key, value)
        return output, *pull(gradient)

    step = forward if mode == 'forward' else forward_backward
    return _compiled(step, _to_jax(inputs, dtype))


@functools.lru_cache(maxsize=len(DTYPES))
def _to_jax(inputs: Inputs, dtype: str) -> tuple:
    """Arrays that all cases of a length share."""
    numbers = (jnp.asarray(x, dtype) for x in inputs.numbers)
    return *numbers, jax.tree.map(jnp.asarray, inputs.draw)


def prepare_matmul(size: int, dtype: str) -> Runner:
    """Compiles the product of two square matrices, the measure of a device's rate."""
    keys = jax.random.split(jax.random.key(0))
    factors = tuple(jax.random.normal(key, (size, size), dtype) for key in keys)
    return _compiled(lambda a, b: (a @ b,), factors)


def _compiled(function, arguments) -> Runner:
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    notes = {'compile_s': time.perf_counter() - start}
    # A CPU may run calls side by side that nobody waits for; a GPU's queue keeps it busy.
    is_queued = jax.default_backend() != 'cpu'

    def run(calls: int) -> None:
        for _ in range(calls):
            results = compiled(*arguments)
            if not is_queued:
                jax.block_until_ready(results)
        jax.block_until_ready(results)

    memory = compiled.memory_analysis()
    peak = memory and memory.temp_size_in_bytes + memory.output_size_in_bytes
    return Runner(
        run=run,
        outputs=lambda: [np.asarray(x, np.float32) for x in compiled(*arguments)],
        needed_bytes=memory and peak + memory.argument_size_in_bytes,
        peak_bytes=lambda: peak,
        notes=notes,
    )
