"""Latencies from the command line: steps, forced acceptance, presets, bad input."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from script_runs import assert_fails_with, interrupted, rows_of

from experiments import latency
from experiments.lib import (
    cli,
    forced_drafter,
    forced_rounds,
    noise,
    step_costs,
    steps,
    subjects,
    timing,
    works,
)
from spec_jax import loading
from spec_jax.debug import evidence
from spec_jax.drafters import tree_shapes
from spec_jax.engine import baseline, round as round_lib, scheduler, state as states
from spec_jax.model import params as params_lib, row_model


# Such that all tests here share their executables.
GAMMA, CONTEXTS, STEPS, PAGE_SIZE = 2, (8, 20), 2, 16


@pytest.fixture(scope="module")
def lm(folders):
    target, draft = folders
    return loading.load(target, draft=draft, gamma_max=GAMMA, slab=GAMMA + 1)


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    monkeypatch.setattr(timing, "LARGE_READ_BYTES", 2**20)


def command(folders, *more: str) -> list[str]:
    models = []
    if folders:
        models = ["--target", str(folders[0]), "--draft", str(folders[1])]
    return [
        *models,
        *("--contexts", *map(str, CONTEXTS), "--steps", str(STEPS), "--repeats", "3"),
        *("--page-size", str(PAGE_SIZE), "--gamma", str(GAMMA)),
        *more,
    ]


def test_rows_of_trees(folders, tmp_path):
    """Fails if a tree is compared with a slab of another height than it says."""
    out = tmp_path / "out.jsonl"
    more = ("--tree-rows", "6", "--rows", "3", "--contexts", "8", "--out", str(out))
    assert latency.main(command(folders, *more)) == 0
    rows = {row["step"]: row["ratio_to"] for row in rows_of(out, "step")}
    assert list(rows)[:7] == [
        *("plain step", "1 active row", "3 active rows", "6 chain rows"),
        *("6 tree rows", "1 of 6 tree rows", "moving 2 of 6 tree rows"),
    ]
    assert rows["6 tree rows"] == "6 chain rows"
    assert rows["1 of 6 tree rows"] == "1 active row"
    assert rows["moving 2 of 6 tree rows"] == rows["6 chain rows"] == "plain step"


def test_a_path_is_moved(lm, monkeypatch):
    """Fails if what is timed moves nothing, or something else than a round."""
    monkeypatch.setattr(works, "MOVES", 1)
    sizes = works.Sizes(capacity=32, page_size=PAGE_SIZE, steps=1)
    kv = noise.noisy_cache(lm.target, capacity=32, page_size=PAGE_SIZE)
    work = works.moves(lm.target, sizes, 8, num_rows=7, cache=kv)
    before = evidence.committed_kv(work.prepare(kv), 14)
    after = evidence.committed_kv(work.once(), 14)
    for was, now in zip(before, after, strict=True):
        # Columns 2 and 6 of a tree from place 7 on.
        np.testing.assert_array_equal(now[:, 8:10], was[:, [9, 13]])
        np.testing.assert_array_equal(now[:, :8], was[:, :8])
        assert (was[:, 8:10] != was[:, [9, 13]]).any()


def test_a_run(folders, tmp_path, capsys):
    """Fails if a step is missing, or compared with another one than it says."""
    out = tmp_path / "out.jsonl"
    more = ("--prefill", "5", "--forced", "0.5", "--gen-tokens", "6")
    assert latency.main(command(folders, *more, "--out", str(out))) == 0
    rows = {row["step"]: row for row in rows_of(out, "step")}
    assert list(rows) == [
        *("plain step", "1 active row", "2 active rows", "3 active rows"),
        *("draft step", "round, gamma 1", "round, gamma 2", "prefill of 5"),
        *("read of its bytes", "read of 256 MiB", "new cache", "plain step at 20"),
    ]
    for name, row in rows.items():
        assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"], name
        assert 0 < row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"], name
        assert row["n"] == 3 and row["warm_up_s"] > 0 and row["steps_per_call"] == STEPS
        assert row["jax_version"] == jax.__version__
        assert (row["ratio_to"] == "1 active row") == ("active row" in name)
    assert rows["plain step"]["ratio"] == rows["1 active row"]["ratio_p90"] == 1
    assert rows["plain step at 20"]["context"] == 20
    assert (
        rows["round, gamma 2"]["gamma"] == 2
        and rows["3 active rows"]["num_active"] == 3
    )
    (summary,) = rows_of(out, "summary")
    plain_s = rows["plain step"]["ms"] / 1e3
    achieved = summary["step_bytes"] / plain_s / 1e9
    assert summary["achieved_gb_s"] == pytest.approx(achieved)
    assert summary["bandwidth_share"] == rows["read of its bytes"]["ratio"]
    assert summary["read_best_gb_s"] >= summary["read_gb_s"] > 0
    (forced,) = rows_of(out, "rounds")
    assert forced["acceptance"] == "forced" and forced["gamma"] == GAMMA
    assert forced["matched"] and forced["equal"] and forced["differing_kv"] == 0
    assert forced["tokens"] == 6 and forced["speedup"] > 0
    assert forced["acceptance_rate"] == 0.5
    printed = capsys.readouterr().out
    assert "round, gamma 2" in printed and "forced_rate" in printed


def test_a_head(head, folders, tmp_path):
    """Fails if a head's step, or its rounds, are not timed or not exact."""
    out = tmp_path / "out.jsonl"
    more = ("--contexts", "8", "--forced", "0.5", "--gen-tokens", "6")
    both = folders[0], head
    assert latency.main(command(both, *more, "--out", str(out))) == 0
    rows = {row["step"]: row for row in rows_of(out, "step")}
    assert {"draft step", "round, gamma 1", "round, gamma 2"} <= set(rows)
    costs = step_costs.read(out, [str(head), "eagle3", "ngram"])
    draft_s = rows["draft step"]["ms"] / 1e3
    assert costs[str(head)].draft_s == costs["eagle3"].draft_s == draft_s > 0
    assert costs["ngram"].draft_s == 0
    (forced,) = rows_of(out, "rounds")
    assert forced["matched"] and forced["differing_kv"] == 0
    assert forced["acceptance_rate"] == 0.5


