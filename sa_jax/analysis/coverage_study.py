"""Coverage over kinds, lengths, windows and seeds: what `experiments.receptive_field` runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from sa_jax.analysis import closed_forms
from sa_jax.analysis.adjacency import KINDS, Runs, layer_permutation, layer_runs
from sa_jax.analysis.coverage import Share, receptive_fields, share_by_distance, share_seen

# Bidirectional over a line of slots, as the attention functions are by default, and over a circle,
# as theory has it.
SETTINGS = ('bidirectional', 'circular', 'causal')
SHARES = (0.5, 0.99, 1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One pattern at one size."""

    kind: str
    setting: str
    n: int
    window: int

    @property
    def is_causal(self) -> bool:
        """Whether later tokens stay unseen."""
        return self.setting == 'causal'

    @property
    def is_circular(self) -> bool:
        """Whether windows wrap around."""
        return self.setting == 'circular'

    def layer(self, permutation: np.ndarray, *, causal: bool | None = None) -> tuple[Runs, ...]:
        """A layer's windows, causal as in this case if nothing else is said."""
        return layer_runs(
            self.kind,
            self.n,
            window=self.window,
            causal=self.is_causal if causal is None else causal,
            circular=self.is_circular,
            permutation=None if self.kind == 'swa' else permutation,
        )

    def counts(self) -> np.ndarray:
        """Slots in each slot's window, as the closed forms take them."""
        (runs,) = self.layer(np.arange(self.n), causal=False)
        return runs.stop - runs.first


@dataclasses.dataclass(frozen=True)
class Study:
    """What is run.

    Raises:
      ValueError: a setting that can't be, naming its flag.
    """

    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536, 131_072)
    windows: tuple[int, ...] = (16, 64, 256, 1024)
    seeds: int = 3
    first_seed: int = 0
    sampled: int = 256
    exact_up_to: int = 4096
    max_layers: int = 64
    # The fly's brain, as the paper has it, through as many layers as its 360M model has.
    focus_length: int = 130_000
    focus_window: int = 256
    focus_layers: int = 24

    def __post_init__(self):
        for name in ('kinds', 'lengths', 'windows'):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f'--{name}={_joined(values)}; expected some, each once')
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f'--kinds: {kind!r}; expected some of {_joined(KINDS)}')
        least = {'lengths': 1, 'windows': 2, 'seeds': 1, 'first_seed': 0, 'sampled': 2}
        least |= {'exact_up_to': 1, 'max_layers': 1}
        least |= {'focus_length': 1, 'focus_window': 2, 'focus_layers': 1}
        for name, minimum in least.items():
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if value < minimum:
                    raise ValueError(f'--{name}: {value}; expected at least {minimum}')
        pairs = [(max(self.windows), min(self.lengths), 'windows', 'lengths')]
        pairs += [(self.focus_window, self.focus_length, 'focus_window', 'focus_length')]
        for window, n, windows, lengths in pairs:
            if window > n:
                raise ValueError(
                    f'--{windows}: {window} is wider than {n} of --{lengths}; expected windows of '
                    'at most as many tokens as there are: a smaller window or more tokens'
                )

    def sweep(self) -> list[Case]:
        """The cases of the sweep, the shortest first."""
        settings = [x for x in SETTINGS if x != 'circular']
        cases = itertools.product(self.lengths, settings, self.windows, self.kinds)
        return [Case(kind, setting, n, window) for n, setting, window, kind in cases]

    def focus(self) -> list[Case]:
        """The cases whose every layer is reported; chunks have no circle."""
        cases = [
            Case(kind, setting, self.focus_length, self.focus_window)
            for setting, kind in itertools.product(SETTINGS, self.kinds)
        ]
        return [x for x in cases if not (x.kind == 'partition' and x.is_circular)]

    def seeds_of(self, case: Case) -> range:
        """Nothing of a sliding window is random but the choice of queries."""
        return range(self.first_seed, self.first_seed + (1 if case.kind == 'swa' else self.seeds))

    def runs(self) -> int:
        """How often a stack is walked through."""
        return sum(len(self.seeds_of(case)) for case in self.sweep() + self.focus())

    def queries(self, n: int, seed: int) -> np.ndarray:
        """All tokens, or as many as are sampled: ascending, int64."""
        if n <= max(self.exact_up_to, self.sampled):
            return np.arange(n)
        return np.sort(np.random.default_rng(seed).choice(n, self.sampled, replace=False))


def run(study: Study, advance: Callable[[Case], None]) -> dict:
    """Walks through all stacks.

    Args:
      study: what is run.
      advance: called after each walk.

    Returns:
      JSON: 'sweep' and 'focus', a list of cases each.
    """
    figures: dict = {'sweep': [], 'focus': []}
    for n, group in itertools.groupby(study.sweep(), lambda case: case.n):
        draw = drawer(n)
        for case in group:
            figures['sweep'].append(_sweep_case(study, case, draw, advance))
    draw = drawer(study.focus_length)
    for case in study.focus():
        figures['focus'].append(focus_case(study, case, draw, advance))
    return figures


def expected_layers(case: Case) -> tuple[int | None, ...] | None:
    """Layers to each of SHARES by formula; None where there is no formula."""
    if case.kind == 'sa_swa':
        return None
    options = {'causal': case.is_causal}
    if case.kind == 'swa':
        options['circular'] = case.is_circular
        return tuple(
            closed_forms.sliding_window_layers(case.n, case.window, share, **options)
            for share in SHARES
        )
    return closed_forms.stochastic_layers(case.counts(), SHARES, **options)


