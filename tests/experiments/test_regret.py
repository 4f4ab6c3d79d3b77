"""Regret: outcomes of drafts as integers against live rounds, sets, the script."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from gamma_cases import measure_regret
from script_runs import models_of

from experiments.lib import costs, outcomes, prompt_files, regret, runs
from spec_jax import loading
from spec_jax.gamma import policy, simulation, threshold


GAMMA, GEN_TOKENS, PAGE_SIZE = 2, 12, 16
LINES = ("def first(x):", "import second", "aa aa aa aa aa")
PROMPTS = [
    prompt_files.Prompt(id=str(i), text=text, category=None)
    for i, text in enumerate(LINES)
]
SETTINGS = runs.Settings(
    gamma=GAMMA, gen_tokens=GEN_TOKENS, capacity=32, page_size=PAGE_SIZE
)
COSTS = costs.RoundCosts(
    plain_s=1.0,
    drafts=(0, 1, 2),
    verify_s=(1.0, 1.25, 1.5),
    beyond_s=(0.0, 0.25, 0.5),
    catch_up_s=0.125,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft, and a file of prompts beside them."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "prompts.txt").write_text("".join(line + "\n" for line in LINES))
    return tiny_pair.write(folder)


@pytest.fixture(scope="module")
def pairs(folders):
    """A lookup, which is sometimes right; and the target itself, which always is."""
    target, draft = folders

    def load(draft, name: str) -> loading.LanguageModel:
        return loading.load(
            target, draft=draft, drafter=name, gamma_max=GAMMA, slab=GAMMA + 1
        )

    return {"ngram": load(draft, "ngram"), "itself": load(target, "draft-model")}


def record(pair: loading.LanguageModel, prompt: prompt_files.Prompt):
    ids = pair.tokenizer.encode(prompt.text)
    return outcomes.record(pair, SETTINGS, prompt, ids)


@pytest.fixture(scope="module")
def texts(pairs):
    """The lookup's outcomes on every prompt."""
    return [record(pairs["ngram"], prompt) for prompt in PROMPTS]


def simulated_rounds(text: outcomes.Text, gamma: int) -> int:
    fixed = policy.Fixed(gamma_max=GAMMA)
    run = simulation.simulate(
        fixed,
        simulation.begin(fixed, fixed.init(gamma)),
        jnp.asarray(text.is_kept),
        max_rounds=jnp.int32(GEN_TOKENS),
    )
    assert int(run.position) == GEN_TOKENS
    return int(run.rounds_at.sum())


@pytest.mark.parametrize(
    "name", ["ngram", "itself", pytest.param("dspark", marks=pytest.mark.slow)]
)
def test_simulated_rounds_are_those_of_live_runs(pairs, name):
    """As integers, for every constant gamma; fails if an outcome is a place off, or a
    head is not told what it reads."""
    kept = 0
    if name in pairs:
        pair = pairs[name]
    else:  # A head has a target of its own.
        pair = loading.load(drafter=name, gamma_max=GAMMA, slab=GAMMA + 1)
    for prompt in PROMPTS:
        text = record(pair, prompt)
        for gamma in range(GAMMA + 1):
            asked = dataclasses.replace(SETTINGS, gamma=gamma)
            live = runs.run_speculative(pair, asked, text.prompt_ids)
            assert live.tokens == text.tokens
            assert simulated_rounds(text, gamma) == live.counters.rounds
            kept += live.counters.accepted
    assert kept > 0  # else every outcome would be as good


def test_the_check_sees_a_wrong_outcome(pairs):
    """Negative control: one draft that was kept, taken for rejected."""
    text = record(pairs["itself"], PROMPTS[0])
    wrong = text.is_kept.copy()
    wrong[1, 1] = False
    changed = dataclasses.replace(text, is_kept=wrong)
    assert simulated_rounds(changed, GAMMA) == simulated_rounds(text, GAMMA) + 1


def test_outcomes_of_drafts():
    """Row `n` was drafted behind `n` tokens; its draft `i` stands at `n + i`."""
    drafts = np.array([[7, 8], [8, 0], [9, 9]])
    found = outcomes.outcomes(drafts, np.array([2, 2, 1]), [7, 8, 9])
    assert found.tolist() == [[True, False], [True, True], [True, False]]
    # What was not drafted is not kept, whatever stands in its place.
    silent = outcomes.outcomes(drafts, np.array([0, 1, 1]), [7, 8, 9])
    assert silent.tolist() == [[False, False], [True, False], [True, False]]
    assert outcomes.mean_kept(found) == (2 + 1 + 1) / 3
    assert outcomes.mean_kept(silent) == 2 / 3


