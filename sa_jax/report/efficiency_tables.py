"""Tables of an efficiency sweep, from its result file.

A ratio is taken within each round, between calls seconds apart, so that slow changes of the machine
cancel; its median and quartiles over the rounds are given. Between lengths, which have no rounds in
common, it is the ratio of the medians.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sa_jax.benchmarks import patterns, peers
from sa_jax.benchmarks.settings import PEERS, Case
from sa_jax.report import markdown, paper

NOT_MEASURED = 'not measured'
_MODES = {'forward': 'forward', 'forward_backward': 'forward + backward'}


class Spread(NamedTuple):
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> 'Spread':
        """The spread of a number per round."""
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
        return cls(float(median), float(low), float(high))


class Measurements:
    """The measured cases of a result, in the order of the sweep.

    Attributes:
      lengths: all lengths of the sweep.
      cases: those measured at one length at least.
    """

    def __init__(self, result: dict):
        self._lengths = {x['length']: x for x in result['figures']['lengths']}
        self._records = {
            (_case(x), length): x
            for length, lengths in self._lengths.items()
            for x in lengths['cases']
            if 'seconds' in x
        }
        self.lengths = list(self._lengths)
        self.cases = list(dict.fromkeys(case for case, _ in self._records))

    def seconds(self, case: Case, length: int) -> list[float] | None:
        """Seconds per call in each round; None if not measured."""
        record = self._records.get((case, length))
        return record and record['seconds']

    def time(self, case: Case, length: int) -> Spread | None:
        """Milliseconds per call."""
        seconds = self.seconds(case, length)
        return seconds and Spread.of([1e3 * x for x in seconds])

    def ratio(self, case: Case, base: Case, length: int) -> Spread | None:
        """The time of a case over that of another at the same length."""
        times = self.seconds(case, length), self.seconds(base, length)
        if None in times:
            return None
        return Spread.of([a / b for a, b in zip(*times, strict=True)])

    def growth(self, case: Case, length: int, factor: int = 4) -> float | None:
        """The median time over that at a `factor`th of the length."""
        times = self.time(case, length), self.time(case, length // factor)
        return None if None in times else times[0].median / times[1].median

    def share(self, case: Case, length: int) -> Spread | None:
        """FLOP/s over those of a large matrix product in the same precision and round."""
        seconds = self.seconds(case, length)
        if seconds is None:
            return None
        product = self._lengths[length]['matmul'][case.dtype]
        flops = self._records[case, length]['flops'] / product['flops']
        return Spread.of([flops * b / a for a, b in zip(seconds, product['seconds'], strict=True)])

    def rate(self, dtype: str) -> float:
        """FLOP/s of the large matrix product, the median over all rounds."""
        products = (x['matmul'][dtype] for x in self._lengths.values())
        return float(np.median([x['flops'] / s for x in products for s in x['seconds']]))

    def peak_bytes(self, case: Case, length: int) -> int | None:
        """Memory for temporaries and results."""
        return self._records.get((case, length), {}).get('peak_bytes')

    def note(self, case: Case, length: int, name: str) -> float | None:
        """Seconds spent beforehand on `name`."""
        return self._records.get((case, length), {}).get('notes', {}).get(name)


def is_peer(case: Case) -> bool:
    """Whether another library runs the case."""
    return case.implementation in PEERS


def case_label(case: Case) -> str:
    """Pattern and, unless it is this package's default, implementation."""
    label = patterns.label(case.kind)
    if case.implementation == 'default':
        return label
    return f'{label} ({peers.LABELS.get(case.implementation, case.implementation)})'


def device_label(result: dict) -> str:
    """What the sweep ran on."""
    device = result['device']
    return device['host'] if device['platform'] == 'cpu' else device['kind']


def settings_label(result: dict) -> str:
    """The sweep's sizes in a line."""
    sweep = result['config']
    text = f'batch {sweep["batch"]}, {sweep["heads"]} heads of {sweep["head_dim"]}'
    if sweep['kv_heads'] != sweep['heads']:
        text += f', {sweep["kv_heads"]} key and value heads'
    return f'{text}, window {sweep["window"]}, chunk {sweep["chunk_size"]}'


