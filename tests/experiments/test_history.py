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
from script_runs import models_of, rows_of, write_rows

from experiments import history
from experiments.lib import mismatches, runs, superseded
from spec_jax import loading, testing
from spec_jax.engine import rows
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
    path = superseded.target("row-loop", TARGET)
    expected = verify(TARGET, num_active=num_active)
    testing.assert_same_bits(verify(path, num_active=num_active), expected)


@pytest.mark.parametrize("name", ["flash", "library-rows"])
def test_library_windows_have_the_values_of_rows(name):
    """Fails if a window forgets its prefix, a mask, a norm or a rotation."""
    path = superseded.target(name, TARGET)
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


FLASH = superseded.target("flash", SMALL.target)


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
            superseded.target(name, model)


@pytest.mark.slow
def test_every_rung_is_run_and_written(folders, tmp_path):
    """Fails if a rung runs another design than its own."""
    out, dump = tmp_path / "out.jsonl", tmp_path / "dump.jsonl"
    flags = f"--gen-tokens 6 --gamma 2 --prompts 1 --out {out}".split()
    flags += ["--dump-verify-mismatches", str(dump)]
    status = history.main([*models_of(folders), *flags])
    rungs, written = [rung.name for rung in history.LADDER], rows_of(out)
    assert [row["rung"] for row in written] == rungs * 2
    assert {row["kind"] for row in written[: len(rungs)]} == {"history_prompt"}
    decided, flash, loop, library, contract = written[len(rungs) :]
    assert decided["decode_steps"] == 2 * (decided["rounds"] + decided["accepted"])
    assert decided["matched"] and loop["matched"] and contract["matched"]
    assert contract["verify_decode_mismatches"] == loop["verify_decode_mismatches"] == 0
    assert flash["decode_steps"] == contract["decode_steps"] == 0
    assert loop["verify_steps"] == loop["rounds"] + loop["proposed"]
    assert contract["target_steps"] == contract["rounds"]
    assert library["verify_steps"] == library["rounds"]
    assert len(rows_of(dump)) == flash["verify_decode_mismatches"]
    rows = [contract | {"speedup_e2e": 2.0}, loop | {"speedup_e2e": 1.0}]
    assert not history.story_holds(rows) and history.story_holds(rows[::-1])
    told = history.story_holds(written[len(rungs) :])
    assert status == (0 if told else history.DOES_NOT_HOLD)


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


def test_a_planted_mismatch_is_found(folders, tmp_path):
    """Fails if a line is of another position or text, or cannot be read again."""
    sizes = {"gamma_max": 2, "slab": 3, "impl": "native"}
    lm = loading.load(folders[0], draft=folders[1], drafter="ngram", **sizes)
    run = runs.Settings(gamma=2, gen_tokens=8, capacity=64, page_size=16)
    prompt = [5, 9, 60, 31]
    assert mismatches.find(lm, run, prompt, name="p") == []
    position, real = len(prompt) + 3, rows.SlotRows(model=lm.target, num_slots=1)
    wrong = dataclasses.replace(run, verifier=WrongAt(target=real, position=position))
    (line,) = mismatches.find(lm, wrong, prompt, name="p")
    text = [*prompt, *runs.run_speculative(lm, wrong, prompt).tokens]
    chosen = runs.decode_choices(lm, wrong, prompt, text[len(prompt) :])
    assert line["position"] == position
    start = len(prompt) + len(line["tokens"])
    assert line["prompt_ids"] + line["tokens"] == text[:start]
    assert line["window"][0] == text[start]
    assert start <= position < start + len(line["window"])
    assert line["verify_argmax"] == text[position + 1] != line["decode_argmax"]
    assert line["decode_argmax"] == chosen[position + 1 - len(prompt)]
    path = write_rows(tmp_path / "lines.jsonl", [line | {"verify_path": "flash"}])
    read = mismatches.read(str(path))
    assert read.position == position and read.window_rows == 3
    write_rows(path, [line | {"verify_path": "flash", "start": 0}])
    with pytest.raises(ValueError, match="windows that begin at"):
        mismatches.read(str(path))
