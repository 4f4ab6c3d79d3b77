"""Latencies from the command line: steps, forced acceptance, presets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from script_runs import assert_has_fields_of, models_of, rows_from, rows_of

from experiments import latency
from experiments.lib import (
    bench,
    forced_rounds,
    noise,
    steps,
    subjects,
    works,
)
from spec_jax import loading
from spec_jax.engine import (
    baseline,
    requests as requests_lib,
    round as round_lib,
    state as states,
)
from spec_jax.model import params as params_lib, row_model


# With these sizes all tests here share their executables.
GAMMA, CONTEXTS, STEPS, PAGE_SIZE = 2, (8, 20), 2, 16

REMOVED = ("compiler_options", "memory_gb_s", "fits_in_cache", "read_best_gb_s")
REMOVED += ("achieved_gb_s", "last_level_cache_bytes", "steps_warm_up_s")
"""Fields of published rows that no table reads."""


@pytest.fixture(scope="module")
def lm(folders):
    target, draft = folders
    return loading.load(target, draft=draft, gamma_max=GAMMA, slab=GAMMA + 1)


def command(folders, *more: str) -> list[str]:
    flags = f"--contexts 8 20 --steps {STEPS} --page-size {PAGE_SIZE} --gamma {GAMMA}"
    return [*models_of(folders), *flags.split(), "--repeats", "3", *more]


def test_a_run(folders, head, lm, tmp_path):
    """Fails if a step is missing, or compared with another step than it names."""
    out = tmp_path / "out.jsonl"
    more = ("--prefill", "5", "--forced", "0.5", "--gen-tokens", "6")
    assert rows_from(latency.main, tmp_path, command((folders[0], head), *more))
    rows = {row["step"]: row for row in rows_of(out, "step")}
    assert list(rows) == [
        *("plain step", "1 active row", "2 active rows", "3 active rows"),
        *("draft step", "round, gamma 1", "round, gamma 2", "prefill of 5"),
        *("read of its bytes", "plain step at 20"),
    ]
    for name, row in rows.items():
        for figure in ("ms", "ratio"):
            low, median, high = (row[figure + tail] for tail in ("_p10", "", "_p90"))
            assert 0 < low <= median <= high, name
        assert row["n"] == 3 and row["warm_up_s"] > 0 and row["steps_per_call"] == STEPS
        assert (row["ratio_to"] == "1 active row") == ("active row" in name)
    assert rows["plain step"]["ratio"] == rows["1 active row"]["ratio_p90"] == 1
    assert rows["plain step at 20"]["context"] == 20
    assert rows["round, gamma 2"]["gamma"] == 2
    assert rows["3 active rows"]["num_active"] == 3
    (summary,) = rows_of(out, "summary")
    assert summary["step_bytes"] == subjects.step_bytes(lm.params)
    assert summary["bandwidth_share"] == rows["read of its bytes"]["ratio"]
    assert summary["read_gb_s"] > 0
    (forced,) = rows_of(out, "rounds")
    assert (forced["acceptance"], forced["acceptance_rate"]) == ("forced", 0.5)
    assert forced["matched"] and forced["equal"] and forced["differing_kv"] == 0
    assert (forced["gamma"], forced["tokens"]) == (GAMMA, 6) and forced["speedup"] > 0
    for row in (rows["draft step"], summary, forced):
        assert_has_fields_of(row, "gpu/h-dspark.jsonl", *REMOVED)


def test_an_untied_embedding_is_not_read():
    params = params_lib.shapes(tiny_pair.config(tie_word_embeddings=False))
    less = params_lib.num_bytes(params) - params_lib.num_bytes(params.embed)
    assert subjects.step_bytes(params) == less


def test_every_call_does_the_steps_that_it_is_divided_by(lm, monkeypatch):
    """Fails if a limit or a full cache ends a call early."""
    done = []

    def keep(module, count, ended):
        real = module.generate

        def wrapped(*arguments, **keywords):
            state = real(*arguments, **keywords)
            one = ended(state)
            assert int(one.status) != states.Status.OUT_OF_PAGES
            done.append((int(getattr(one, count)), int(one.length)))
            return state

        monkeypatch.setattr(module, "generate", wrapped)

    keep(baseline, "num_steps", lambda state: state)
    of_round = lambda state: requests_lib.slot_of(state.slots, 0)
    keep(round_lib, "num_rounds", of_round)
    # The draft is its own target: every round is as long as it can be.
    target = dataclasses.replace(lm.drafter.model, slab=GAMMA + 1)
    lm = dataclasses.replace(lm, target=target, params=lm.drafter_params)
    sizes = {"contexts": CONTEXTS, "page_size": PAGE_SIZE, "steps": STEPS}
    costs = {c.name: c for group in steps.all_costs(lm, **sizes) for c in group}
    for name in ("plain step", "plain step at 20", "round, gamma 1"):
        costs[name].case()()
    first, second = CONTEXTS
    warm_up, timed = done[::2], done[1::2]
    assert warm_up == timed and [steps_ for steps_, _ in timed] == [STEPS] * 3
    assert timed[0][1] == first + STEPS and timed[1][1] == second + STEPS


def test_repeated_forwards_start_at_the_same_place(lm):
    """Fails if a window stays in the cache: the context would grow with the steps."""
    kv = noise.noisy_cache(lm.target, capacity=32, page_size=PAGE_SIZE)
    before = [np.asarray(pool) for pool in kv.k]
    kv = noise.at_length(kv, 14)
    table = np.asarray(kv.page_table[row_model.SLOT])
    kv, _ = works.repeat_forward(
        lm.target, lm.params, kv, num_active=jnp.int32(3), steps=STEPS
    )
    assert int(kv.length[row_model.SLOT]) == 14
    changed = np.any(np.asarray(kv.k[0]) != before[0], axis=(2, 3))
    assert changed.sum() <= 3 and changed[table[0], 14:].all()


def test_windows_have_room(lm):
    """Fails if a window goes beyond its cache, where no row would run."""
    sizes = {"contexts": CONTEXTS, "page_size": PAGE_SIZE, "steps": STEPS}
    steps.all_costs(lm, **sizes, rows=(1, 40), as_shapes=True)
    stage = works.make_stage(lm, 20, PAGE_SIZE, as_shapes=True)
    with pytest.raises(ValueError, match="40 rows at 8: the cache has 25 left"):
        stage.windows(8, steps=STEPS, num_active=40)


def test_masks_accept_what_is_asked():
    """Fails if the rate is taken as the chance of each draft alone."""
    sizes = {"start": 128, "limit": 256}
    for rate, gamma in ((0.39, 1), (0.39, 7), (0.8, 4)):
        chances = forced_rounds.chances(rate, gamma, head=None)
        kept = forced_rounds.choose_kept(chances, **sizes, size=300)
        proposed, accepted = forced_rounds.simulate(kept, **sizes, gamma=gamma)
        assert accepted / proposed == pytest.approx(rate, abs=0.01)


def test_heads_are_forced_to_what_is_published():
    """Fails if the mean length of seven drafts, or the first's share, is another."""
    assert len(forced_rounds._PUBLISHED) == 2 * len(subjects.HEADS)
    for (head, name), (tokens, first) in forced_rounds._PUBLISHED.items():
        chances = forced_rounds.chances(name, 7, head=head)
        assert 1 + np.cumprod(chances).sum() == pytest.approx(tokens, abs=1e-6)
        assert chances[0] == (first or chances[1]) and all(0 < c < 1 for c in chances)
        longer = forced_rounds.chances(name, 15, head=head)
        assert longer[:7] == chances and longer[14] == chances[6]


