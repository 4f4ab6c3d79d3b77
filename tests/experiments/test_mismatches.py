"""The dump of mismatches: what is in a line, and that a planted one is found."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from experiments import spec_round
from experiments.support import mismatches, model_pair, paired_runs


GAMMA = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongAt:
    """Verification that chooses the runner-up at one position."""

    inner: object
    position: int

    def forward(self, params, cache, *, tokens, start, num_live):
        cache, logits = self.inner.forward(
            params, cache, tokens=tokens, start=start, num_live=num_live
        )
        offsets = jnp.arange(logits.shape[0])
        lowered = logits.at[offsets, logits.argmax(axis=-1)].add(-1e6)
        rows = start + offsets
        wrong = (rows == self.position)[:, None]
        return cache, jnp.where(jnp.broadcast_to(wrong, logits.shape), lowered, logits)

    def choose(self, logits, num_live):
        return self.inner.choose(logits, num_live)

    def truncate(self, cache, new_len):
        return self.inner.truncate(cache, new_len)

    def is_starved(self, cache):
        return self.inner.is_starved(cache)


def load(folders):
    target, draft = folders
    return model_pair.load_pair(
        target, draft, gamma_max=GAMMA, slab=GAMMA + 1, dtype=None, impl="xla"
    )


@pytest.mark.parametrize("acceptance", paired_runs.ACCEPTANCES)
def test_a_planted_mismatch_is_dumped_with_both_sides(folders, acceptance):
    """Fails if a line is of another position, text or side."""
    prompt = [5, 9, 60, 31]
    pair = load(folders)
    settings = paired_runs.Settings(
        gamma=GAMMA, gen_tokens=8, capacity=64, page_size=16, acceptance=acceptance
    )
    find = {"name": "p", "verify_path": "paged-decode"}
    assert mismatches.find(pair, settings, prompt, **find) == []
    position = len(prompt) + 3
    wrong = dataclasses.replace(
        pair, verifier=WrongAt(inner=pair.target, position=position)
    )
    (line,) = mismatches.find(wrong, settings, prompt, **find)
    json.dumps(line, allow_nan=False)
    run = paired_runs.run_speculative(wrong, settings, prompt)
    counted = run.mismatches
    if counted is None:
        counted = paired_runs.count_mismatches(pair, settings, prompt, run.tokens)
    assert counted == 1
    assert line["position"] == position and line["acceptance"] == acceptance
    start = len(prompt) + len(line["tokens"])
    text = prompt + run.tokens
    assert line["prompt_ids"] + line["tokens"] == text[:start]
    assert line["window"][0] == text[start]
    assert start <= position < start + len(line["window"])
    decided = line["verify_argmax"] if acceptance == "verify" else line["decode_argmax"]
    assert decided == text[position + 1]
    # The runner-up of decoding is what this verification chose.
    assert line["decode_top5"][0][0] == line["decode_argmax"]
    assert line["decode_top5"][1][0] == line["verify_argmax"]
    assert line["verify_top5"][0][0] == line["verify_argmax"]
    assert line["decode_margin_ulp"] > 0 and line["margin_ulp"] > 0


def test_the_flag_writes_the_lines(folders, tmp_path, capsys, monkeypatch):
    target, draft = folders
    prompts, out = tmp_path / "prompts.txt", tmp_path / "mismatches.jsonl"
    prompts.write_text("def add\n")
    real = model_pair.load_pair

    def planted(*folders, **options):
        pair = real(*folders, **options)
        return dataclasses.replace(
            pair, verifier=WrongAt(inner=pair.target, position=30)
        )

    command = [
        *("--target", str(target), "--draft", str(draft), "--impl", "xla"),
        *("--gen-tokens", "60", "--gamma", str(GAMMA), "--prompts", str(prompts)),
        *("--ignore-stop", "--dump-verify-mismatches", str(out)),
    ]
    assert spec_round.main(command) == spec_round.MATCHED
    assert out.read_text() == ""
    monkeypatch.setattr(model_pair, "load_pair", planted)
    assert spec_round.main(command) == spec_round.NOT_MATCHED
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["mismatch"]
    assert "1 of 1 mismatches met again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, "float32", 2.0**-23),
        (7.09, "bfloat16", 2.0**-5),
        (-7.09, "bfloat16", 2.0**-5),
        (8.0, "bfloat16", 2.0**-4),
        (0.0, "float32", 2.0**-149),
    ],
)
def test_units_in_the_last_place(value, dtype, expected):
    assert mismatches.ulp(value, dtype) == expected
    if value:
        near = np.spacing(np.float32(abs(value)))
        if dtype == "float32":
            assert mismatches.ulp(value, dtype) == near