def test_large_weights_are_not_read_twice(lm, monkeypatch):
    def names() -> list[str]:
        plan = steps.Plan(contexts=[8], page_size=16, steps=1)
        return [cost.name for cost in steps.all_costs(lm, plan)[0]]

    assert steps.LARGE_READ in names()
    num_bytes = subjects.step_bytes(lm.params)
    monkeypatch.setattr(timing, "LARGE_READ_BYTES", num_bytes)
    assert steps.READ in names() and steps.LARGE_READ not in names()


def test_an_untied_embedding_is_not_read():
    params = params_lib.shapes(tiny_pair.config(tie_word_embeddings=False))
    less = params_lib.num_bytes(params) - params_lib.num_bytes(params.embed)
    assert subjects.step_bytes(params) == less


def test_every_call_does_the_steps_that_it_is_divided_by(lm, monkeypatch):
    """Fails if a limit or a full cache ends a call early."""
    done = []

    def of_round(slot):
        return slot.status, slot.num_rounds, slot.length

    def keep(module, ended):
        real = module.generate

        def wrapped(*arguments, **keywords):
            state = real(*arguments, **keywords)
            status, count, length = ended(state)
            assert int(status) != states.Status.OUT_OF_PAGES
            done.append((int(count), int(length)))
            return state

        monkeypatch.setattr(module, "generate", wrapped)

    keep(baseline, lambda state: (state.status, state.num_steps, state.length))
    keep(round_lib, lambda state: of_round(scheduler.slot_of(state.slots, 0)))
    # The draft drafts for itself: every round is as long as it can be.
    target = dataclasses.replace(lm.drafter.model, slab=GAMMA + 1)
    lm = dataclasses.replace(lm, target=target, params=lm.drafter_params)
    plan = steps.Plan(contexts=CONTEXTS, page_size=PAGE_SIZE, steps=STEPS)
    costs = {c.name: c for group in steps.all_costs(lm, plan) for c in group}
    for name in ("plain step", "plain step at 20", "round, gamma 1"):
        costs[name].thunk()()
    first, second = CONTEXTS
    warm_up, timed = done[::2], done[1::2]
    assert warm_up == timed and [steps_ for steps_, _ in timed] == [STEPS] * 3
    assert timed[0][1] == first + STEPS and timed[1][1] == second + STEPS


