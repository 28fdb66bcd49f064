"""What the compiler makes of the attention kernels on a described card, and its table."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import sa_jax
from sa_jax.attention.launch import launch_for
from sa_jax.report.gpu_compile import CARDS, Card, Compiled, Program

FORMS = ('sliding_window', 'stochastic', 'stochastic_partition', 'packed_stochastic')
DTYPES = ('bfloat16', 'float32')
HEAD_DIMS = (64, 128, 256)
# The launch's part of each kernel.
KERNELS = {'forward_kernel': 'forward', 'dq_kernel': 'dq', 'dkv_kernel': 'dkv'}


def build(form, dtype, head_dim, *, length, heads, kv_heads, window):
    """Builds an attention function with its gradients, and the shapes of its arguments.

    Args:
      form: 'sliding_window', in the tokens' own order; 'stochastic', through a permutation;
        'stochastic_partition'; 'packed_stochastic', the second with segment ids, as in training.
      dtype: of queries, keys and values.
      head_dim: H.
      length: T.
      heads: N.
      kv_heads: K.
      window: keys or slots a query sees, or tokens of a chunk.

    Returns:
      (query, key, value, permutation, segment ids, gradient of the output) -> (output, the three
      gradients), and the arguments as `jax.ShapeDtypeStruct`s.
    """
    function, options = {
        'sliding_window': (sa_jax.sliding_window_attention, {'window': window}),
        'stochastic': (sa_jax.stochastic_attention, {'window': window}),
        'stochastic_partition': (sa_jax.stochastic_partition_attention, {'chunk_size': window}),
        'packed_stochastic': (sa_jax.stochastic_attention, {'window': window}),
    }[form]

    def attention_with_gradients(query, key, value, permutation, segment_ids, gradient):
        tokens = {} if form == 'sliding_window' else {'permutation': permutation}
        if form == 'packed_stochastic':
            tokens['segment_ids'] = segment_ids

        def attention(query, key, value):
            return function(query, key, value, implementation='pallas', **options, **tokens)

        output, pull_back = jax.vjp(attention, query, key, value)
        return output, *pull_back(gradient)

    query = jax.ShapeDtypeStruct((1, length, heads, head_dim), dtype)
    key = jax.ShapeDtypeStruct((1, length, kv_heads, head_dim), dtype)
    permutation = jax.ShapeDtypeStruct((length,), jnp.int32)
    segment_ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return attention_with_gradients, (query, key, key, permutation, segment_ids, query)


def programs(
    forms: Sequence[str] = FORMS,
    dtypes: Sequence[str] = DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
    **sizes: int,
) -> list[Program]:
    """Every form of every dtype and head_dim; `sizes` are `build`'s keyword arguments."""
    return [
        Program(
            f'{form} {dtype} {head_dim}',
            f'{__name__}:build',
            {'form': form, 'dtype': dtype, 'head_dim': head_dim} | sizes,
        )
        for dtype in dtypes
        for head_dim in head_dims
        for form in forms
    ]


def table(reports: dict[str, list[Compiled]]) -> str:
    """The reports by card as Markdown: a row for each of our kernels, then one for each program."""
    lines = [
        '| card | function, dtype, head_dim | kernel | tile: queries × keys, warps, stages '
        '| registers | bytes spilled: stores, loads | shared memory, KiB | limit, KiB |',
        '|---|---|---|---|---|---|---|---|',
    ]
    for card, programs in reports.items():
        limit = CARDS[card].shared_memory_limit / 1024
        for program in programs:
            _, dtype, head_dim = program.name.split()
            launch = launch_for(capability_name(CARDS[card]), dtype, int(head_dim))
            if program.error:
                error = ' '.join(program.error.replace('|', '/').split())
                lines.append(f'| {card} | {program.name} | not compiled: {error} | | | | | |')
            for kernel in program.kernels:
                if kernel.name in KERNELS:
                    part = KERNELS[kernel.name]
                    tile = getattr(launch, part)
                    lines.append(
                        f'| {card} | {program.name} | {part} '
                        f'| {tile.block_q} × {tile.block_k}, {tile.warps}, {tile.stages} '
                        f'| {kernel.registers} | {kernel.spill_stores}, {kernel.spill_loads} '
                        f'| {kernel.shared_memory / 1024:.1f} | {limit:.0f} |'
                    )
    lines += [
        '',
        '| card | function, dtype, head_dim | arguments, MiB | temporaries, MiB |',
        '|---|---|---|---|',
    ]
    for card, programs in reports.items():
        for x in programs:
            if not x.error:
                sizes = f'{x.arguments / 2**20:.1f} | {x.temporaries / 2**20:.1f}'
                lines.append(f'| {card} | {x.name} | {sizes} |')
    return '\n'.join(lines) + '\n'


def capability_name(card: Card) -> str:
    """A card in the launch table, such as 'sm90'."""
    major, minor = card.capability
    return f'sm{major}{minor}'
