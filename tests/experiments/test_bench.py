"""Timing on clocks that the tests move themselves, and plain memory traffic."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import bench


class FakeClock:
    """Shows the time that it was moved to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_cases_run_in_turns_after_one_warm_up_each():
    """Fails if one case's calls stand together, the warm-up is counted, or a case that
    cannot be run takes the others along."""
    clock, calls, turns, failed = FakeClock(), [], [], []

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

    cases = {"a": case("a", [90, 1, 2, 3]), "bad": case("bad", [])}
    cases["b"] = case("b", [80, 4, 8, 6])
    timings = bench.run(
        cases,
        repeats=3,
        after_turn=lambda: turns.append(len(calls)),
        failed=lambda name, error: failed.append((name, type(error))),
        clock=clock,
    )
    assert calls == ["a", "bad", "b"] + ["a", "b"] * 3 and turns == [3, 5, 7, 9]
    assert failed == [("bad", StopIteration)]
    assert timings.seconds == {"a": [1, 2, 3], "b": [4, 8, 6]}
    assert timings.warm_up == {"a": 100.5, "b": 90.5}
    row = timings.row("b", "us", ratio_to="a")
    assert row["n"] == 3 and row["warm_up_s"] == 90.5 and row["us"] == 6e6
    assert (row["ratio"], row["ratio_p10"]) == (4, 2.4)  # Of the turns: 4, 4 and 2.
    with pytest.raises(StopIteration):
        bench.run({"bad": case("bad", [])}, repeats=1)


def test_a_stopwatch_times_the_run_and_not_its_preparation():
    clock, seen = FakeClock(), []

    def prepare() -> str:
        clock.now += 100
        return "prepared"

    def run(prepared: str) -> None:
        seen.append(prepared)
        clock.now += 6

    thunk = bench.stopwatch(run, prepare, calls=3, clock=clock)
    assert thunk() == 2.0 and thunk() == 2.0
    assert seen == ["prepared"] * 2


def test_the_first_of_what_runs_is_not_timed():
    """Fails if what a run donates is used again, or cold caches are measured."""
    clock, seen = FakeClock(), []

    def run(prepared: int) -> None:
        seen.append(prepared)
        clock.now += 6 if len(seen) % 2 == 0 else 100

    ready = iter(range(4))
    thunk = bench.stopwatch(run, lambda: next(ready), calls=3, warms=True, clock=clock)
    assert thunk() == 2.0 and thunk() == 2.0 and seen == [0, 1, 2, 3]


def test_medians_have_their_spread():
    values = list(np.random.default_rng(0).permutation(101))
    assert bench.spread(values) == bench.Spread(median=50, p10=10, p90=90)
    assert bench.quartile_fields("x", values) == {"x": 50, "x_q1": 25, "x_q3": 75}
    assert bench.spread([7.0]) == (7.0, 7.0, 7.0)
    assert bench.spread_fields("x", values) == {"x": 50, "x_p10": 10, "x_p90": 90}


def test_ratios_are_taken_turn_by_turn():
    """Fails if the medians are divided: of these they are 2 and 2."""
    slow, fast = [1.0, 2.0, 30.0], [0.1, 2.0, 3.0]
    assert bench.ratios(slow, fast) == pytest.approx([10, 1, 10])
    with pytest.raises(ValueError):
        bench.ratios(slow, fast[:2])


def test_a_loop_is_timed_for_as_long_as_it_should_be():
    """Fails if seconds are divided by another number of calls than were made."""
    clock, made = FakeClock(), []

    def run() -> None:
        # Compilation takes long, once.
        clock.now += 2 if made else 102
        made.append(clock.now)

    loop = bench.Loop(run=run, calls=4, num_bytes=8)
    thunk = bench.loop_thunk(loop, timed_s=8.0, clock=clock)
    # One before each timing, and the first timing says that it takes four.
    assert thunk() == 0.5 and len(made) == 2 + 5
    assert thunk() == 0.5 and len(made) == 2 + 2 * 5


def test_a_plain_read_reads_what_it_says(monkeypatch):
    """Fails if half as much is read, or a pass is left out."""
    monkeypatch.setattr(bench, "passes_for", lambda *unused: 3)
    read = bench.device_read(8000)
    assert read.num_bytes == 8000 and read.calls == 3
    total = np.uint32(0)
    with np.errstate(over="ignore"):
        for _ in range(3):
            total = np.sum(np.asarray(bench.noise.words(2000)) ^ total, dtype="uint32")
    assert int(read.run()) == int(total)


@pytest.mark.parametrize("num_bytes", [0, 2**20, 2**31, 2**31 + 4, 15_137_843_200])
def test_a_read_leaves_room_for_the_weights(num_bytes, monkeypatch):
    """Fails if a read of 8B's 15 GB holds as many, or reads fewer."""
    shapes = lambda count: jax.ShapeDtypeStruct((count,), jnp.uint32)
    monkeypatch.setattr(bench.noise, "words", shapes)
    monkeypatch.setattr(bench, "passes_for", lambda *unused: 3)
    loop = bench.device_read(num_bytes)
    memory = bench._sums.lower(*loop.run.args, **loop.run.keywords).compile()
    memory = memory.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert held < 2.1 * bench.MOST_READ_BYTES  # With a copy, and sums of parts.
    (array,), passes = loop.run.args, loop.run.keywords["passes"]
    assert 4 * array.size * passes == loop.calls * loop.num_bytes and loop.calls == 3
    assert max(num_bytes, 4) - loop.num_bytes < 64


def test_a_read_of_the_host_reads_everything(monkeypatch):
    """Fails if a piece is left out, or read by two threads."""
    read = []
    counting = types.SimpleNamespace(
        **{name: getattr(np, name) for name in ("ones", "uint64", "ndarray")},
        bitwise_or=types.SimpleNamespace(
            reduce=lambda piece: read.append((piece.ctypes.data, piece.size))
        ),
    )
    monkeypatch.setattr(bench, "np", counting)
    monkeypatch.setattr(bench, "_PIECE_WORDS", 100)
    monkeypatch.setattr(bench, "passes_for", lambda *unused: 5)
    bench.host_read(8 * 1234 - 3).run()
    pieces = dict(read)
    assert all(read.count(piece) == 5 for piece in read)
    assert sum(pieces.values()) == 1234
    assert sorted(pieces) == [min(pieces) + 800 * i for i in range(len(pieces))]
