"""Choosing the fastest of several settings: in which order to try them, and a race among them."""

import collections
import concurrent.futures
import json
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Setting = TypeVar('Setting', bound=Hashable)


class Outcome(NamedTuple):
    """The end of a race.

    Attributes:
      winner: the setting to use.
      medians: seconds of every setting that was timed, by setting. Those that dropped out early
        have fewer times behind their median.
    """

    winner: Hashable
    medians: dict[Hashable, float]


def nearest_first(
    start: Mapping[str, int], choices: Mapping[str, Sequence[int]]
) -> list[dict[str, int]]:
    """Orders all combinations of `choices` by their distance from `start`.

    Args:
      start: a value for every name in `choices`; it may be none of the choices.
      choices: the values to try, ascending, by name.

    Returns:
      Every combination but `start` itself. The distance is the number of steps along the choices,
      summed over the names: so the first ones change one value by one step.
    """
    combinations = [{}]
    for name, values in choices.items():
        combinations = [x | {name: value} for x in combinations for value in values]

    def distance(combination):
        steps = 0
        for name, values in choices.items():
            nearest = min(values, key=lambda value: abs(value - start[name]))
            steps += abs(values.index(combination[name]) - values.index(nearest))
        return steps

    return sorted((x for x in combinations if x != dict(start)), key=distance)


def race(
    incumbent: Setting,
    others: Iterable[Setting],
    time_once: Callable[[Setting], float],
    *,
    rounds: int = 9,
    least_rounds: int = 3,
    margin: float = 0.1,
    least_gain: float = 0.02,
    is_time_left: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Times settings in turns, round after round, so that a drift of the clock hits all alike.

    Args:
      incumbent: the setting in use. It runs to the end and keeps its place against anything that
        isn't faster by `least_gain`.
      others: those that want it.
      time_once: runs a setting and returns seconds.
      rounds: at most.
      least_rounds: before anyone drops out, and before `is_time_left` counts.
      margin: who is slower than the fastest by more than this share drops out.
      least_gain: share of the incumbent's time that is worth a change.
      is_time_left: asked after each round.

    Returns:
      The winner by median, and all medians.
    """
    running = [incumbent, *(x for x in others if x != incumbent)]
    times = {setting: [] for setting in running}
    for number in range(1, rounds + 1):
        for setting in running:
            times[setting].append(time_once(setting))
        if number < least_rounds:
            continue
        limit = (1 + margin) * min(statistics.median(times[x]) for x in running)
        running = [x for x in running if x == incumbent or statistics.median(times[x]) <= limit]
        if len(running) == 1 or not is_time_left():
            break
    medians = {setting: statistics.median(x) for setting, x in times.items()}
    best = min(running, key=medians.__getitem__)
    is_gain = medians[best] <= (1 - least_gain) * medians[incumbent]
    return Outcome(best if is_gain else incumbent, medians)


class Journal:
    """What was tried and what came of it, one JSON object a line, so that a search can go on.

    Args:
      path: the file; it continues one that is there.
      search: what is searched and how, JSON: the same for the whole file.

    Raises:
      ValueError: the file belongs to another search.
    """

    def __init__(self, path: Path, search: dict):
        lines = path.read_text().split('\n')[:-1] if path.exists() else []
        records = [json.loads(line) for line in lines]
        if records and records[0] != {'search': search}:
            raise ValueError(
                f'{path} belongs to another search, {records[0]["search"]}, not {search}: '
                'continue that one, or name another folder'
            )
        self.winners = {}  # by place
        self._failures = collections.defaultdict(dict)
        self._tries = collections.Counter()
        # What a crash cut off is no line; the next one must not be glued to it.
        path.write_text(''.join(line + '\n' for line in lines))
        self._file = path.open('a', buffering=1)
        if not records:
            self._write({'search': search})
        for record in records[1:]:
            self._take(**record)

    def note(self, place: str, event: str, setting: Any, **more: Any) -> None:
        """Notes that at a place a setting (JSON) met with 'try', 'ok', 'failed' or 'won'."""
        record = {'place': place, 'event': event, 'setting': setting} | more
        self._write(record)
        self._take(**record)

    def failure(self, place: str, setting: Any) -> str | None:
        """Why a setting is out, if it is: it failed, or the process ended in it twice."""
        name = json.dumps(setting)
        if self.open_tries(place, setting) > 1:
            return 'the process ended twice while trying it'
        return self._failures[place].get(name)

    def open_tries(self, place: str, setting: Any) -> int:
        """How often it was tried without an outcome: since the process ended."""
        return self._tries[place, json.dumps(setting)]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, record):
        self._file.write(json.dumps(record) + '\n')

    def _take(self, place, event, setting, why=None, **_):
        name = json.dumps(setting)
        if event == 'try':
            self._tries[place, name] += 1
        else:
            self._tries[place, name] = 0
        if event == 'failed':
            self._failures[place][name] = why
        if event == 'won':
            self.winners[place] = setting


def tune(
    place: str,
    incumbent: Setting,
    candidates: Iterable[Setting],
    prepare: Callable[[Setting], Any],
    time_once: Callable[[Any], float],
    journal: Journal,
    *,
    as_json: Callable[[Setting], Any],
    try_until: float,
    race_until: float,
    clock: Callable[[], float],
    workers: int = 1,
) -> Outcome:
    """Prepares candidates until time is up, then races them against the incumbent.

    Args:
      place: the name of this search in the journal.
      incumbent: the setting in use; it has to work.
      candidates: the others, the most promising first.
      prepare: compiles and checks a setting and returns what `time_once` takes. A candidate of
        which it raises an exception is out.
      time_once: seconds of one run.
      journal: receives every try. What failed by it isn't tried again. The caller notes the
        winner, when it is in safety.
      as_json: a setting for the journal.
      try_until: time by `clock` from which no more candidates are prepared.
      race_until: time from which the race ends after its least rounds.
      clock: seconds.
      workers: settings to prepare at a time.

    Returns:
      The outcome of the race.
    """
    candidates = [x for x in candidates if journal.failure(place, as_json(x)) is None]
    # What may have ended the process comes last, alone.
    suspects = [x for x in candidates if journal.open_tries(place, as_json(x))]
    others = [x for x in candidates if x not in suspects]
    batches = [others[i : i + workers] for i in range(0, len(others), workers)]
    ready = {incumbent: prepare(incumbent)}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for batch in [*batches, *([x] for x in suspects)]:
            if clock() >= try_until:
                break
            for setting in batch:
                journal.note(place, 'try', as_json(setting))
            for setting, future in [(x, pool.submit(prepare, x)) for x in batch]:
                try:
                    ready[setting] = future.result()
                except Exception as error:  # what doesn't work is out, whatever the reason
                    why = f'{type(error).__name__}: {error}'[:300]
                    journal.note(place, 'failed', as_json(setting), why=why)
                else:
                    journal.note(place, 'ok', as_json(setting))
    return race(
        incumbent,
        ready,
        lambda setting: time_once(ready[setting]),
        is_time_left=lambda: clock() < race_until,
    )
