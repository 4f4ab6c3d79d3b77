"""The comparison with Hugging Face: its rows, equal tokens, and settings."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_pair
from script_runs import models_of, rows_from, rows_of

from experiments import compare_hf
from experiments.lib import compare, hf, prompts as prompts_lib
from spec_jax.analysis import metrics
from spec_jax.model import load, params as params_lib, save as save_lib


GEN_TOKENS = 8
GAMMAS = (1, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a target and a draft that is often right; prompts.txt is beside them."""
    folder = tmp_path_factory.mktemp("pair")
    lines = ["def first(x):", "import second", "class Third(Base):", "for i in x:"]
    (folder / "prompts.txt").write_text("\n".join(lines))
    target, draft = tiny_pair.write(folder)
    config, params = load.load(target)
    noise = params_lib.init(jax.random.key(1), config, stddev=0.03)
    save_lib.save(draft, config, jax.tree.map(lambda a, b: a + b, params, noise))
    return target, draft


def command(folders, *more: str) -> list[str]:
    return [
        *models_of(folders),
        *("--prompts", str(folders[0].parent / "prompts.txt"), "--per-length", "1"),
        *("--lengths", "4", "9", "20", "--gammas", "1,3", "--repeats", "1"),
        *("--gen-tokens", str(GEN_TOKENS)),
        *more,
    ]


@pytest.fixture(scope="module")
def oracle():
    """Skips without torch and transformers; sets one thread, as models are tiny."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.processes, "usable_cores", lambda: 1)
        yield


@pytest.fixture(scope="module")
def measured(oracle, folders, tmp_path_factory):
    """Returns the file with the rows of one run, which must be identical."""
    out = tmp_path_factory.mktemp("out") / "out.jsonl"
    more = ("--per-length", "2", "--repeats", "2", "--ignore-stop", "--out", str(out))
    assert compare_hf.main(command(folders, *more)) == compare_hf.IDENTICAL == 0
    return out


@pytest.mark.slow
def test_rows_of_runs(measured):
    """Fails if a run is missing, or a speed does not follow from prompts' seconds."""
    rows = rows_of(measured, "comparison")
    prompts = rows_of(measured, "prompt")
    every = 2 * (1 + 2 * len(GAMMAS))
    assert len(rows) == every * len(prompts_lib.LENGTHS)
    assert [row["length"] for row in rows[::every]] == list(prompts_lib.LENGTHS)
    for row in rows:
        of_length = [p for p in prompts if p["length"] == row["length"]]
        names = ("side", "method", "gamma")
        seconds = [
            run["seconds"]
            for prompt in of_length
            for run in prompt["runs"]
            if all(run[name] == row[name] for name in names)
        ]
        assert np.shape(seconds) == (2, 2) and np.min(seconds) > 0
        speed = np.median(2 * GEN_TOKENS / np.sum(seconds, axis=0))
        assert row["tok_s"] == pytest.approx(speed)
        assert row["tok_s_p10"] <= row["tok_s"] <= row["tok_s_p90"]
        assert row["identical"] == row["prompts"] == row["n"] == 2
        assert row["dtype"] == "float32" and row["hf"]["torch_version"]
        if row["gamma"] is None or row["side"] == "transformers":
            assert row["proposed"] is row["acceptance_rate"] is None
        texts = [prompt["hf_ids"] for prompt in of_length]  # All runs wrote these.
        repeated = [metrics.repetition(text) for text in texts]
        assert row["repetition"] == pytest.approx(np.mean(repeated))
        is_reference = (row["side"], row["gamma"]) == ("transformers", None)
        assert not is_reference or row["vs_hf"] == row["vs_hf_p90"] == 1
    (summary,) = rows_of(measured, "summary")
    assert summary["greedy_identical"] == summary["prompts"] == 6
    assert summary["matched"] is True


def test_another_target_is_told(oracle, folders, tmp_path, monkeypatch):
    """Negative control: other weights on Hugging Face's side give status 2."""
    target, draft = folders
    config = tiny_pair.config(num_layers=2)
    other = tiny_pair.write_model(tmp_path / "other", config, seed=7)
    real = hf.load
    monkeypatch.setattr(
        hf, "load", lambda *_, **keywords: real(other, draft, **keywords)
    )
    given = command(folders, "--gammas", "3", "--ignore-stop")
    *_, summary = rows_from(compare_hf.main, tmp_path, given, status=2)
    assert summary["greedy_identical"] < summary["prompts"]
    assert summary["matched"] is True


def test_equal_tokens_of_nan_do_not_match():
    """Fails if a run of either kind matches with NaN, or equal finite runs do not."""
    drafted = compare.Run(side=compare.OURS, method="draft model", gamma=3)
    finite = compare.Generated(ids=[1, 2], count=2, decode_s=1.0)
    prompt_runs = lambda every: compare.PromptRuns(
        prompt=None, ids=[], every=every, reference=compare.OUR_PLAIN
    )
    same = {compare.OUR_PLAIN: [finite], drafted: [finite, finite]}
    assert prompt_runs(same).matched and prompt_runs(same).nonfinite == 0
    for run in same:
        wrong = dataclasses.replace(finite, nonfinite=2)
        one = prompt_runs(same | {run: [finite, wrong]})
        assert one.nonfinite == 2 and not one.matched


def test_hugging_face_does_not_stop_or_sample(oracle, folders, tmp_path):
    """Fails if settings beside the weights make it stop early or sample."""
    import transformers

    config = tiny_pair.config(num_layers=2)
    target = tiny_pair.write_model(tmp_path / "target", config, seed=0)
    options = {"method": hf.PLAIN, "gamma": None, "max_tokens": 12, "stop_ids": ()}
    greedy = hf.load(target, None, dtype="float32")
    expected = hf.generate(greedy, [5, 6, 7], **options)
    assert len(expected) == 12
    own = {"eos_token_id": expected[2], "do_sample": True, "temperature": 9.0}
    (target / "generation_config.json").write_text(json.dumps(own))
    baseline = hf.load(target, folders[1], dtype="float32")
    assert hf.generate(baseline, [5, 6, 7], **options) == expected
    drafted = options | {"method": hf.DRAFT_MODEL, "gamma": 3}
    assert hf.generate(baseline, [5, 6, 7], **drafted) == expected
    # The settings are real ones: transformers reads their stop token.
    settings = transformers.GenerationConfig.from_pretrained(target, do_sample=False)
    assert settings.eos_token_id == expected[2]


def test_a_target_alone_is_compared_by_prompt_lookup(oracle, folders, tmp_path):
    """Fails if a draft model is asked for, or other tokens in bfloat16 are failures."""
    target = ["--target", str(folders[0])]
    more = [*command(folders)[4:], "--dtype", "bfloat16"]
    *rows, summary = rows_from(compare_hf.main, tmp_path, [*target, *more])
    rows = [row for row in rows if row["kind"] == "comparison"]
    assert {row["method"] for row in rows} == {"plain", "prompt lookup"}
    assert summary["matched"] and rows[0]["draft"] is None
