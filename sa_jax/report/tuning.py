"""Choosing the fastest of several settings: in which order to try them, and a race among them."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
