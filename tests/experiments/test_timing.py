"""Timing on clocks that the tests move themselves."""

import numpy as np
import pytest

from experiments.lib import timing


class FakeClock:
    """Shows the time that it was moved to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_thunks_run_in_turns_after_one_warm_up_each():
    """Fails if one thunk's calls stand together, or the warm-up is counted."""
    clock, calls, turns = FakeClock(), [], []

    def thunk(name: str, seconds: list[float]):
        remaining = iter(seconds)

        def run() -> float:
            calls.append(name)
            took = next(remaining)
            clock.now += took + 0.5  # half a second of preparation
            return took

        return run

    timings = timing.interleave(
        {"a": thunk("a", [90, 1, 2, 3]), "b": thunk("b", [80, 4, 5, 6])},
        repeats=3,
        after_turn=lambda: turns.append(len(calls)),
        clock=clock,
    )
    assert calls == ["a", "b"] * 4
    assert turns == [2, 4, 6, 8]
    assert timings.seconds == {"a": [1, 2, 3], "b": [4, 5, 6]}
    assert timings.warm_up == {"a": 90.5, "b": 80.5}


def test_a_stopwatch_times_the_run_and_not_its_preparation():
    clock, seen = FakeClock(), []

    def prepare() -> str:
        clock.now += 100
        return "prepared"

    def run(prepared: str) -> None:
        seen.append(prepared)
        clock.now += 6

    thunk = timing.stopwatch(run, prepare, calls=3, clock=clock)
    assert thunk() == 2.0 and thunk() == 2.0
    assert seen == ["prepared"] * 2


def test_spread():
    values = list(np.random.default_rng(0).permutation(101))
    assert timing.spread(values) == timing.Spread(median=50, p10=10, p90=90)
    assert timing.spread([7.0]) == (7.0, 7.0, 7.0)


def test_quartiles():
    values = list(np.random.default_rng(0).permutation(101))
    assert timing.quartiles(values) == timing.Quartiles(median=50, q1=25, q3=75)


def test_ratios_are_taken_turn_by_turn():
    """Fails if the medians are divided: of these they are 2 and 2."""
    slow, fast = [1.0, 2.0, 30.0], [0.1, 2.0, 3.0]
    assert timing.ratios(slow, fast) == pytest.approx([10, 1, 10])
    assert timing.spread(timing.ratios(slow, fast)).median == pytest.approx(10)
    with pytest.raises(ValueError):
        timing.ratios(slow, fast[:2])
