"""The coverage experiment on tiny stacks."""

import json

import pytest


@pytest.mark.slow
def test_receptive_field(run_experiment, tmp_path):
    flags = ['--lengths=40,90', '--windows=5,9', '--seeds=2', '--exact_up_to=50', '--sampled=30']
    flags += ['--max_layers=6', '--focus_length=64', '--focus_window=8', '--focus_layers=5']
    done = run_experiment('receptive_field', f'--workdir={tmp_path / "out"}', *flags)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'out' / 'receptive_field.md').read_text() in done.stdout
    for name in ('receptive_field', 'depth'):
        assert (tmp_path / 'out' / f'{name}.png').stat().st_size > 0
        assert '<svg' in (tmp_path / 'out' / f'{name}.svg').read_text()
    result = json.loads((tmp_path / 'out' / 'result.json').read_text())
    assert result['config']['lengths'] == [40, 90]
    assert result['seeds'] == {'permutations and queries': [0, 1]}
    sweep, focus = result['figures']['sweep'], result['figures']['focus']
    assert len(sweep) == 2 * 2 * 2 * 4
    assert {(x['n'], x['queries'], x['is_exact']) for x in sweep} == {
        (40, 40, True),
        (90, 30, False),
    }
    assert len(focus) == 3 * 4 - 1
    (sa,) = (x for x in focus if (x['kind'], x['setting']) == ('sa', 'causal'))
    assert sa['distances'] == [1, 2, 4, 8, 16, 32]
    assert all(len(x['by_distance']['5']) == 6 for x in sa['runs'])
    assert 'NaN' not in (tmp_path / 'out' / 'result.json').read_text()


@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('--lengths=1024,few', "--lengths: 'few'; expected whole numbers, as in 1024,4096"),
        ('--windows=16,2048', '--windows: 2048 is wider than 1024 of --lengths'),
    ],
)
def test_bad_flags_are_named(run_experiment, tmp_path, flag, message):
    done = run_experiment('receptive_field', f'--workdir={tmp_path / "out"}', flag)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert 'Traceback' not in done.stderr
    assert not (tmp_path / 'out').exists()