def tables(result: dict) -> str:
    """All tables of a result, in Markdown."""
    data = Measurements(result)
    parts = [_preface(result, data)]
    for dtype in result['config']['dtypes']:
        for mode in result['config']['modes']:
            cases = [x for x in data.cases if (x.dtype, x.mode) == (dtype, mode)]
            if cases:
                parts += _mode_tables(data, cases, f'{_MODES[mode]}, {dtype}')
        ratios = _ratios(data, [x for x in data.cases if x.dtype == dtype])
        parts += _titled(f'Ratios of times, {dtype}', data, ratios, _spread)
        parts.append(_beside_paper(result, data, dtype))
    parts.append(_left_out(result))
    return '\n\n'.join(x for x in parts if x) + '\n'


def _preface(result: dict, data: Measurements) -> str:
    versions = ', '.join(
        f'{name} {result["versions"][name]}'
        for name in ('jax', 'torch', 'tokamax')
        if name in result['versions']
    )
    sweep = result['config']
    rates = ', '.join(f'{data.rate(x) / 1e12:.3g} TFLOP/s ({x})' for x in sweep['dtypes'])
    threads = result['figures']['threads']
    variables = ''.join(f'; {x}={y}' for x, y in result['device']['environment'].items())
    return f"""# Efficiency

On {device_label(result)}; {settings_label(result)}; {versions}; CPU threads of each library: \
{threads}{variables}. Medians (quartiles) of {sweep['rounds']} interleaved rounds. A square matrix \
product of edge {sweep['matmul_size']:,} ran at {rates}."""


def _mode_tables(data: Measurements, cases: list[Case], title: str) -> list[str]:
    """Time, speed-up over full attention, share of the matrix rate, memory, block masks."""
    every = [(case_label(x), x) for x in cases]
    full = [x for x in cases if x.kind == 'full']
    pairs = [
        (f'{case_label(x)} over {case_label(base)}', (base, x))
        for x in cases
        if x.kind != 'full' and not is_peer(x)
        for base in full
    ]
    masks = [(case_label(x), x) for x in cases if x.implementation == 'torch_flex']

    def rows(named, value):
        return [(name, [value(x, n) for n in data.lengths]) for name, x in named]

    return [
        *_titled(f'Time of a call, ms: {title}', data, rows(every, data.time), _spread),
        *_titled(
            f'Speed-up over full attention: {title}',
            data,
            rows(pairs, lambda pair, n: data.ratio(*pair, n)),
            lambda x: _spread(x, '×'),
        ),
        *_titled(
            f'FLOP/s of visible pairs, % of the matrix product: {title}',
            data,
            rows(every, data.share),
            lambda x: f'{100 * x.median:.3g}',
        ),
        *_titled(
            f'Memory for temporaries and results, MiB: {title}',
            data,
            rows(every, data.peak_bytes),
            lambda x: f'{x / 2**20:,.0f}',
        ),
        *_titled(
            f'Building the block mask beforehand, ms (not in the times above): {title}',
            data,
            rows(masks, lambda x, n: data.note(x, n, 'block_mask_s')),
            lambda x: _number(1e3 * x),
        ),
    ]


def _ratios(data: Measurements, cases: list[Case]) -> list[tuple[str, list[Spread | float | None]]]:
    """Ratios to the same pattern elsewhere, between patterns, between passes and lengths."""
    rows = []

    def add(name: str, value: Callable[[int], Spread | float | None]) -> None:
        rows.append((name, [value(n) for n in data.lengths]))

    for mode, title in _MODES.items():
        own = {x.kind: x for x in reversed(cases) if x.mode == mode and not is_peer(x)}
        others = [x for x in cases if x.mode == mode and is_peer(x)]
        for peer in others:
            if (case := own.get(peer.kind)) and peer.kind != 'full':
                name = f'{case_label(case)} / {peers.LABELS[peer.implementation]}, same pattern'
                add(f'{name}: {title}', lambda n, a=case, b=peer: data.ratio(a, b, n))
        if (sa := own.get('stochastic')) is None:
            continue
        bases = [own.get(patterns.TWO_SIDED)]
        bases += [x for x in others if x[:2] == ('sliding_window', 'jax_cudnn')]
        for base in filter(None, bases):
            name = f'{case_label(sa)} / {case_label(base)}: {title}'
            add(name, lambda n, a=sa, b=base: data.ratio(a, b, n))
    for case in cases:
        forward = case._replace(mode='forward')
        if case.mode == 'forward_backward' and forward in cases:
            name = f'{case_label(case)}: forward + backward / forward'
            add(name, lambda n, a=case, b=forward: data.ratio(a, b, n))
    for case in cases:
        if not is_peer(case):
            name = f'{case_label(case)}: time / time at a quarter of the length'
            add(f'{name}: {_MODES[case.mode]}', lambda n, a=case: data.growth(a, n))
    return rows