def test_repeated_forwards_start_at_the_same_place(lm):
    """Fails if a window is not forgotten: the context would grow with the steps."""
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


def test_a_cache_can_be_set_to_any_length(lm):
    """Fails if a length leaves pages unowned, or they hold zeros."""
    kv = noise.noisy_cache(lm.target, capacity=48, page_size=16)
    for length in (0, 33, 7, 48):
        kv = noise.at_length(kv, length)
        assert int(kv.length[0]) == length and not bool(kv.refused.any())
        assert int(kv.num_owned[0]) == max(1, -(-length // 16))
    assert float(jnp.std(kv.v[0])) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("rate", "gamma"), list(itertools.product((0.39, 0.8), (1, 4, 7)))
)
def test_masks_accept_what_is_asked(rate, gamma):
    """Fails if the rate is taken for that of each draft alone."""
    sizes = {"start": 128, "limit": 256}
    chances = forced_drafter.chances(rate, gamma, head=None)
    kept = forced_drafter.choose_kept(chances, **sizes, size=300)
    proposed, accepted = forced_drafter.simulate(kept, **sizes, gamma=gamma)
    assert accepted / proposed == pytest.approx(rate, abs=0.01)


@pytest.mark.parametrize("head", subjects.HEADS)
@pytest.mark.parametrize("name", forced_drafter.DATA_SETS)
def test_heads_are_forced_to_what_is_published(head, name):
    """Fails if seven drafts keep another length, or the first another share."""
    tokens, first = forced_drafter._PUBLISHED[head, name]
    chances = forced_drafter.chances(name, 7, head=head)
    assert 1 + np.cumprod(chances).sum() == pytest.approx(tokens, abs=1e-6)
    assert chances[0] == (first or chances[1]) and all(0 < c < 1 for c in chances)
    longer = forced_drafter.chances(name, 15, head=head)
    assert longer[:7] == chances and longer[14] == chances[6]


def test_acceptance_that_cannot_be_is_told(lm):
    with pytest.raises(ValueError, match="1.5"):
        forced_drafter.chances(1.5, 4, head=None)
    with pytest.raises(ValueError, match="gsm8k.*--head"):
        forced_drafter.chances("gsm8k", 4, head=None)
    tree = lm.drafter.for_tree(tree_shapes.parse("2x2:4"))
    drafter = forced_drafter.ForcedDrafter(inner=tree, vocab_size=256)
    with pytest.raises(ValueError, match="2x2:4.*fixed shape"):
        assert drafter.right is None


@pytest.mark.slow
@pytest.mark.parametrize("more", [("dspark",), ("eagle3", "--head-tree", "9"),
                                  ("dflash",)])  # fmt: skip
def test_heads_of_random_weights(more, tmp_path, monkeypatch):
    """Fails if a head at the shapes of a preset keeps other tokens than are forced, or
    its rounds differ from decoding."""
    out = tmp_path / "out.jsonl"
    forced = ("--forced", "0.5,gsm8k", "--gen-tokens", "12", "--out", str(out))
    arguments = ["--preset", "tiny", "--impl", "xla", "--head", *more, *forced]
    sizes = ["--contexts", "16", "--steps", "1", "--repeats", "1"]
    assert latency.main([*arguments, *sizes]) == 0
    rows = rows_of(out, "rounds")
    assert [row["forced_rate"] for row in rows] == [0.5, "gsm8k"]
    for row in rows:
        assert row["matched"] and row["differing_kv"] == 0
        # Drafts of trees were kept to some depth, too.
        assert row["tokens_per_target_step"] > 1.9
    (head,) = (row for row in rows_of(out, "step") if row["step"] == "draft step")
    assert head["pass_bytes"] > 0
    drafts = {"dspark": 7, "eagle3": 8, "dflash": 15}
    assert head["drafts"] == rows[0]["gamma"] == drafts[more[0]]


def test_tokens_and_keys_that_differ_are_told(lm):
    """Negative control: a text that is another one, one bit of a key, and a NaN."""
    runs = forced_rounds.make_runs(lm, start=8, generated=4, page_size=16)
    state = runs.plain().once()
    trace = np.asarray(state.tokens)
    known = forced_drafter.ForcedParams(
        draft=lm.drafter_params,
        trace=jnp.asarray(trace),
        kept=jnp.full(trace.shape, GAMMA),
    )
    spec = runs.rounds(known, GAMMA).once()
    kv, slot = spec.cache, scheduler.slot_of(spec.slots, 0)
    seconds = {0.5: [1.0], forced_rounds.PLAIN: [2.0]}
    timings = timing.Timings(warm_up={0.5: 3.0}, seconds=seconds)
    row = forced_rounds.row(runs, trace, GAMMA, 0.5, slot, 0, timings)
    assert row["equal"] and row["speedup"] == 2
    row = forced_rounds.row(runs, (trace + 1) % 256, GAMMA, 0.5, slot, 0, timings)
    assert not row["matched"] and row["differing_tokens"] == 4 and not row["equal"]
    written = runs.written(kv)
    wrong = [pool.at[0, 1, 0, 0].add(1) for pool in written]
    assert forced_rounds.kernel_checks.differing(written, wrong) == 2
    row = forced_rounds.row(runs, trace, GAMMA, 0.5, slot, 2, timings)
    assert row["matched"] and not row["equal"]
    slot = slot.replace(num_nonfinite=jnp.int32(3))
    row = forced_rounds.row(runs, trace, GAMMA, 0.5, slot, 0, timings)
    assert not row["matched"] and not row["equal"] and row["nonfinite_logits"] == 3


@pytest.mark.slow
def test_presets(monkeypatch, tmp_path):
    """A target alone, and with a draft; sampling too."""
    config = tiny_pair.config()
    monkeypatch.setitem(subjects.PRESETS, "qwen3-8b", config)
    monkeypatch.setitem(subjects.PRESETS, "qwen3-0.6b", config)
    out = tmp_path / "out.jsonl"
    more = ("--slab", "3", "--rows", "2", "--out", str(out))
    assert latency.main(command((), "--preset", "qwen3-8b", *more)) == 0
    names = [row["step"] for row in rows_of(out, "step")]
    assert names[:3] == ["plain step", "2 active rows", "read of its bytes"]
    assert names[-2:] == ["plain step at 20", "2 active rows at 20"]
    (summary,) = rows_of(out, "summary")
    assert summary["target"] == "qwen3-8b" and summary["draft"] is None
    both = ("--preset", "qwen3-8b", "--draft-preset", "qwen3-0.6b")
    assert latency.main(command((), *both, *more, "--temperature", "0.7")) == 0
    rows = rows_of(out, "step")
    assert rows[0]["draft"] == "qwen3-0.6b" and rows[0]["temperature"] == 0.7
    assert "round, gamma 2" in [row["step"] for row in rows]


@pytest.mark.slow
def test_a_dry_run_of_the_real_shapes(tmp_path):
    """No weights are made, and every layer has the kernels of the first."""
    out = tmp_path / "out.jsonl"
    both = ("--preset", "qwen3-8b", "--draft-preset", "qwen3-0.6b")
    more = (*both, "--dry-run", "--device", "gpu", "--out", str(out))
    assert latency.main(command((), *more)) == 0
    found = {row["program"]: row["kernels"] for row in rows_of(out, "compile")}
    a_model = 9 + 4  # of a layer; after the last norm, head and two of the argmax
    names = ("target: plain steps", "target: windows", "draft: proposals")
    assert found == dict.fromkeys(names, a_model) | {"rounds": 2 * a_model}


@pytest.mark.parametrize(
    ("preset", "num_params"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("draft-60m", 59_684_416),
    ],
)
def test_the_real_presets_are_the_released_shapes(preset, num_params):
    config = subjects.PRESETS[preset].validate()
    leaves = jax.tree.leaves(params_lib.shapes(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == num_params


def test_noise_is_the_same_in_every_process():
    assert noise.normal(1, (3,)).tolist() == noise.normal(1, (3,)).tolist()
    assert noise.normal(1, (3,)).tolist() != noise.normal(2, (3,)).tolist()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--contexts", "3000"], ["3000", "positions"]),
        (["--slab", "2"], ["needs 3 rows", "has 2"]),
        (["--gamma", "0"], ["at least 1"]),
        (["--page-size", "48", "--impl", "xla"], ["--page-size 48 must"]),
        (["--dtype", "int8"], ["int8"]),
        (["--impl", "mosaic"], ["--impl", "mosaic", "removed", "9b82177"]),
        (["--forced", "39"], ["--forced", "between 0 and 1"]),
        (["--device", "gpu"], ["--device gpu", "no GPU"]),
        (["--dry-run"], ["--dry-run needs a --preset"]),
        (["--head", "dspark"], ["--head", "--preset"]),
        (["--head-tree", "16"], ["--head-tree 16 is of --head"]),
        (["--forced", "gsm8k"], ["--forced", "--head"]),
        (["--preset", "qwen3-0.6b"], ["leave out"]),
        (["--draft-preset", "qwen3-0.6b"], ["--preset"]),
        (["--top-k", "5"], ["--temperature 0"]),
        (["--forced", "0.5", "--temperature", "0.7"], ["--forced decodes greedily"]),
        (["--gammas", "2"], ["--gammas is of --forced"]),
        (["--trace", "x", "--no-steps"], ["--trace is of steps"]),
    ],
)
def test_bad_input(folders, capsys, more, words):
    assert_fails_with(latency.main, capsys, command(folders, *more), *words)


def test_a_preset_that_does_not_fit(monkeypatch, capsys):
    """Refused before anything is created, with both numbers."""
    huge = tiny_pair.config(vocab_size=2**40)
    monkeypatch.setitem(subjects.PRESETS, "qwen3-0.6b", huge)
    assert_fails_with(
        latency.main, capsys, command((), "--preset", "qwen3-0.6b"), "GiB", "free"
    )


def test_weights_of_earlier_presets_make_room(monkeypatch):
    """Fails if a process that has measured one model has no room for the next."""
    kept = subjects._weights

    def check_fits(what, required):
        if kept.cache_info().currsize:
            raise MemoryError(what)

    kept.cache_clear()
    monkeypatch.setattr(subjects, "check_fits", check_fits)
    sizes = {"gamma_max": 1, "slab": 2, "impl": "xla"}
    for dtype in ("float32", "bfloat16"):
        lm = subjects.preset_lm("tiny", None, dtype=dtype, **sizes)
        assert lm.params.final_norm.dtype == dtype
    assert kept.cache_info().currsize == 1


def test_an_interrupted_run_leaves_whole_rows(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forced_rounds, "make_runs", interrupted)
    out = tmp_path / "out.jsonl"
    more = ("--forced", "0.5", "--out", str(out))
    assert latency.main(command(folders, *more)) == cli.INTERRUPTED == 130
    assert len(rows_of(out, "step")) == 11
    assert "interrupted" in capsys.readouterr().err
