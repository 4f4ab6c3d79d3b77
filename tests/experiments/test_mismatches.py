"""Mismatches: a planted one is found, with what both sides saw."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import wrong_targets

from experiments.lib import (
    mismatches,
    runs,
    superseded,
)
from spec_jax import loading
from spec_jax.engine import round as round_lib, rows


GAMMA = 2


def load(folders) -> loading.LanguageModel:
    target, draft = folders
    options = {"gamma_max": GAMMA, "slab": GAMMA + 1, "impl": "native"}
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
