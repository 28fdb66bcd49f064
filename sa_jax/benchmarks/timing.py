"""Interleaved timing: every case once a round, so that what disturbs the machine meets them all."""

import gc
import time
from collections.abc import Callable, Hashable, Mapping

_MOST_CALLS = 1000


def seconds_per_call(run: Callable[[int], None], calls: int) -> float:
    """Times some calls in a row."""
    start = time.perf_counter()
    run(calls)
    return (time.perf_counter() - start) / calls


def calls_per_round(seconds: float, at_least: float) -> int:
    """How many calls of so many seconds a measurement takes to last `at_least` seconds."""
    return min(max(1, round(at_least / max(seconds, 1e-9))), _MOST_CALLS)


def interleaved(
    runs: Mapping[Hashable, Callable[[int], None]],
    calls: Mapping[Hashable, int],
    *,
    rounds: int,
    pause: float,
    on_measured: Callable[[], None] = lambda: None,
) -> dict[Hashable, list[float]]:
    """Times all cases in rounds; each round begins with another case.

    Args:
      runs: calls a case so many times and waits, by case.
      calls: how many times in a measurement.
      rounds: measurements of each case.
      pause: seconds of rest before each measurement. OpenMP's threads go on spinning for some
        milliseconds after a call and would take the cores from the next case.
      on_measured: called after each measurement.

    Returns:
      Seconds per call by case, a number for each round.
    """
    order = list(runs)
    seconds = {case: [] for case in order}
    gc.collect()
    gc.disable()
    try:
        for round_ in range(rounds):
            shift = round_ % max(len(order), 1)
            for case in order[shift:] + order[:shift]:
                time.sleep(pause)
                seconds[case].append(seconds_per_call(runs[case], calls[case]))
                on_measured()
    finally:
        gc.enable()
    return seconds
