"""PyTorch's attention: SDPA, and FlexAttention under the same masks and permutations as ours.

PyTorch's functions take `[B, N, T, H]`, and get it: no transposition is timed. FlexAttention is
compiled together with its gathers of query, key and value by the permutation and of the output by
the inverse, which it is given. Its block mask is built beforehand.
"""

import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from sa_jax.benchmarks import patterns
from sa_jax.benchmarks.runners import NotAvailableError, Runner, threads
from sa_jax.benchmarks.settings import DTYPES, Case, Inputs, Sweep

# Query, key and value `[B, N or K, T, H]` to `[B, N, T, H]`.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Every length and mask compiles the same few lines anew; past the limit they'd run uncompiled.
torch._dynamo.config.recompile_limit = 1000
torch._dynamo.config.accumulated_recompile_limit = 1000


def prepare(case: Case, sweep: Sweep, inputs: Inputs) -> Runner:
    """Compiles a case for inputs.

    Raises:
      NotAvailableError: FlexAttention's backward on a CPU.
    """
    torch.set_num_threads(threads())
    is_forward = case.mode == 'forward'
    if case.implementation == 'torch_flex':
        if not is_forward and _device().type == 'cpu':
            raise NotAvailableError('FlexAttention has no backward on the CPU')
        attention, notes = _flex(case.kind, sweep, inputs.draw.permutation)
    else:
        attention, notes = _sdpa(sweep), {}
    *numbers, gradient = _to_torch(inputs, case.dtype)
    leaves = [x.detach().requires_grad_(not is_forward) for x in numbers]

    def call() -> tuple[torch.Tensor, ...]:
        output = attention(*leaves)
        return (output,) if is_forward else (output, *torch.autograd.grad(output, leaves, gradient))

    def run(calls: int) -> None:
        for _ in range(calls):
            call()
        if _device().type == 'cuda':
            torch.cuda.synchronize()

    start = time.perf_counter()
    run(1)
    return Runner(
        run=run,
        outputs=lambda: [_to_numpy(x) for x in call()],
        needed_bytes=None,
        peak_bytes=functools.partial(_peak_bytes, run),
        notes=notes | {'compile_s': time.perf_counter() - start},
    )


def _device() -> torch.device:
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


@functools.lru_cache(maxsize=len(DTYPES))
def _to_torch(inputs: Inputs, dtype: str) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, shared by all cases of a length."""
    return [
        torch.from_numpy(x).transpose(1, 2).to(_device(), getattr(torch, dtype)).contiguous()
        for x in inputs.numbers
    ]


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().transpose(1, 2).float().cpu().numpy()


def _peak_bytes(run: Callable[[int], None]) -> int | None:
    """Memory that a call takes beyond its arguments, as PyTorch counts it on a GPU."""
    if _device().type == 'cpu':
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(1)
    return torch.cuda.max_memory_allocated() - before


def _sdpa(sweep: Sweep) -> Attention:
    return functools.partial(
        scaled_dot_product_attention,
        is_causal=sweep.is_causal,
        enable_gqa=sweep.heads != sweep.kv_heads,
    )


def _flex(kind: str, sweep: Sweep, permutation: np.ndarray) -> tuple[Attention, dict[str, float]]:
    """A kind's compiled attention, and the seconds its block mask took, once compiled."""
    length = len(permutation)
    if kind == 'stochastic_partition':
        order = np.concatenate([np.sort(x) for x in _chunks(permutation, sweep.chunk_size)])
    elif kind == 'stochastic':
        order = permutation
    else:
        order = np.arange(length)
    is_permuted = kind.startswith('stochastic')
    token = torch.from_numpy(order).to(_device())
    slot = torch.argsort(token)
    sees = _visibility(kind, sweep, token)
    build = torch.compile(create_block_mask, dynamic=False)
    arguments = (sees, None, None, length, length, _device(), sweep.flex_block_size)
    build(*arguments)
    start = time.perf_counter()
    block_mask = build(*arguments)
    if _device().type == 'cuda':
        torch.cuda.synchronize()
    notes = {'block_mask_s': time.perf_counter() - start}
    enable_gqa = sweep.heads != sweep.kv_heads

    def attention(query, key, value):
        if is_permuted:
            query, key, value = (x[:, :, token] for x in (query, key, value))
        output = flex_attention(query, key, value, block_mask=block_mask, enable_gqa=enable_gqa)
        return output[:, :, slot] if is_permuted else output

    # A graph that breaks would be another benchmark: it raises.
    return torch.compile(attention, fullgraph=True, dynamic=False), notes


def _chunks(permutation: np.ndarray, size: int) -> list[np.ndarray]:
    return [permutation[i : i + size] for i in range(0, len(permutation), size)]


def _visibility(kind: str, sweep: Sweep, token: torch.Tensor) -> Callable[..., torch.Tensor]:
    """visible(i, j) between slots, as FlexAttention takes it."""
    is_causal = sweep.is_causal and kind != patterns.TWO_SIDED
    if kind == 'stochastic_partition':
        size = sweep.chunk_size

        def near(i, j):
            return i // size == j // size
    elif kind == 'full':

        def near(i, j):
            return i >= 0 * j
    else:
        back, ahead = patterns.window_sides(kind, sweep)

        def near(i, j):
            return (i - j <= back) & (j - i <= ahead)

    def sees(b, h, i, j):
        del b, h
        if not is_causal:
            return near(i, j)
        if kind == 'stochastic':
            return near(i, j) & (token[j] <= token[i])
        return near(i, j) & (j <= i)

    return sees