def test_sets(texts):
    """By how much is kept; the adversarial ones are the mixed, with nothing kept."""
    sets = outcomes.make_sets(texts)
    assert tuple(sets) == outcomes.SETS
    ((easy,), (hard,)) = sets["easy"], sets["hard"]
    kept = [text.num_kept for text in texts]
    assert easy.num_kept == max(kept) > hard.num_kept == min(kept)
    assert sets["mixed"] == [easy, hard]
    assert [text.tokens for text in sets["adversarial"]] == [easy.tokens, hard.tokens]
    for text in sets["adversarial"]:
        assert text.is_adversarial and text.num_kept == 0
    assert not any(text.is_adversarial for text in texts)
    with pytest.raises(ValueError, match="1 prompts: .* give two"):
        outcomes.make_sets(texts[:1])


def fixed_candidates() -> list[regret.Candidate]:
    fixed = policy.Fixed(gamma_max=GAMMA)
    return [
        regret.Candidate(
            name=f"fixed {gamma}",
            gamma=gamma,
            gamma_policy=fixed,
            state=fixed.init(gamma),
            is_fixed=True,
        )
        for gamma in range(GAMMA + 1)
    ]


def ladder_candidate() -> regret.Candidate:
    made = threshold.Threshold(ladder=(0, 1, 2))
    return regret.Candidate(
        **{"name": "threshold", "gamma": GAMMA, "gamma_policy": made},
        state=made.init(),
        is_fixed=False,
    )


def test_simulated_rows_are_those_of_the_simulator(texts):
    """One text at a time, the sum of `measure_regret`; regret is of the whole set."""
    candidates = [*fixed_candidates(), ladder_candidate()]
    rows = regret.simulated_rows(candidates, {"easy": texts}, COSTS, hand_on=False)
    single = [
        measure_regret(
            candidates[-1].gamma_policy,
            candidates[-1].state,
            text.is_kept,
            round_s=COSTS.round_s(),
            catch_up_s=COSTS.catch_up_s,
        )
        for text in texts
    ]
    assert [row["policy"] for row in rows] == [c.name for c in candidates]
    fixed_s = np.sum([found.fixed_s for found in single], axis=0)
    adaptive = rows[-1]
    assert adaptive["seconds"] == pytest.approx(sum(f.seconds for f in single))
    assert adaptive["fixed_s"] == pytest.approx(fixed_s)
    assert adaptive["best_gamma"] == np.argmin(fixed_s)
    best_s, plain_s = min(fixed_s), len(texts) * GEN_TOKENS * COSTS.plain_s
    assert adaptive["regret"] == pytest.approx(adaptive["seconds"] / best_s - 1)
    assert adaptive["speedup"] == pytest.approx(plain_s / adaptive["seconds"])
    assert min(row["regret"] for row in rows if row["is_fixed"]) == 0


def test_rows_of_live_runs():
    """Regret is of each repeat, against the best gamma of that repeat."""
    live = regret.LiveSet(
        seconds={
            "plain": [1.0, 2.0, 1.0],
            "fixed 0": [1.1, 2.2, 1.1],
            "fixed 1": [1.0, 4.0, 1.0],
            "fixed 2": [2.0, 4.0, 2.0],
            "threshold": [1.5, 3.3, 1.5],
        },
        matched={"fixed 0": True, "fixed 1": True, "fixed 2": True, "threshold": False},
    )
    candidates = [*fixed_candidates(), ladder_candidate()]
    rows = regret.live_rows("easy", live, candidates, num_texts=2)
    adaptive = rows[-1]
    assert adaptive["best_gamma"] == [1, 0, 1]
    assert adaptive["regret"] == pytest.approx(0.5)
    # Above 1 would be faster than decoding alone; these took half as long again.
    assert adaptive["speedup"] == pytest.approx(1 / 1.5)
    assert adaptive["speedup_p10"] == pytest.approx(
        1 / 1.65 + 0.2 * (1 / 1.5 - 1 / 1.65)
    )
    assert [row["matched"] for row in rows] == [True, True, True, False]


def command(folders, *more: str) -> list[str]:
    return [
        *(*models_of(folders), "--gamma", str(GAMMA)),
        *("--prompts", str(folders[0].parent / "prompts.txt")),
        *("--gen-tokens", str(GEN_TOKENS), "--page-size", str(PAGE_SIZE)),
        *("--repeats", "1", "--cost-repeats", "1"),
        *more,
    ]
