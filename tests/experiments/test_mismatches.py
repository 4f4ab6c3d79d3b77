"""The dump of mismatches: what is in a line, and that a planted one is found."""

import collections
import contextlib
import dataclasses
import io
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from experiments import parity, spec_round
from experiments.support import (
    mismatches,
    model_pair,
    paired_runs,
    parity_inputs,
    parity_scenes,
)
from spec_jax import testing
from spec_jax.debug.microscope import compare, record as record_lib, scene as scene_lib


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


def load(folders, **changes):
    target, draft = folders
    options = {"gamma_max": GAMMA, "slab": GAMMA + 1, "dtype": None, "impl": "native"}
    # Prompt lookup has no model to compile.
    return model_pair.load_pair(target, draft, drafter="ngram", **(options | changes))


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
    texts = [pair.tokenizer.decode([token]) for token, _ in line["verify_top5"]]
    assert line["verify_top5_texts"] == texts and len(line["decode_top5_texts"]) == 5
    assert line["decode_margin_ulp"] > 0 and line["margin_ulp"] > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dump:
    """What a run on a path that is not by rows wrote."""

    path: pathlib.Path
    lines: list[dict]
    prompts: list[dict]
    summary: dict
    printed: str

    @property
    def latest(self) -> int:
        """The number, from 1, of the line with the most windows before it."""
        windows = [len(line["starts"]) for line in self.lines]
        return 1 + windows.index(max(windows))


@pytest.fixture(scope="module")
def dump(folders, tmp_path_factory) -> Dump:
    """Random weights are so often undecided that bfloat16 flips some of them."""
    place = tmp_path_factory.mktemp("dump")
    prompts, out, path = place / "p.txt", place / "out.jsonl", place / "lines.jsonl"
    prompts.write_text("".join(f"def f{number}(x):\n" for number in range(12)))
    target, draft = folders
    command = [
        *("--target", str(target), "--draft", str(draft), "--impl", "native"),
        *("--dtype", "bfloat16", "--verify-path", "flash", "--drafter", "ngram"),
        *("--gen-tokens", "40", "--gamma", str(GAMMA), "--prompts", str(prompts)),
        *("--ignore-stop", "--out", str(out), "--dump-verify-mismatches", str(path)),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert spec_round.main(command) == spec_round.NOT_MATCHED
    *rows, summary = map(json.loads, out.read_text().splitlines())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    text = printed.getvalue()
    return Dump(path=path, lines=lines, prompts=rows, summary=summary, printed=text)


def test_the_flag_writes_the_lines(dump):
    """Fails if a prompt without a mismatch has a line, or one with it has none."""
    count = dump.summary["verify_decode_mismatches"]
    assert f"{count} of {count} mismatches met again" in dump.printed
    assert {line["kind"] for line in dump.lines} == {"mismatch"}
    written = collections.Counter(line["id"] for line in dump.lines)
    counted = {row["id"]: row["verify_decode_mismatches"] for row in dump.prompts}
    assert written == collections.Counter(counted) and count == written.total() > 0


def test_a_real_mismatch_is_met_again(folders, dump, tmp_path, capsys):
    """Fails if the second run does not start from what its own windows wrote."""
    line, out = dump.lines[dump.latest - 1], tmp_path / "out.jsonl"
    command = ["--target", str(folders[0]), "--out", str(out)]
    command += ["--mismatch", f"{dump.path}:{dump.latest}"]
    assert parity.main(command) == parity.NOT_AS_EXPECTED
    row = json.loads(out.read_text())
    assert row["history"] == "own" and row["met_again"] is True
    assert row["prefix"]["first"]["position"] >= len(line["prompt_ids"]) - 1
    choices = row["rows"][line["position"] - line["start"]]
    # Not only the choice: the logits are those of the run, to the bit.
    assert choices["verify_top"] == line["verify_top5"]
    assert choices["reference_top"] == line["decode_top5"]
    met = f"is met again: {line['decode_argmax']} against {line['verify_argmax']}"
    assert met in capsys.readouterr().out
    # Negative control: from what decoding wrote, it is another run.
    parity.main([*command, "--history", "decode"])
    row = json.loads(out.read_text())
    assert row["history"] == "decode" and row["prefix"]["differing"] == 0
    choices = row["rows"][line["position"] - line["start"]]
    assert choices["verify_top"] != line["verify_top5"]


@pytest.mark.parametrize("impl", ["native", "xla"])
def test_the_history_is_that_of_the_rounds(folders, dump, impl):
    """Fails if a row's K/V depended on drafts that were rejected behind it.

    Negative control: windows of one row, since a row's bits do depend on the height.
    """
    line = dump.lines[dump.latest - 1]
    shared = {"dtype": "bfloat16", "impl": impl, "verify_path": "flash"}
    pair = load(folders, **shared)
    settings = paired_runs.Settings(
        gamma=GAMMA,
        gen_tokens=40,
        capacity=dump.summary["capacity"],
        page_size=dump.summary["page_size"],
    )
    run = paired_runs.Rounds(pair, settings, line["prompt_ids"])
    state, starts = run.begin(), []
    while not bool(state.done):
        starts.append(int(state.length) - 1)
        state = run.generate(state, max_rounds=jnp.int32(1))
    end = int(state.length) - 1
    if impl == "native":
        assert starts[: len(line["starts"])] == line["starts"]
    assert int(state.num_accepted) < int(state.num_proposed)
    text = tuple(np.asarray(state.tokens)[: end + 1].tolist())
    real = scene_lib.capture(state.cache, text[:end], text[end:])
    given = parity_inputs.Text(
        prompt_len=len(line["prompt_ids"]), prefix=text[:end], window=text[end:]
    )

    def rebuilt(rows, starts):
        path = record_lib.Path(
            name="flash", model=pair.target, page_size=16, window_rows=rows
        )
        return parity_scenes.own_scene(
            given, path, pair.params[0], starts=(*starts, end), by_rows=None
        )

    found = rebuilt(GAMMA + 1, starts)
    testing.assert_same_bits((found.k, found.v), (real.k, real.v))
    other = rebuilt(1, range(starts[0], end))
    assert compare.compare_prefixes(other, real).differing


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
