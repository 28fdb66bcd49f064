"""Interleaved timing."""

import gc
import time

import pytest

from sa_jax.benchmarks.timing import calls_per_round, interleaved


def test_every_case_once_a_round_and_the_first_one_changes():
    seen = []
    runs = {name: lambda calls, name=name: seen.append((name, calls)) for name in 'abc'}
    measured = []
    seconds = interleaved(
        runs,
        {'a': 1, 'b': 2, 'c': 3},
        rounds=4,
        pause=0.0,
        on_measured=lambda: measured.append(gc.isenabled()),
    )
    assert ''.join(name for name, _ in seen) == 'abcbcacababc'
    assert set(seen) == {('a', 1), ('b', 2), ('c', 3)}
    assert [len(x) for x in seconds.values()] == [4, 4, 4]
    assert measured == [False] * 12
    assert gc.isenabled()


def test_seconds_are_those_of_one_call_without_the_pause():
    runs = {'sleep': lambda calls: time.sleep(0.02 * calls)}
    seconds = interleaved(runs, {'sleep': 3}, rounds=2, pause=0.2)['sleep']
    assert all(0.02 <= x < 0.06 for x in seconds)


@pytest.mark.parametrize(('seconds', 'calls'), [(1e-3, 20), (0.5, 1), (0.0, 1000)])
def test_short_calls_are_repeated(seconds, calls):
    assert calls_per_round(seconds, 0.02) == calls
