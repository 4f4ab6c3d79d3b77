"""Replay: its counters are those of live rounds; rows, regret, bad input."""

import dataclasses
import functools
import itertools

import pytest
from script_runs import assert_fails_with, models_of, rows_from, rows_of, write_rows
from slow_cases import slow

from experiments import replay, spec_round
from experiments.lib import policies, runs
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import registry


WAYS = {"greedy": "0", "sampled": "0.7 --top-k 20 --top-p 0.8 --seed 7"}


@pytest.fixture(scope="module")
def write(folders, tmp_path_factory):
    """Returns a function that writes three texts of a kind once, and returns the file.

    The target drafts for itself, as in the quick replay: both share their programs.
    """

    @functools.cache
    def written(kind):
        path = tmp_path_factory.mktemp("texts") / f"{kind}.jsonl"
        given = f"--prompts 3 --gen-tokens 12 --ignore-stop --gamma 4 --out {path} "
        given += f"--impl native --page-size 256 --temperature {WAYS[kind]}"
        given = [*models_of([folders[0]] * 2), *given.split()]
        assert spec_round.main(given) == 0
        return path

    return written


# Every drafter in both settings. The quick case draws a model's drafts as well as the
# target's tokens; of those, a lookup sees no more than the text. The rest is slow.
REPLAYED = [name for name in registry.BUILDERS if name not in registry.NEED_TARGET]
RUNS = [("sampled", "draft-model")]
RUNS += [slow(*run) for run in itertools.product(WAYS, REPLAYED) if run != RUNS[0]]


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_replayed_counters_are_live_counters(kind, name, folders, write):
    """Fails if a drafter sees anything else, or draws with other noise, than live."""
    target, texts = folders[0], write(kind)
    args = [str(texts), "--gamma", "4", "--drafter", name, "--draft", str(target)]
    args = replay.parse_args(args)
    texts = replay.read(args.texts)
    built = replay.build(args, texts)[name]
    lm = loading.load(target, drafter="ngram", gamma_max=4, impl="native")
    if name == "oracle":  # It has the tokens of the texts alone.
        size = lm.target.config.vocab_size
        built = dataclasses.replace(built[0], vocab_size=size), built[1]
    lm = lm.with_drafter(*built)
    sizes = {"gamma": 4, "gen_tokens": 12, "capacity": 256, "page_size": 256}
    settings = runs.Settings(lm=lm, sampling=texts.settings, **sizes)
    total = metrics.Counters()
    for number, prompt in enumerate(texts.prompts):
        live = runs.run_speculative(settings, prompt)
        found, forwards, _ = replay.replay(texts, number, built, replay.Way(gamma=4))
        assert found == live.counters and forwards.sum() == live.counters.target_steps
        assert live.tokens == texts.generated[number]
        total += found
    metrics.identities(total)
    assert total.proposed > 0
    if name in ("draft-model", "oracle"):
        assert total.accepted == total.proposed
    if name == "draft-model":  # Negative control: a text that is not the target's.
        (first, *rest), *others = texts.generated
        wrong = [[(first + 1) % 250, *rest], *others]
        texts = dataclasses.replace(texts, generated=wrong)
        found, _, _ = replay.replay(texts, 0, built, replay.Way(gamma=4))
        assert found.accepted < found.proposed


def test_drafters_are_evaluated_without_the_target(write, tmp_path, capsys):
    """Fails if a window is charged for rows that it lacked, or by other costs."""
    given = [str(write("sampled")), "--drafter", "oracle", "--gamma", "1,4"]
    given += ["--round-costs", "1,1.5,2,2.5,3", "--gamma-policy", "budget"]
    rows = rows_from(replay.main, tmp_path, given)
    ways = [(1, "fixed"), (4, "fixed"), (4, policies.BUDGET)]
    assert [(row["gamma"], row["gamma_policy"]) for row in rows] == ways
    best = rows[1]
    assert best["acceptance_rate"] == 1.0 and best["tokens"] == 36
    # 12 tokens by windows of 4 drafts: 5, 5, and the 2 that remain.
    assert best["rounds"] == 9 and best["rounds_by_rows"] == [0, 0, 3, 0, 0, 6]
    assert best["expected_speedup"] == pytest.approx(36 / (3 * 1.5 + 6 * 3.0))
    assert best["regret"] == 0 and rows[0]["regret"] == pytest.approx(27 / 22.5 - 1)
    assert all(row["regret"] >= 0 for row in rows if row["gamma_policy"] == "fixed")
    assert "oracle" in capsys.readouterr().out


def test_a_choice_alone_is_compared_with_decoding(write, folders, tmp_path):
    """Fails if a drafter has no regret when no constant gamma is beside it."""
    given = [str(write("sampled")), "--drafter", "choice", "--draft", str(folders[1])]
    given += ["--gamma", "2", "--round-costs", "1,1.5,2"]
    (row,) = rows_from(replay.main, tmp_path, given)
    assert row["regret"] == pytest.approx(1 / row["expected_speedup"] - 1)


NO_TEXTS = "changed.jsonl: no texts of one run"
LARGE = [{"plain_ids": [10**6] * 12}, {}, {}, {}]


def test_files_that_are_no_texts(write, tmp_path, capsys):
    for change, words in (
        (lambda rows: [], NO_TEXTS),
        (lambda rows: rows[:-1], NO_TEXTS),
        (lambda rows: rows * 2, NO_TEXTS),
        (lambda rows: [*rows[:-1], rows[-1] | {"ignore_stop": False}], NO_TEXTS),
        (lambda rows: [{"kind": "prompt"}, *rows], NO_TEXTS),
        (lambda rows: list(map(dict.__or__, rows, LARGE)), "have token 1000000"),
    ):
        path = write_rows(tmp_path / "changed.jsonl", change(rows_of(write("sampled"))))
        given = [str(path), "--drafter", "draft-model", "--gamma", "4"]
        assert_fails_with(replay.main, capsys, given, words)
