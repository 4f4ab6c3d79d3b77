"""Timing on clocks that the tests move themselves, reads of memory, and results."""

import json

import jax
import jax.numpy as jnp
import pytest

from experiments.lib import bench, results, runs
from spec_jax.analysis import metrics


class FakeClock:
    """A clock that shows the time to which a test has moved it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_cases_run_in_turns_after_one_warm_up_each():
    """Fails if a case is called twice in a row, or the warm-up is counted."""
    clock, calls = FakeClock(), []

    def case(name: str, *seconds: float):
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

    cases = {"a": case("a", 90, 1, 2, 3), "b": case("b", 80, 4, 8, 6)}
    timings = bench.run(cases, repeats=3, clock=clock)
    assert calls == ["a", "b"] * 4
    assert timings.seconds == {"a": [1, 2, 3], "b": [4, 8, 6]}
    assert timings.warm_up == {"a": 100.5, "b": 90.5}
    row = timings.row("b", ratio_to="a")
    assert row["n"] == 3 and row["warm_up_s"] == 90.5 and row["ms"] == 6e3
    assert (row["ratio"], row["ratio_p10"]) == (4, 2.4)  # by turn: 4, 4 and 2
    found = bench.spread_fields("x", range(101), ("q1", "q3"))
    assert found == {"x": 50, "x_q1": 25, "x_q3": 75}


@pytest.mark.parametrize("warms", [False, True])
def test_a_stopwatch_times_the_run_and_not_its_preparation(warms):
    """Fails if preparation or a cold run is timed, or a donated value is used again."""
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


@pytest.mark.parametrize("num_bytes", [0, 2**31 + 4, 15_137_843_200])
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


def run(prefill_s: float, decode_s: float, tokens: int) -> runs.Run:
    return runs.Run(tokens=[0] * tokens, prefill_s=prefill_s, decode_s=decode_s)


def test_speeds_by_hand():
    # Two prompts of 2 and 6 tokens, three repeats. Speeds are of totals, and not
    # means of rates: the short prompt must not weigh as much as the long one.
    baseline = [
        [run(1.0, 2.0, 2), run(1.0, 6.0, 6)],  # 10 s, 8 s decoding
        [run(1.0, 2.0, 2), run(1.0, 6.0, 6)],
        [run(2.0, 4.0, 2), run(2.0, 12.0, 6)],  # in a slow moment: 20 s, 16 s
    ]
    spec = [
        [run(1.0, 1.0, 2), run(1.0, 2.0, 6)],  # 5 s, 3 s decoding
        [run(1.0, 1.0, 2), run(1.0, 1.0, 6)],  # 4 s, 2 s
        [run(2.0, 1.0, 2), run(1.0, 4.0, 6)],  # 8 s, 5 s
    ]
    expected = {
        **{"baseline_e2e_tpot_ms": 1250.0, "baseline_e2e_tok_s": 0.8},
        **{"baseline_decode_tpot_ms": 1000.0, "baseline_decode_tok_s": 1.0},
        **{"spec_e2e_tpot_ms": 625.0, "spec_decode_tok_s": 8 / 3},
        # Ratios 2, 2.5, 2.5 and, decoding only, 8/3, 4, 16/5.
        **{"speedup_e2e": 2.5, "speedup_e2e_p10": 2.1, "speedup_e2e_p90": 2.5},
        **{"speedup_decode": 3.2, "speedup_decode_p90": 3.2 + 0.8 * 0.8},
    }
    found = results.speeds(baseline, spec)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    # One repeat has the spread of its prompts: ratios 3/2 and 7/3.
    alone = results.speeds(baseline[:1], spec[:1])
    assert alone["speedup_e2e"] == pytest.approx(2.0)
    assert alone["speedup_e2e_p10"] == pytest.approx(1.5 + 0.1 * (7 / 3 - 1.5))


def test_nothing_measured_is_none_and_valid_json():
    """Fails if there is a rate without tokens, or by a clock that did not advance."""
    for repeats in ([], [[]], [[run(1.0, 0.0, 0)]], [[run(0.0, 0.0, 8)]]):
        found = results.speeds(repeats, repeats)
        assert found["speedup_e2e"] is found["spec_e2e_tok_s"] is None
        json.dumps(found, allow_nan=False)


def test_acceptance_by_repetition_by_hand():
    """Fails if thirds are not by repetition, or means are not weighted by tokens."""
    # Shares of repeated 4-grams, of which the texts have 17, 7, 27 and 7.
    texts = [[0] * 20, list(range(10)), [*range(15), *range(15)], [*range(5)] * 2]
    counted = [
        metrics.Counters(proposed=proposed, accepted=accepted)
        for proposed, accepted in ((8, 8), (4, 1), (0, 0), (2, 1))
    ]
    found = results.by_repetition(texts, counted)
    assert found["tercile_prompts"] == [1, 1, 2]
    expected = [0.0, 2 / 7, (20 * 16 / 17 + 30 * 12 / 27) / 50]
    assert found["tercile_repetition"] == pytest.approx(expected)
    assert found["tercile_acceptance_rate"] == [0.25, 0.5, 1.0]
    assert found["repetition"] == pytest.approx((50 * expected[2] + 20 / 7) / 70)
    assert results.by_repetition([], [])["repetition"] is None
