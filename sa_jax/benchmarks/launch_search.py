"""Searching the launch table: what is tried, how it is checked and timed, what is kept."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from sa_jax.attention import pallas_gpu
from sa_jax.attention.launch import OTHER, Launch, Tile, read_table, write_table
from sa_jax.benchmarks.tuning import Journal, nearest_first, tune

CHOICES = {
    'block_q': (16, 32, 64, 128),
    'block_k': (16, 32, 64, 128),
    'warps': (4, 8),
    'stages': (1, 2, 3, 4),
}
# In this order: each part is searched with the winners of those before it.
PARTS = ('forward', 'dq', 'dkv', 'fused')
FORMS = ('stochastic', 'sliding_window')
# Relative, in the norm. Launches differ in the order of their sums only.
TOLERANCES = {'bfloat16': 2e-2, 'float32': 1e-4}
_CALLS = 10  # timed as one
_TRYING = 0.7  # share of a part's time for compiling candidates; the rest is the race's


@dataclasses.dataclass(frozen=True)
class Workload:
    """The calls that are timed: causal attention of one example.

    Attributes:
      length: T.
      heads: N.
      kv_heads: K.
      window: keys or slots a query sees.
      forms: of `FORMS`; their times are added up.
    """

    length: int = 32768
    heads: int = 16
    kv_heads: int = 16
    window: int = 256
    forms: tuple[str, ...] = FORMS

    def as_json(self, device: jax.Device) -> dict:
        """The workload and its device, for the journal."""
        sizes = dataclasses.asdict(self) | {'forms': list(self.forms)}
        return {'device': device.device_kind} | sizes


def variants(launch: Launch, part: str) -> list[Launch]:
    """The launches that differ from `launch` in one part, the most promising first."""
    if part == 'fused':
        return [dataclasses.replace(launch, fused=not launch.fused)]
    start = dataclasses.asdict(getattr(launch, part))
    tiles = [Tile(**tile) for tile in nearest_first(start, CHOICES)]
    return [dataclasses.replace(launch, **{part: tile}) for tile in tiles]


def describe(launch: Launch, part: str) -> str:
    """A part of a launch in a few words."""
    if part == 'fused':
        return 'rows through the permutation' if launch.fused else 'permuted copies'
    tile = getattr(launch, part)
    return f'{tile.block_q} × {tile.block_k}, {tile.warps} warps, {tile.stages} stages'


def build(workload: Workload, form: str, part: str, launch: Launch) -> Callable:
    """(query, key, value, permutation, gradient) -> what the kernels up to `part` compute."""

    def attention(query, key, value, permutation):
        scale = query.shape[-1] ** -0.5
        options = pallas_gpu.Options(is_causal=True, scale=scale, launch=launch)
        call = {'query': query, 'key': key, 'value': value, 'options': options}
        call |= {'window': workload.window, 'segment_ids': None, 'sink_logits': None}
        if form == 'sliding_window':
            return pallas_gpu.own_order(**call, positions=None)
        return pallas_gpu.stochastic(**call, permutation=permutation[None], mixes_segments=False)

    def computed(query, key, value, permutation, gradient):
        if part == 'forward':
            return attention(query, key, value, permutation)
        _, pull_back = jax.vjp(attention, query, key, value, permutation)
        dq, dk, dv, _ = pull_back(gradient)
        # What isn't returned isn't computed; dk and dv need what the kernel of dq leaves.
        return dq if part == 'dq' else (dq, dk, dv)

    return jax.jit(computed)


class Bench:
    """One part of one entry of the table on the device.

    Args:
      workload: the calls.
      dtype: of queries, keys and values.
      head_dim: H.
      part: one of `PARTS`.
      incumbent: the launch that others must agree with.
    """

    def __init__(self, workload: Workload, dtype: str, head_dim: int, part: str, incumbent: Launch):
        self._workload, self._part, self._tolerance = workload, part, TOLERANCES[dtype]
        self._inputs = inputs(workload, dtype, head_dim)
        self._device = threading.Lock()  # candidates compile beside each other, and run alone
        self._expected = [call(*self._inputs) for call in self._compile(incumbent)]

    def prepare(self, launch: Launch) -> list[Callable]:
        """The compiled calls of a launch, one for each form.

        Raises:
          ValueError: it computes other numbers than the incumbent.
          Exception: whatever the compiler has to say.
        """
        calls = self._compile(launch)
        with self._device:
            found = [call(*self._inputs) for call in calls]
            error = float(_largest_error(found, self._expected))
        if not error <= self._tolerance:  # NaN is not
            raise ValueError(f'wrong numbers: off by {error:.1e}')
        return calls

    def time_once(self, calls: list[Callable]) -> float:
        """Seconds of one call of each form."""
        jax.block_until_ready([call(*self._inputs) for call in calls])
        start = time.perf_counter()
        for _ in range(_CALLS):
            last = [call(*self._inputs) for call in calls]
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / _CALLS

    def _compile(self, launch):
        functions = (build(self._workload, x, self._part, launch) for x in self._workload.forms)
        return [function.lower(*self._inputs).compile() for function in functions]


def inputs(workload: Workload, dtype: str, head_dim: int) -> tuple[jax.Array, ...]:
    """Query, key, value, permutation and the output's gradient."""
    keys = jax.random.split(jax.random.key(0), 5)
    heads = (workload.heads, workload.kv_heads, workload.kv_heads, workload.heads)
    query, key, value, gradient = (
        jax.random.normal(k, (1, workload.length, n, head_dim), dtype)
        for k, n in zip(keys, heads, strict=False)
    )
    permutation = jax.random.permutation(keys[4], workload.length).astype(jnp.int32)
    return query, key, value, permutation, gradient