def _beside_paper(result: dict, data: Measurements, dtype: str) -> str:
    """The paper's Table 2 beside this sweep's forward pass."""
    cases = [x for x in data.cases if (x.dtype, x.mode) == (dtype, 'forward')]
    full = [x for x in cases if x.kind == 'full']
    sa = [x for x in cases if x.kind in ('stochastic', 'stochastic_partition') and not is_peer(x)]
    header = ['tokens', 'paper: SA, ms', 'paper: full, ms', 'paper: speed-up']
    header += [f'{case_label(x)}, ms' for x in (*sa, *full)]
    header += [f'{case_label(x)} over {case_label(base)}' for x in sa for base in full]
    rows = []
    for length, theirs in paper.EFFICIENCY.items():
        row = [f'{length:,}', f'{theirs.sa_ms:,}', f'{theirs.full_ms:,g}', f'{theirs.speed_up}×']
        row += [_cell(data.time(x, length), _spread) for x in (*sa, *full)]
        row += [
            _cell(data.ratio(base, x, length), lambda y: _spread(y, '×'))
            for x in sa
            for base in full
        ]
        rows.append(row)
    # Long names read better down a column: a table on its side.
    columns = [list(x) for x in zip(header, *rows, strict=True)]
    note = (
        f"The paper's: {paper.EFFICIENCY_DEVICE}, FlexAttention; batch, heads and precision are "
        f'not stated. The others: {device_label(result)}; {settings_label(result)}; {dtype}.'
    )
    return (
        f"## Beside the paper's Table 2: forward, {dtype}\n\n{note}\n\n{markdown.table(*columns)}"
    )


def _left_out(result: dict) -> str:
    """What was not measured, and why."""
    every = [x['length'] for x in result['figures']['lengths']]
    lengths: dict[tuple[str, str], list[int]] = {}
    for record in result['figures']['lengths']:
        for x in record['cases']:
            if 'skipped' in x:
                case = _case(x)
                name = f'{case_label(case)}, {_MODES[case.mode]}'
                name += f', {case.dtype}' if len(result['config']['dtypes']) > 1 else ''
                lengths.setdefault((name, x['skipped']), []).append(record['length'])
    names: dict[tuple[str, str], list[str]] = {}
    for (name, reason), missed in lengths.items():
        where = 'all' if missed == every else ', '.join(f'{n:,}' for n in missed)
        names.setdefault((where, reason), []).append(name)
    rows = [
        [reason.replace('|', '\\|'), where, '; '.join(x)] for (where, reason), x in names.items()
    ]
    return '## Left out\n\n' + markdown.table(['reason', 'tokens', 'cases'], *rows) if rows else ''


def _titled(title: str, data: Measurements, rows: Iterable, form: Callable) -> list[str]:
    """A table over the lengths, without the rows and without the table that nobody measured."""
    rows = [(name, values) for name, values in rows if any(x is not None for x in values)]
    if not rows:
        return []
    header = ['', *(f'{n:,}' for n in data.lengths)]
    body = [[name, *(_cell(x, form) for x in values)] for name, values in rows]
    return [f'## {title}\n\n{markdown.table(header, *body)}']


def _cell(value, form: Callable) -> str:
    return NOT_MEASURED if value is None else form(value)


def _spread(x: Spread | float, unit: str = '') -> str:
    if isinstance(x, float):
        return _number(x) + unit
    return f'{_number(x.median)}{unit} ({_number(x.low)}–{_number(x.high)})'


def _number(x: float) -> str:
    """Three significant digits, no exponent."""
    digits = max(0, 2 - int(np.floor(np.log10(abs(x))))) if x else 0
    return f'{x:,.{digits}f}'


def _case(record: dict) -> Case:
    return Case(*(record[name] for name in Case._fields))
