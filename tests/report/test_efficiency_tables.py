"""Tables and plot of a made-up sweep."""

import pytest

from sa_jax.benchmarks.settings import Sweep
from sa_jax.report import efficiency_plot, efficiency_tables
from sa_jax.report.efficiency_tables import Measurements, Spread

MS = {
    # Three rounds, ms; the machine is twice as slow in the last.
    ('full', 'default', 'forward'): (20, 24, 40),
    ('full', 'torch_sdpa', 'forward'): (10, 10, 20),
    ('stochastic', 'default', 'forward'): (5, 4, 10),
    ('stochastic', 'torch_flex', 'forward'): (10, 8, 20),
    ('sliding_window_two_sided', 'default', 'forward'): (4, 4, 8),
    ('stochastic', 'default', 'forward_backward'): (10, 12, 25),
}


def record(length, scale, skipped=()):
    cases = []
    for (kind, implementation, mode), times in MS.items():
        case = {'kind': kind, 'implementation': implementation, 'dtype': 'float32', 'mode': mode}
        if kind in skipped:
            case['skipped'] = 'about 99 s a call, over the limit of 10 s'
        else:
            case |= {
                'flops': 1e9 * scale,
                'peak_bytes': None if 'torch' in implementation else 3 * 2**20,
                'seconds': [x * scale / 1e3 for x in times],
                'notes': {'block_mask_s': 0.0123} if implementation == 'torch_flex' else {},
            }
        cases.append(case)
    matmul = {'float32': {'flops': 1e9, 'seconds': [1e-3, 1e-3, 2e-3]}}
    return {'length': length, 'matmul': matmul, 'cases': cases}


@pytest.fixture
def result():
    lengths = (2048, 8192)
    kinds = ('full', 'sliding_window_two_sided', 'stochastic')
    return {
        'config': Sweep(lengths=lengths, kinds=kinds, rounds=3).to_json(),
        'device': {
            'kind': 'cpu',
            'platform': 'cpu',
            'host': 'x86_64, 2 CPUs',
            'environment': {'OMP_WAIT_POLICY': 'passive'},
        },
        'versions': {'jax': '0.10.2', 'torch': '2.13.0'},
        'figures': {
            'threads': 2,
            'checks': [],
            'lengths': [record(2048, 1.0), record(8192, 4.5, skipped=('full',))],
        },
    }


def rows(text, title):
    """The cells of the table under a title, by the name of the row."""
    section = next(x for x in text.split('## ') if x.startswith(title))
    lines = [x.strip('| ').split(' | ') for x in section.splitlines() if x.startswith('|')]
    return {x[0]: x[1:] for x in lines[2:]}


def test_ratios_are_taken_within_rounds(result):
    data = Measurements(result)
    cases = {x[:2] + x[3:]: x for x in data.cases}
    sa = cases['stochastic', 'default', 'forward']
    full = cases['full', 'default', 'forward']
    # 20/5, 24/4, 40/10.
    assert data.ratio(full, sa, 2048) == Spread(4.0, 4.0, 5.0)
    assert data.ratio(full, sa, 8192) is None
    assert data.growth(sa, 8192) == pytest.approx(4.5)
    assert data.growth(sa, 2048) is None
    # As many operations as the product, in 5, 4 and 5 times its time.
    assert data.share(sa, 2048).median == pytest.approx(0.2)
    assert data.rate('float32') == 1e12


def test_tables(result):
    text = efficiency_tables.tables(result)
    assert 'ran at 1 TFLOP/s (float32)' in text
    assert 'CPU threads of each library: 2; OMP_WAIT_POLICY=passive. Medians' in text
    times = rows(text, 'Time of a call, ms: forward, float32')
    assert times['SA'] == ['5.00 (4.50–7.50)', '22.5 (20.2–33.8)']
    assert times['full'] == ['24.0 (22.0–32.0)', 'not measured']
    speed_ups = rows(text, 'Speed-up over full attention: forward, float32')
    assert speed_ups['SA over full (PyTorch SDPA)'][0] == '2.00× (2.00–2.25)'
    ratios = rows(text, 'Ratios of times, float32')
    assert ratios['SA / FlexAttention, same pattern: forward'][0] == '0.500 (0.500–0.500)'
    assert ratios['SA / SWA, two-sided: forward'][0] == '1.25 (1.12–1.25)'
    assert ratios['SA: forward + backward / forward'][0] == '2.50 (2.25–2.75)'
    growth = ratios['SA: time / time at a quarter of the length: forward']
    assert growth == ['not measured', '4.50']
    masks = rows(text, 'Building the block mask beforehand')
    assert masks['SA (FlexAttention)'] == ['12.3', '12.3']
    memory = rows(text, 'Memory for temporaries and results, MiB: forward, float32')
    assert memory['SA'] == ['3', '3']
    assert 'SA (FlexAttention)' not in memory


def test_the_papers_figures_stand_beside(result):
    table = rows(efficiency_tables.tables(result), "Beside the paper's Table 2")
    assert table['paper: SA, ms'] == ['5.4', '15.2', '52.8']
    assert table['paper: full, ms'] == ['8', '99.7', '1,477']
    assert table['paper: speed-up'] == ['1.5×', '6.6×', '28.0×']
    assert table['SA over full'] == ['4.00× (4.00–5.00)', 'not measured', 'not measured']


def test_what_is_left_out_is_told_with_the_reason(result):
    left_out = rows(efficiency_tables.tables(result), 'Left out')
    cases = ['8,192', 'full, forward; full (PyTorch SDPA), forward']
    assert left_out == {'about 99 s a call, over the limit of 10 s': cases}


@pytest.mark.parametrize('lengths', [1, 2])
def test_plot(result, tmp_path, lengths):
    del result['figures']['lengths'][lengths:]
    efficiency_plot.plot(result, tmp_path / 'efficiency.png')
    assert (tmp_path / 'efficiency.png').read_bytes().startswith(b'\x89PNG')
