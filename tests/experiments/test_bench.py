"""Timing on clocks that the tests move themselves, and plain reads of memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import bench


class FakeClock:
    """A clock that shows the time to which a test has moved it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_cases_run_in_turns_after_one_warm_up_each():
    """Fails if a case is called twice in a row, or the warm-up is counted."""
    clock, calls = FakeClock(), []

    def case(name: str, seconds: list[float]):
        remaining = iter(seconds)

        def run() -> float:
            calls.append(name)
            took = next(remaining)
            clock.now += took + 0.5  # half a second of preparation
            return took

        def make():
            clock.now += 10  # of compilation
            return run

        return make

    cases = {"a": case("a", [90, 1, 2, 3])}
    cases["b"] = case("b", [80, 4, 8, 6])
    timings = bench.run(cases, repeats=3, clock=clock)
    assert calls == ["a", "b"] * 4
    assert timings.seconds == {"a": [1, 2, 3], "b": [4, 8, 6]}
    assert timings.warm_up == {"a": 100.5, "b": 90.5}
    row = timings.row("b", ratio_to="a")
    assert row["n"] == 3 and row["warm_up_s"] == 90.5 and row["ms"] == 6e3
    assert (row["ratio"], row["ratio_p10"]) == (4, 2.4)  # by turn: 4, 4 and 2


@pytest.mark.parametrize("warms", [False, True])
def test_a_stopwatch_times_the_run_and_not_its_preparation(warms):
    """Fails if preparation is timed, if what a run donates is used again, or if, with
    `warms`, the first run is timed, whose caches are cold."""
    clock, seen, ready = FakeClock(), [], iter(range(4))

    def prepare() -> int:
        clock.now += 100
        return next(ready)

    def run(prepared: int) -> None:
        seen.append(prepared)
        clock.now += 100 if warms and len(seen) % 2 else 6

    thunk = bench.stopwatch(run, prepare, calls=3, warms=warms, clock=clock)
    assert thunk() == 2.0 and thunk() == 2.0
    assert seen == [0, 1, 2, 3][: 4 if warms else 2]


def test_medians_and_ratios():
    """Fails if medians, here 2 and 2, are divided, and not the times of each turn."""
    values = list(np.random.default_rng(0).permutation(101))
    found = bench.spread_fields("x", values, ("q1", "q3"))
    assert found == {"x": 50, "x_q1": 25, "x_q3": 75}
    assert bench.spread_fields("x", values) == {"x": 50, "x_p10": 10, "x_p90": 90}
    slow, fast = [1.0, 2.0, 30.0], [0.1, 2.0, 3.0]
    assert bench.ratios(slow, fast) == pytest.approx([10, 1, 10])
    with pytest.raises(ValueError):
        bench.ratios(slow, fast[:2])


@pytest.mark.parametrize("num_bytes", [0, 2**20, 2**31, 2**31 + 4, 15_137_843_200])
def test_a_read_reads_what_it_says(num_bytes, monkeypatch):
    """Fails if a read of an 8B model's 15 GB allocates as much, or reads fewer."""
    shapes = lambda key, shape: jax.ShapeDtypeStruct(shape, jnp.uint32)
    monkeypatch.setattr(jax.random, "bits", shapes)
    array, pieces = bench.pieces_of(num_bytes)
    assert 4 * array.size <= bench.MOST_READ_BYTES
    assert 0 <= max(num_bytes, 256) - 4 * array.size * pieces < 256 * pieces
    memory = bench._sum.lower(array).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert held < 2.1 * bench.MOST_READ_BYTES  # including a copy and sums of parts
