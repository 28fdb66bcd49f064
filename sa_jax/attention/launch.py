"""How the GPU kernels are launched: sizes by card, dtype and head_dim, from launch_table.json.

A tile too large spills registers or asks for more shared memory than the card has; one too small
computes and reads in vain. `python -m experiments.tune_kernel` measures and rewrites the table.
"""

import dataclasses
import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp

TABLE = Path(__file__).with_name('launch_table.json')
# The entry for cards without one of their own: it fits every card from sm80 on.
OTHER = 'other'
DTYPES = ('bfloat16', 'float16', 'float32')
LARGEST_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """One kernel's launch.

    Attributes:
      block_q: queries at a time, a power of two ≥ 16.
      block_k: keys at a time, a power of two ≥ 16.
      warps: per block of threads.
      stages: of the pipeline; rows are loaded stages - 1 blocks ahead of the arithmetic.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int

    def __post_init__(self):
        for name in ('block_q', 'block_k'):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 16 or size & (size - 1):
                raise ValueError(f'{name}={size!r}; expected a power of two of at least 16')
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f'warps={self.warps!r}; expected 1, 2, 4, 8 or 16')
        if not isinstance(self.stages, int) or self.stages < 1:
            raise ValueError(f'stages={self.stages!r}; expected an integer of at least 1')


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch of all three kernels.

    Attributes:
      forward: output and log-sum-exp; each program owns block_q queries.
      dq: the gradient of the queries; each program owns block_q queries.
      dkv: the gradients of keys and values; each program owns block_k keys.
      fused: whether the kernels read and write rows through the permutation; else they run on
        permuted copies.
    """

    forward: Tile
    dq: Tile
    dkv: Tile
    fused: bool = True

    @property
    def block(self) -> int:
        """Lanes come in multiples of it."""
        tiles = (self.forward, self.dq, self.dkv)
        return max(max(tile.block_q, tile.block_k) for tile in tiles)

    @classmethod
    def from_json(cls, entry: dict) -> 'Launch':
        """The launch in a table's entry; `dataclasses.asdict` makes one."""
        tiles = {name: Tile(**entry[name]) for name in ('forward', 'dq', 'dkv')}
        return cls(**tiles, fused=entry['fused'])


def read_table(path: str | os.PathLike[str] = TABLE) -> dict[tuple[str, str, int], Launch]:
    """The launches of a table by (card, dtype, head_dim)."""
    cards = json.loads(Path(path).read_text())
    return {
        (card, dtype, int(head_dim)): Launch.from_json(entry)
        for card, dtypes in cards.items()
        for dtype, head_dims in dtypes.items()
        for head_dim, entry in head_dims.items()
    }


def write_table(
    table: dict[tuple[str, str, int], Launch], path: str | os.PathLike[str] = TABLE
) -> None:
    """Writes what `read_table` reads."""
    cards = {}
    for (card, dtype, head_dim), launch in sorted(table.items()):
        entry = dataclasses.asdict(launch)
        cards.setdefault(card, {}).setdefault(dtype, {})[str(head_dim)] = entry
    lines = json.dumps(cards, indent=2)
    # One line a tile.
    for launch in table.values():
        for tile in (launch.forward, launch.dq, launch.dkv):
            entry = dataclasses.asdict(tile)
            spread = json.dumps(entry, indent=2).replace('\n', '\n' + 8 * ' ')
            lines = lines.replace(spread, json.dumps(entry))
    Path(path).write_text(lines + '\n')


_table = functools.cache(read_table)


def launch_for(card: str | None, dtype: jax.typing.DTypeLike, head_dim: int) -> Launch:
    """The table's launch for a call.

    Args:
      card: such as 'sm90'; None and cards the table doesn't know get its conservative entry.
      dtype: bfloat16, float16 (launched like bfloat16) or float32.
      head_dim: up to 256; the next larger entry serves.

    Raises:
      ValueError: another dtype, or a larger head_dim.
    """
    name = jnp.dtype(dtype).name
    table = _table()
    card = card if any(card == known for known, _, _ in table) else OTHER
    entries = {
        size: launch
        for (known, kind, size), launch in table.items()
        if known == card and kind == ('bfloat16' if name == 'float16' else name)
    }
    if not entries:
        raise ValueError(f'dtype {name}; the GPU kernel runs bfloat16, float16 and float32')
    large_enough = [size for size in entries if size >= head_dim]
    if not large_enough:
        raise ValueError(f'head_dim {head_dim}; the GPU kernel runs up to {max(entries)}')
    return entries[min(large_enough)]


def obstacle(query: jax.Array, key: jax.Array, value: jax.Array) -> str | None:
    """What keeps the kernels from running on these arrays; None if nothing does."""
    dtype = common_dtype(query, key, value)
    if dtype.name not in DTYPES:
        return f'dtype {dtype.name}; the GPU kernel runs {", ".join(DTYPES)}'
    if query.shape[-1] > LARGEST_HEAD_DIM:
        return f'head_dim {query.shape[-1]}; the GPU kernel runs up to {LARGEST_HEAD_DIM}'
    return None


def common_dtype(*arrays: jax.Array) -> jnp.dtype:
    """What the kernels compute with."""
    return jnp.result_type(*(x.dtype for x in arrays))


def card_of(device: jax.Device | None) -> str | None:
    """A device's card, such as 'sm90'; None if it isn't an NVIDIA GPU."""
    capability = str(getattr(device, 'compute_capability', ''))
    major, _, minor = capability.partition('.')
    if getattr(device, 'platform', None) not in ('gpu', 'cuda') or not major.isdigit():
        return None
    return f'sm{major}{minor}'


def default_device() -> jax.Device:
    """The device that JAX compiles for where arrays don't say."""
    device = jax.config.jax_default_device
    if isinstance(device, jax.Device):
        return device
    return jax.devices(device)[0]
