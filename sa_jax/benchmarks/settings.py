"""What a sweep measures: sizes, patterns, implementations, peers, and how they are timed."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The kinds of each peer. Of these FlexAttention alone has the stochastic ones.
PEERS = {
    'jax_xla': ('full',),
    'jax_cudnn': ('full', 'sliding_window'),
    'tokamax': ('full', 'sliding_window', 'sliding_window_two_sided'),
    'torch_sdpa': ('full',),
    'torch_flex': (
        'full',
        'sliding_window',
        'sliding_window_two_sided',
        'stochastic',
        'stochastic_partition',
    ),
}
MODES = ('forward', 'forward_backward')
DTYPES = ('float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The settings of a sweep; the defaults fit a CPU.

    Attributes:
      lengths: tokens, ascending.
      kinds: attention functions by their registered names, besides 'sa_swa' (stochastic and
        sliding-window attention joined by sigmoid gates) and 'sliding_window_two_sided' (the
        stochastic window's geometry in the tokens' own order).
      implementations: of this package's functions; 'default' is what a call without one takes.
      peers: what to compare with, of PEERS.
      dtypes: of query, key and value.
      modes: of MODES.
      batch: examples.
      heads: query heads.
      kv_heads: key and value heads, a divisor of heads.
      head_dim: channels of a head.
      window: keys a window spans, the query itself included.
      chunk_size: tokens of a random partition's chunk.
      block_size: keys of a MoBA block.
      top_k: MoBA blocks per query.
      flex_block_size: edge of the blocks of FlexAttention's masks.
      is_causal: whether a token sees only its predecessors.
      options: of kinds that other packages register, by kind.
      rounds: counted calls, or runs of calls, of each case.
      min_ms: a round repeats a case's call until about this long has passed.
      pause_ms: rest before each measurement, for the threads of the one before to fall asleep.
      time_limit_s: cases whose one call takes longer are left out.
      memory_limit_gib: cases that need more are left out; 0 for most of what there is.
      check_length: tokens of the comparison with the reference.
      matmul_size: edge of the square product that the device's rate is measured with.
      seed: of inputs and permutation.
    """

    lengths: tuple[int, ...] = tuple(2**e for e in range(9, 18))
    kinds: tuple[str, ...] = (
        'full',
        'sliding_window',
        'sliding_window_two_sided',
        'stochastic',
        'sa_swa',
        'stochastic_partition',
        'moba',
    )
    implementations: tuple[str, ...] = ('default',)
    peers: tuple[str, ...] = tuple(PEERS)
    dtypes: tuple[str, ...] = ('float32',)
    modes: tuple[str, ...] = MODES
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    window: int = 257
    chunk_size: int = 256
    block_size: int = 128
    top_k: int = 2
    flex_block_size: int = 128  # PyTorch's default
    is_causal: bool = True
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    rounds: int = 9
    min_ms: float = 20.0
    pause_ms: float = 20.0
    time_limit_s: float = 10.0
    memory_limit_gib: float = 0.0
    check_length: int = 512
    matmul_size: int = 2048
    seed: int = 0

    def __post_init__(self):
        counts = ('batch', 'heads', 'kv_heads', 'head_dim', 'window', 'chunk_size', 'block_size')
        counts += ('top_k', 'flex_block_size', 'rounds', 'check_length', 'matmul_size')
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}; expected at least 1')
        for name, known in (('modes', MODES), ('dtypes', DTYPES), ('peers', PEERS)):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f'{name}: {value!r}; expected {", ".join(known)}')
        for name in ('lengths', 'kinds', 'implementations', 'dtypes', 'modes'):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f'{name} is {list(values)}; expected one or more, each once')
        if min(self.lengths) < 1 or list(self.lengths) != sorted(self.lengths):
            raise ValueError(
                f'lengths are {list(self.lengths)}; expected them ascending, from 1 on'
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f'heads is {self.heads} and kv_heads {self.kv_heads}; expected a divisor of heads'
            )

    def to_json(self) -> dict[str, Any]:
        """The settings as what they read as after a round trip through JSON."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


class Case(NamedTuple):
    """One line of a table: a pattern by an implementation or peer, in a precision and a mode."""

    kind: str
    implementation: str
    dtype: str
    mode: str

    def __str__(self):
        return ' '.join(self)


def cases(sweep: Sweep) -> list[Case]:
    """All cases of a sweep, this package's own before the peers of the same kind."""
    return [
        Case(kind, implementation, dtype, mode)
        for dtype, mode, kind in itertools.product(sweep.dtypes, sweep.modes, sweep.kinds)
        for implementation in (
            *sweep.implementations,
            *(peer for peer in sweep.peers if kind in PEERS[peer]),
        )
    ]


class Draw(NamedTuple):
    """What some patterns take besides query, key and value."""

    permutation: np.ndarray  # int32 [T], the token in each slot
    gates: np.ndarray  # float32 [B, T, 2, N, 1], logits of the paths' gates


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """What attention is called with, standard normal float32; told apart by identity."""

    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, T, K, H]
    value: np.ndarray  # [B, T, K, H]
    gradient: np.ndarray  # [B, T, N, H], of the output
    draw: Draw

    @property
    def numbers(self) -> tuple[np.ndarray, ...]:
        """Query, key, value and the output's gradient."""
        return self.query, self.key, self.value, self.gradient

    def rounded(self, dtype: str) -> 'Inputs':
        """The same numbers as `dtype` holds them, still in float32."""
        return Inputs(
            *(x.astype(jnp.dtype(dtype)).astype(np.float32) for x in self.numbers), self.draw
        )


def draw_inputs(sweep: Sweep, length: int) -> Inputs:
    """Draws the inputs of a length."""
    rng = np.random.default_rng((sweep.seed, length))
    rows = (sweep.batch, length)
    query, key = ((*rows, heads, sweep.head_dim) for heads in (sweep.heads, sweep.kv_heads))
    numbers = [rng.standard_normal(shape, np.float32) for shape in (query, key, key, query)]
    gates = rng.standard_normal((*rows, 2, sweep.heads, 1), np.float32)
    return Inputs(*numbers, Draw(rng.permutation(length).astype(np.int32), gates))


def default_sweep(*, is_quick: bool = False) -> Sweep:
    """The defaults for the device JAX runs on, a GPU's if there is one; quick ones take minutes."""
    quick = {'lengths': (512, 2048, 8192), 'rounds': 3} if is_quick else {}
    if jax.default_backend() != 'gpu':
        return Sweep(**quick)
    return Sweep(
        **quick,
        dtypes=('bfloat16',),
        heads=16,
        kv_heads=16,
        window=256,
        min_ms=5.0,
        pause_ms=0.0,
        matmul_size=8192,
    )