def expected_shares(case: Case, layers: int) -> list[float] | None:
    """Connected pairs by depth by formula; None where there is no formula."""
    if case.kind == 'sa_swa':
        return None
    if case.kind == 'swa':
        options = {'causal': case.is_causal, 'circular': case.is_circular}
        return [
            closed_forms.sliding_window_share(case.n, case.window, layer, **options)
            for layer in range(1, layers + 1)
        ]
    shares = closed_forms.stochastic_share(case.counts(), case.is_causal)
    return [float(x) for x in itertools.islice(shares, layers)]


def drawer(n: int) -> Callable[[int, int], np.ndarray]:
    """Draws the permutation of a seed's layer once for all kinds, settings and windows."""

    @functools.cache
    def draw(seed: int, layer: int) -> np.ndarray:
        return layer_permutation(jax.random.key(seed), layer, n)

    return draw


def _walk(case: Case, queries: np.ndarray, seed: int, draw) -> Iterator[np.ndarray]:
    """Yields what the queries see, layer by layer and without end."""
    if case.kind == 'swa':
        layers = itertools.repeat(case.layer(np.arange(case.n)))
    else:
        layers = (case.layer(draw(seed, layer)) for layer in itertools.count())
    return receptive_fields(layers, queries)


def _sweep_case(study: Study, case: Case, draw, advance) -> dict:
    """Layers to each share. A walk ends where no share is left that max_layers should reach."""
    expected = expected_layers(case)
    wanted = [
        share
        for share, layers in zip(SHARES, expected or [1] * len(SHARES), strict=True)
        if layers is not None and layers <= study.max_layers
    ]
    runs = []
    for seed in study.seeds_of(case):
        queries = study.queries(case.n, seed)
        shares: list[Share] = []
        for bits in itertools.islice(_walk(case, queries, seed, draw), study.max_layers):
            shares.append(share_seen(bits, queries, case.is_causal))
            if all(shares[-1].connected >= share for share in wanted):
                break
        runs.append(
            {
                'seed': seed,
                'layers_to': [_first_at_least(shares, share) for share in SHARES],
                'layers': len(shares),
                'last_connected': shares[-1].connected,
                'last_worst': shares[-1].worst,
                'largest_sampling_error': max(x.sampling_error for x in shares),
            }
        )
        advance(case)
    described = _describe(case, study)
    return described | {'expected_layers_to': expected and list(expected), 'runs': runs}


def focus_case(study: Study, case: Case, draw, advance) -> dict:
    """Shares after every layer, up to the one that connects all."""
    edges = _distances(case.n)
    depths = sorted({x for x in (1, 2, 4, 8, 16) if x < study.focus_layers} | {study.focus_layers})
    runs = []
    for seed in study.seeds_of(case):
        queries = study.queries(case.n, seed)
        shares, by_distance = [], {}
        walk = itertools.islice(_walk(case, queries, seed, draw), study.focus_layers)
        for layer, bits in enumerate(walk, start=1):
            shares.append(share_seen(bits, queries, case.is_causal))
            if case.is_causal and layer in depths:
                by_distance[str(layer)] = _measured(share_by_distance(bits, queries, edges))
            if shares[-1].connected == 1:
                break
        layers_to = [_first_at_least(shares, share) for share in SHARES]
        columns = {name: [getattr(x, name) for x in shares] for name in Share._fields}
        walked = {'seed': seed, 'layers_to': layers_to, 'layers': len(shares)}
        runs.append(walked | columns | {'by_distance': by_distance})
        advance(case)
    expected = expected_layers(case)
    figures = _describe(case, study) | {
        'expected_layers_to': expected and list(expected),
        'expected_connected': expected_shares(case, study.focus_layers),
        'runs': runs,
    }
    if case.is_causal and case.kind in ('sa', 'partition'):
        figures['distances'] = edges[:-1]
        figures['expected_by_distance'] = _expected_by_distance(case, edges, depths)
    return figures


def _expected_by_distance(case: Case, edges: Sequence[int], depths: Sequence[int]) -> dict:
    found, pairs = {}, np.arange(case.n, 0, -1)
    shares = closed_forms.causal_share_by_distance(case.counts())
    for layer, share in enumerate(itertools.islice(shares, depths[-1]), start=1):
        if layer in depths:
            found[str(layer)] = [
                float(np.average(share[low:high], weights=pairs[low:high]))
                for low, high in itertools.pairwise(edges)
            ]
    return found


def _measured(shares: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else float(x) for x in shares]


def _distances(n: int) -> list[int]:
    """Edges of bins of distances: 1, 2, 4, … and n."""
    return [*(2**k for k in range(max(n - 1, 1).bit_length())), max(n, 2)]


def _describe(case: Case, study: Study) -> dict:
    count = len(study.queries(case.n, study.first_seed))
    return dataclasses.asdict(case) | {'queries': count, 'is_exact': count == case.n}


def _first_at_least(shares: Sequence[Share], share: float) -> int | None:
    return next((k for k, x in enumerate(shares, start=1) if x.connected >= share), None)


def _joined(values: Sequence) -> str:
    return ','.join(map(str, values))
