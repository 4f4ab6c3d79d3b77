"""Superseded designs: which keep the bits of decoding; the ladder; mismatches."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_targets
from decoding import ALWAYS, GAMMA_MAX, PROMPT, SMALL, Ask
from script_runs import models_of, rows_of

from experiments import history
from experiments.lib import mismatches, runs, superseded
from spec_jax import loading, testing
from spec_jax.engine import round as round_lib, rows
from spec_jax.model import (
    config as config_lib,
    llama,
    prompt as prompt_lib,
)
from spec_jax.paging import allocator, cache


TARGET, PARAMS = decoding.TARGET, decoding.TARGET_PARAMS
START = len(PROMPT) - 1
WINDOW = [PROMPT[-1], 4, 9, 33, 60]


@functools.partial(jax.jit, static_argnames=("path",))
def forward(path, params, kv, *, tokens, start, num_active):
    """Compiled once for each path: how many rows are active is data."""
    return path.forward(params, kv, tokens=tokens, start=start, num_active=num_active)


def verify(path, params=PARAMS, *, num_active=5, poison=False, window=()):
    """Logits of the active rows, and K/V of the text with the window, all layers."""
    model = getattr(path, "model", path)
    kv = model.new_cache(capacity=decoding.CAPACITY, page_size=decoding.PAGE_SIZE)
    if poison:  # NaN where nothing is held.
        spoil = lambda pools: tuple(jnp.full_like(pool, jnp.nan) for pool in pools)
        kv = kv.replace(k=spoil(kv.k), v=spoil(kv.v))
    kv = prompt_lib.prefill(model, params, kv, PROMPT[:-1])
    kv, logits = forward(
        path,
        params,
        kv,
        tokens=jnp.asarray(window or WINDOW),
        start=jnp.int32(START),
        num_active=jnp.int32(num_active),
    )
    allocator.check(kv)
    layers = range(path.config.num_layers)
    held = [cache.gather(kv, layer, 0, START + num_active) for layer in layers]
    return np.asarray(logits)[:num_active], held


@pytest.mark.few(1)
@pytest.mark.parametrize("num_active", [1, 3, 5])
def test_the_row_loop_has_the_bits_of_rows(num_active):
    """Fails if decoding row by row is other arithmetic than a window of rows."""
    path = superseded.make_path("row-loop", TARGET)
    expected = verify(TARGET, num_active=num_active)
    testing.assert_same_bits(verify(path, num_active=num_active), expected)


@pytest.mark.parametrize("name", ["flash", "library-rows"])
def test_library_windows_have_the_values_of_rows(name):
    """Fails if a window forgets its prefix, a mask, a norm or a rotation."""
    path = superseded.make_path(name, TARGET)
    # Two layers, and each sums at most 96 terms: an error of a sum is passed on.
    close = {"dtype": "float32", "reduction": 96 * 8}
    for num_active in (1, 5):
        logits, held = verify(path, num_active=num_active, poison=True)
        expected_logits, expected_held = verify(TARGET, num_active=num_active)
        testing.assert_rows_close(logits, expected_logits, **close)
        for actual, expected in zip(held, expected_held, strict=True):
            for one, other in zip(actual, expected, strict=True):
                testing.assert_rows_close(one, other, **close)
    # And a later row changes no earlier one.
    others, _ = verify(path, window=[*WINDOW[:3], 1, 2])
    testing.assert_same_bits(others[:3], logits[:3])
    assert (testing.bits(others[3:]) != testing.bits(logits[3:])).any(axis=1).all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong(wrong_targets.Around):
    """A verify path that always chooses the token after the right one."""

    def choose(self, logits, num_active):
        return (self.target.choose(logits, num_active) + 1) % 96


FLASH = superseded.make_path("flash", SMALL.target)


def decide(path, ask: Ask):
    """Rounds that decoding decides, compared with decoding on both caches.

    Returns the slot and the caches.
    """
    target = superseded.DecodeRounds(model=SMALL.target, path=path, width=GAMMA_MAX + 1)
    scheduler = SMALL.scheduler(target=target)
    state = decoding.run(SMALL, [ask], scheduler=scheduler)
    for kv in (state.cache.mirror, state.cache.commit):
        decoding.assert_as_decoded(SMALL, state.replace(cache=kv), [ask])
    return decoding.slot_of(state), state.cache


@pytest.mark.few(1)
@pytest.mark.parametrize("path", [FLASH, Wrong(target=FLASH)], ids=["flash", "wrong"])
def test_tokens_and_both_caches_are_those_of_decoding(path):
    """Fails if a bit of verification gets into what is committed."""
    for run in (0, 1, 3, ALWAYS):
        decide(path, Ask(run=run))


def test_mismatches_are_committed_rows_that_verification_saw_otherwise():
    """Negative control of the counter: a verify path that is always wrong."""
    one, kv = decide(SMALL.target, Ask(run=3))
    assert int(kv.mismatches) == 0
    wrong = Wrong(target=SMALL.target)
    one, kv = decide(wrong, Ask(run=3))
    assert int(kv.mismatches) == 40
    text = decoding.text(decoding.decoded(SMALL, Ask()))
    one, kv = decide(wrong, Ask(stop_ids=(text[len(PROMPT) + 2],)))
    assert int(kv.mismatches) == one.length - len(PROMPT)


def test_the_librarys_products_are_of_qwen3():
    """Fails if a model without norms of queries and keys ends in a traceback."""
    sizes = dataclasses.fields(config_lib.ModelConfig)
    sizes = {field.name: getattr(TARGET.config, field.name) for field in sizes}
    model = dataclasses.replace(TARGET, config=llama.LlamaConfig(**sizes))
    for name in ("flash", "library-rows"):
        with pytest.raises(ValueError, match=f"{name}.* of qwen3, .* of llama: take"):
            superseded.make_path(name, model)


def command(folders, *more: str) -> list[str]:
    sizes = ("--gen-tokens", "6", "--gamma", "2", "--prompts", "1")
    return [*models_of(folders), *sizes, *more]


@pytest.mark.slow
def test_every_rung_is_run_and_written(folders, tmp_path):
    """Fails if a rung runs another design than its own."""
    out, dump = tmp_path / "out.jsonl", tmp_path / "dump.jsonl"
    more = ("--out", str(out), "--dump-verify-mismatches", str(dump))
    status = history.main(command(folders, *more))
    rows = rows_of(out)
    rungs = [rung.name for rung in history.LADDER]
    prompts, rows = rows[: len(rungs)], rows[len(rungs) :]
    assert [row["rung"] for row in prompts] == [row["rung"] for row in rows] == rungs
    assert {row["kind"] for row in prompts} == {"history_prompt"}
    decided, flash, loop, library, contract = rows
    assert decided["decode_steps"] == 2 * (decided["rounds"] + decided["accepted"])
    assert decided["matched"] and loop["matched"] and contract["matched"]
    assert contract["verify_decode_mismatches"] == loop["verify_decode_mismatches"] == 0
    assert flash["decode_steps"] == contract["decode_steps"] == 0
    assert loop["verify_steps"] == loop["rounds"] + loop["proposed"]
    assert contract["target_steps"] == contract["rounds"]
    assert len(rows_of(dump)) == flash["verify_decode_mismatches"]
    assert status == (0 if history.story_holds(rows) else history.DOES_NOT_HOLD)


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
    sizes = {"gamma_max": 2, "slab": 3, "impl": "native"}
    lm = loading.load(folders[0], draft=folders[1], drafter="ngram", **sizes)
    run = runs.Settings(gamma=2, gen_tokens=8, capacity=64, page_size=16)
    prompt = [5, 9, 60, 31]
    about = {"name": "p", "verify_path": "paged-decode"}
    assert mismatches.find(lm, run, prompt, **about) == []
    position = len(prompt) + 3
    real = rows.SlotRows(model=lm.target, num_slots=1)
    wrong = WrongAt(target=real, position=position)
    monkeypatch.setattr(superseded, "target", lambda *_: wrong)
    made = runs.make_scheduler(lm, run)
    speculator = made.speculator.replace(target=wrong)
    scheduler = dataclasses.replace(made, speculator=speculator)
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