@jax.jit
def _largest_error(found, expected):
    def error(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    return jnp.stack(jax.tree.leaves(jax.tree.map(error, found, expected))).max()


def save(path: Path, card: str, dtype: str, head_dim: int, launch: Launch) -> None:
    """Puts a launch into a table, atomically; a card's first brings along its other entries."""
    table = read_table(path)
    if all(known != card for known, *_ in table):
        table |= {(card, *key): entry for (known, *key), entry in table.items() if known == OTHER}
    table[card, dtype, head_dim] = launch
    temporary = path.with_name(path.name + '.tmp')
    write_table(table, temporary)
    os.replace(temporary, path)


def launch_in(path: Path, card: str, dtype: str, head_dim: int) -> Launch:
    """A table's launch for a card; that of the others where the table doesn't name it."""
    table = read_table(path)
    return table.get((card, dtype, head_dim)) or table[OTHER, dtype, head_dim]


def search(
    path: Path,
    card: str,
    entries: Sequence[tuple[str, int]],
    workload: Workload,
    journal: Journal,
    *,
    seconds: float,
    workers: int,
    make_bench: Callable = Bench,
    clock: Callable[[], float] = time.monotonic,
    on_part: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Searches all parts of some entries of a table and writes every winner at once.

    Args:
      path: the table.
      card: such as 'sm90'.
      entries: (dtype, head_dim).
      workload: the calls to time.
      journal: what is decided in it already is left as it is.
      seconds: for everything, shared evenly among the parts that are left.
      workers: launches to compile at a time.
      make_bench: what prepares and times launches.
      clock: seconds.
      on_part: called with the name of each part before its search.

    Returns:
      A line for each part that changed.
    """
    end = clock() + seconds
    places = [(dtype, head_dim, part) for dtype, head_dim in entries for part in PARTS]
    changes = []
    for number, (dtype, head_dim, part) in enumerate(places):
        place, now = f'{dtype} {head_dim} {part}', clock()
        on_part(place)
        if place in journal.winners or now >= end:
            continue
        launch = launch_in(path, card, dtype, head_dim)
        bench = make_bench(workload, dtype, head_dim, part, launch)
        share = (end - now) / (len(places) - number)
        winner, medians = tune(
            place,
            launch,
            variants(launch, part),
            bench.prepare,
            bench.time_once,
            journal,
            as_json=dataclasses.asdict,
            try_until=now + _TRYING * share,
            race_until=now + share,
            clock=clock,
            workers=workers,
        )
        times = {'seconds': medians[winner], 'before': medians[launch]}
        if winner != launch:
            save(path, card, dtype, head_dim, winner)
            changes.append(
                f'{place}: {describe(launch, part)} -> {describe(winner, part)}, '
                f'{1e3 * medians[launch]:.3f} -> {1e3 * medians[winner]:.3f} ms'
            )
        # Last: what the journal says is decided is in the table.
        journal.note(place, 'won', dataclasses.asdict(winner), **times)
    return changes
