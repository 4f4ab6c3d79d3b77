"""Mismatches: what is in a line, that a planted one is found, and a real one again."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets

from experiments import parity
from experiments.lib import (
    mismatches,
    paths,
    prompt_files,
    prompts,
    runs,
    scenes,
    superseded,
)
from spec_jax import loading, testing
from spec_jax.debug.microscope import compare, scene as scene_lib
from spec_jax.engine import round as round_lib, rows


GAMMA = 2


def load(folders, *, dtype="float32", impl="native") -> loading.LanguageModel:
    target, draft = folders
    options = {"gamma_max": GAMMA, "slab": GAMMA + 1, "dtype": dtype, "impl": impl}
    # Prompt lookup has no model to compile.
    return loading.load(target, draft=draft, drafter="ngram", **options)


def settings(gen_tokens: int) -> runs.Settings:
    return runs.Settings(gamma=GAMMA, gen_tokens=gen_tokens, capacity=64, page_size=16)


def scheduler_of(lm, settings, target):
    made = runs.make_scheduler(lm, settings)
    speculator = made.speculator.replace(target=target)
    return dataclasses.replace(made, speculator=speculator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongAt(wrong_targets.Around):
    """Verification that chooses the runner-up at one position."""

    position: int

    def verify(self, params, cache, window):
        cache, verified = self.target.verify(params, cache, window)
        logits = verified.logits
        highest = jnp.argmax(logits, axis=-1)
        lowered = logits.at[jnp.arange(logits.shape[0]), highest].add(-1e6)
        wrong = (verified.positions == self.position)[:, None]
        logits = jnp.where(jnp.broadcast_to(wrong, logits.shape), lowered, logits)
        return cache, verified.replace(logits=logits)


def test_a_planted_mismatch_is_found_with_both_sides(folders, monkeypatch):
    """Fails if a line is of another position, text or side."""
    prompt, lm, run = [5, 9, 60, 31], load(folders), settings(8)
    about = {"name": "p", "verify_path": "paged-decode"}
    assert mismatches.find(lm, run, prompt, **about) == []
    position = len(prompt) + 3
    real = rows.SlotRows(model=lm.target, num_slots=1)
    wrong = WrongAt(target=real, position=position)
    monkeypatch.setattr(superseded, "target", lambda *_: wrong)
    scheduler = scheduler_of(lm, run, wrong)
    (line,) = mismatches.find(lm, run, prompt, **about, scheduler=scheduler)
    state = scheduler.begin(runs.make_request(lm, run, prompt))
    state = round_lib.generate(scheduler.speculator, state, max_rounds=jnp.int32(8))
    text = np.asarray(state.slots.tokens)[0, : int(state.slots.length[0])].tolist()
    assert line["position"] == position
    start = len(prompt) + len(line["tokens"])
    assert line["prompt_ids"] + line["tokens"] == text[:start]
    assert line["window"][0] == text[start]
    assert start <= position < start + len(line["window"])
    assert line["verify_argmax"] == text[position + 1]
    # The runner-up of decoding is what this verification chose.
    assert line["decode_top5"][0][0] == line["decode_argmax"]
    assert line["decode_top5"][1][0] == line["verify_argmax"]
    assert line["verify_top5"][0][0] == line["verify_argmax"]
    texts = [lm.tokenizer.decode([token]) for token, _ in line["verify_top5"]]
    assert line["verify_top5_texts"] == texts and len(line["decode_top5_texts"]) == 5
    assert line["decode_margin_ulp"] > 0 and line["margin_ulp"] > 0


@pytest.fixture(scope="module")
def lines(folders) -> list[dict]:
    """Random weights are so often undecided that bfloat16 flips some of them."""
    lm, run = load(folders, dtype="bfloat16"), settings(40)
    named = [
        prompt_files.Prompt(id=str(n), text=f"def f{n}(x):", category=None)
        for n in range(12)
    ]
    scheduler = scheduler_of(lm, run, superseded.target("flash", lm.target))
    found = []
    for prompt, ids in zip(named, prompts.encode(lm, named, raw=True), strict=True):
        shared = {"verify_path": "flash", "scheduler": scheduler}
        found += mismatches.find(lm, run, ids, name=prompt.id, **shared)
    return found


@pytest.fixture(scope="module")
def latest(lines) -> dict:
    """The line with the most windows before it."""
    return max(lines, key=lambda line: len(line["starts"]))


@pytest.mark.slow
def test_a_real_mismatch_is_met_again(folders, latest, tmp_path, capsys):
    """Fails if the second run does not start from what its own windows wrote."""
    path, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    path.write_text("\n" + json.dumps(latest) + "\n")
    command = ["--target", str(folders[0]), "--out", str(out)]
    command += ["--mismatch", f"{path}:2"]
    assert parity.main(command) == parity.NOT_AS_EXPECTED
    row = json.loads(out.read_text())
    assert row["history"] == "own" and row["met_again"] is True
    assert row["prefix"]["first"]["position"] >= len(latest["prompt_ids"]) - 1
    choices = row["rows"][latest["position"] - latest["start"]]
    # Not only the choice: the logits are those of the run, to the bit.
    assert choices["verify_top"] == latest["verify_top5"]
    assert choices["reference_top"] == latest["decode_top5"]
    met = f"is met again: {latest['decode_argmax']} against {latest['verify_argmax']}"
    assert met in capsys.readouterr().out
    # Negative control: from what decoding wrote, it is another run.
    parity.main([*command, "--history", "decode"])
    row = json.loads(out.read_text())
    assert row["history"] == "decode" and row["prefix"]["differing"] == 0
    choices = row["rows"][latest["position"] - latest["start"]]
    assert choices["verify_top"] != latest["verify_top5"]


def test_the_history_is_that_of_the_rounds(folders, latest):
    """Fails if a row's K/V depended on drafts that were rejected after it.

    Negative control: windows of one row, since a row's bits do depend on the height.
    """
    lm, run, prompt = (
        load(folders, dtype="bfloat16"),
        settings(40),
        latest["prompt_ids"],
    )
    scheduler = scheduler_of(lm, run, superseded.target("flash", lm.target))
    state, starts = scheduler.begin(runs.make_request(lm, run, prompt)), []
    while bool(state.slots.running[0]):
        starts.append(int(state.slots.length[0]) - 1)
        state = round_lib.generate(scheduler.speculator, state, max_rounds=jnp.int32(1))
    slots, end = state.slots, int(state.slots.length[0]) - 1
    assert starts[: len(latest["starts"])] == latest["starts"]
    assert int(slots.num_accepted[0]) < int(slots.num_proposed[0])
    text = tuple(np.asarray(slots.tokens)[0, : end + 1].tolist())
    real = scene_lib.capture(state.cache, text[:end], text[end:])
    given = mismatches.Text(
        prompt_len=len(prompt), prefix=text[:end], window=text[end:]
    )

    def rebuilt(rows, starts):
        path = paths.record_path("flash", lm.target, page_size=16, window_rows=rows)
        return scenes.own(given, path, lm.params, starts=(*starts, end), by_rows=None)

    found = rebuilt(GAMMA + 1, starts)
    testing.assert_same_bits((found.k, found.v), (real.k, real.v))
    other = rebuilt(1, range(starts[0], end))
    assert compare.compare_prefixes(other, real).differing


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, "float32", 2.0**-23),
        (-7.09, "bfloat16", 2.0**-5),
        (8.0, "bfloat16", 2.0**-4),
        (0.0, "float32", 2.0**-149),
    ],
)
def test_units_in_the_last_place(value, dtype, expected):
    assert mismatches.ulp(value, dtype) == expected