def test_tokens_and_keys_that_differ_are_told(lm):
    """Negative control: other tokens, another element of the keys, logits of NaN."""
    runs = forced_rounds.Runs(lm=lm, start=8, num_new=4, page_size=16)
    trace = np.asarray(runs.plain().once().tokens)
    spec = runs.rounds(trace, np.full(trace.shape, GAMMA, np.int32), GAMMA).once()
    slot = requests_lib.slot_of(spec.slots, 0)
    page = spec.cache.page_table[row_model.SLOT, 0]
    wrong = spec.cache.replace(
        k=tuple(k.at[page, 9, 0, 0].add(1) for k in spec.cache.k)
    )
    differing = runs.written(spec.cache) != runs.written(wrong)
    assert np.sum(differing) == len(wrong.k)
    nan = slot.replace(num_nonfinite=jnp.int32(3))
    for told, matched, equal in (
        ((trace, slot, 0), True, True),
        (((trace + 1) % 256, slot, 0), False, False),
        ((trace, slot, 2), True, False),
        ((trace, nan, 0), False, False),
    ):
        row = forced_rounds.counts(runs, *told)
        assert (row["matched"], row["equal"]) == (matched, equal)
        assert row["differing_tokens"] == (0 if told[0] is trace else 4)
        assert row["nonfinite_logits"] == (3 if told[1] is nan else 0)


def test_times_of_forced_rounds_are_of_tokens_and_rounds():
    """Fails if a speed-up is inverted, or a round has the time of a token."""
    seconds = {0.5: [0.25], forced_rounds.PLAIN: [0.5]}  # per token
    timings = bench.Timings(warm_up={0.5: 3.0}, seconds=seconds)
    row = forced_rounds.times(timings, 0.5, 2)
    assert (row["speedup"], row["plain_ms"], row["spec_ms"]) == (2, 500, 250)
    assert row["round_ms"] == row["round_ms_q1"] == 500 and row["warm_up_s"] == 3


def test_the_real_presets_are_the_released_shapes():
    counts = {
        "qwen3-0.6b": 596_049_920,
        "qwen3-1.7b": 1_720_574_976,
        "qwen3-8b": 8_190_735_360,
        "llama-3.1-8b": 8_030_261_248,
        "qwen2.5-7b": 7_615_616_512,
        "draft-60m": 59_684_416,
    }
    assert subjects.PRESETS.keys() == {"tiny", *counts}
    for name, count in counts.items():
        made = jax.tree.leaves(params_lib.shapes(subjects.PRESETS[name].validate()))
        assert sum(leaf.size for leaf in made) == count


def test_own_times_of_kernels():
    """Fails if time that two kernels share counts twice, as in their durations."""
    for events, own in (
        # The second begins while the first runs, and waits; the third follows a gap.
        ([(0, 10), (4, 11), (20, 5)], [10, 5, 10]),
        ([(4, 11), (0, 10)], [5, 10]),  # not in order
        ([(0, 10), (2, 3), (4, 8)], [10, 0, 2]),  # The second ends first.
    ):
        assert latency.own_times(events) == own
