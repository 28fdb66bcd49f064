"""The race of settings, against a clock made up for it."""

import itertools

import pytest

from sa_jax.benchmarks.tuning import Journal, nearest_first, race, tune

CHOICES = {'block': (32, 64, 128), 'warps': (4, 8)}


def test_tries_the_nearest_first_and_each_once():
    start = {'block': 64, 'warps': 4}
    order = nearest_first(start, CHOICES)
    assert len(order) == 5
    assert start not in order
    assert {tuple(x.values()) for x in order[:3]} == {(32, 4), (128, 4), (64, 8)}
    # A start that is no choice is among its neighbours, and all choices are tried.
    order = nearest_first({'block': 48, 'warps': 8}, CHOICES)
    assert len(order) == 6
    assert order[0]['warps'] == 8


class Clock:
    """Seconds per setting, times a drift that grows with every call."""

    def __init__(self, seconds, drift=0.0):
        self.seconds, self.drift, self.calls = seconds, drift, []

    def __call__(self, setting):
        self.calls.append(setting)
        return self.seconds[setting] * (1 + self.drift * len(self.calls))


def test_the_fastest_wins_and_the_slow_drop_out():
    clock = Clock({'old': 1.0, 'new': 0.8, 'close': 0.85, 'slow': 3.0})
    outcome = race('old', ['new', 'close', 'slow'], clock, rounds=7, least_rounds=2)
    assert outcome.winner == 'new'
    assert outcome.medians == {'old': 1.0, 'new': 0.8, 'close': 0.85, 'slow': 3.0}
    assert clock.calls.count('slow') == 2
    assert clock.calls.count('new') == clock.calls.count('old') == 7


def test_a_drifting_clock_favours_nobody():
    # By the last call everything takes thrice as long: one after another, 'new' would lose.
    clock = Clock({'old': 1.0, 'new': 0.9}, drift=0.1)
    assert race('old', ['new'], clock, rounds=10).winner == 'new'


def test_the_incumbent_keeps_its_place_against_noise():
    clock = Clock({'old': 1.0, 'new': 0.99})
    assert race('old', ['new', 'old'], clock).winner == 'old'
    assert clock.calls.count('old') == 9


def test_ends_when_time_is_up_but_not_before_the_least_rounds():
    clock, left = Clock({'old': 1.0, 'new': 0.5}), itertools.repeat(False)
    outcome = race('old', ['new'], clock, least_rounds=3, is_time_left=lambda: next(left))
    assert clock.calls == ['old', 'new'] * 3
    assert outcome.winner == 'new'


def test_one_wild_time_decides_nothing():
    times = {'old': iter([1.0] * 9), 'new': iter([0.9, 0.9, 9.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])}
    outcome = race('old', ['new'], lambda setting: next(times[setting]))
    assert outcome.winner == 'new'
    assert outcome.medians['new'] == pytest.approx(0.9)


class Bench:
    """Settings are numbers: the seconds they take. Time passes only where they are worked with."""

    def __init__(self, path, broken=(), ends=None):
        self.journal = Journal(path, {'card': 'none'})
        self.broken, self.ends, self.now, self.prepared = broken, ends, 0.0, []

    def prepare(self, setting):
        self.prepared.append(setting)
        self.now += 1.0
        if setting == self.ends:
            raise KeyboardInterrupt
        if setting in self.broken:
            raise ValueError(f'{setting} spills')
        return setting

    def time_once(self, setting):
        self.now += setting
        return setting

    def tune(self, incumbent, candidates, try_until=100.0, race_until=1000.0):
        return tune(
            'forward',
            incumbent,
            candidates,
            self.prepare,
            self.time_once,
            self.journal,
            as_json=lambda setting: {'seconds': setting},
            try_until=try_until,
            race_until=race_until,
            clock=lambda: self.now,
        )


def test_what_fails_is_out_and_is_not_tried_again(tmp_path):
    bench = Bench(tmp_path / 'journal.jsonl', broken=[0.1])
    assert bench.tune(1.0, [0.1, 0.5, 0.7]).winner == 0.5
    bench.journal.note('forward', 'won', {'seconds': 0.5}, before=1.0)
    assert bench.journal.failure('forward', {'seconds': 0.1}) == 'ValueError: 0.1 spills'
    bench.journal.close()
    again = Bench(tmp_path / 'journal.jsonl')
    assert again.journal.winners == {'forward': {'seconds': 0.5}}
    again.tune(1.0, [0.1, 0.5, 0.7])
    assert again.prepared == [1.0, 0.5, 0.7]


def test_tries_no_more_than_there_is_time_for(tmp_path):
    bench = Bench(tmp_path / 'journal.jsonl')
    outcome = bench.tune(1.0, [0.9, 0.8, 0.7, 0.1], try_until=3.0)
    assert bench.prepared == [1.0, 0.9, 0.8]
    assert outcome.winner == 0.8


def test_what_ended_the_process_is_tried_once_more_and_last(tmp_path):
    path = tmp_path / 'journal.jsonl'
    for prepared in ([1.0, 0.9, 0.5], [1.0, 0.9, 0.8, 0.5], [1.0, 0.9, 0.8]):
        bench = Bench(path, ends=0.5)
        if prepared[-1] == 0.5:
            with pytest.raises(KeyboardInterrupt):
                bench.tune(1.0, [0.9, 0.5, 0.8])
        else:
            assert bench.tune(1.0, [0.9, 0.5, 0.8]).winner == 0.8
        assert bench.prepared == prepared
        bench.journal.close()
        # As if the machine had failed in the middle of a line.
        path.write_text(path.read_text() + '{"place": "forw')


def test_a_journal_of_another_search_is_refused(tmp_path):
    Journal(tmp_path / 'journal.jsonl', {'card': 'sm80'}).close()
    with pytest.raises(ValueError, match='belongs to another search'):
        Journal(tmp_path / 'journal.jsonl', {'card': 'sm90'})
