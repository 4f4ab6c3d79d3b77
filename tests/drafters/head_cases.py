"""Heads of random weights, and float64 oracles in NumPy on the files of the same heads.

EAGLE-3 and P-EAGLE have `eagle3_oracle`; DFlash, DSpark and DFlash2 `block_oracle`.
"""

import dataclasses
import functools
import json

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from decoding import SMALL
from model import block_oracle, eagle3_oracle

from spec_jax import testing
from spec_jax.drafters import block, each, eagle3
from spec_jax.model import (
    block_files,
    block_params,
    eagle3_files,
    eagle3_params,
    head_dialects,
    row_model,
)


GAMMA = 4
TARGET = decoding.TARGET_PARAMS
BENCH = testing.Bench(
    target=dataclasses.replace(SMALL.target, slab=GAMMA + 1),
    params=TARGET,
    prompts=((7, 3, 90, 7, 3, 41, 7, 3), (5,)),
    max_tokens=16,
)
TEXT = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77, 30, 9, 51, 62, 11, 40, 3, 17, 80]
HOT = jnp.arange(0, 96, 2, dtype=jnp.int32)
LAYER = decoding.make_config(num_layers=2, tie_word_embeddings=False)

EAGLE = eagle3_params.Eagle3Config(
    layer=decoding.make_config(num_layers=1),
    draft_vocab_size=len(HOT),
    target_hidden_size=48,
    taps=(1, 0),  # of two layers
).validate()
PEAGLE = dataclasses.replace(
    EAGLE, layer=decoding.make_config(num_layers=2), mask_token_id=95
).validate()
DFLASH = block_params.BlockConfig(
    layer=LAYER,
    draft_vocab_size=96,
    taps=(1, 0),
    block_size=4,
    slots="fill-in",
    mask_token_id=95,
).validate()
DSPARK = dataclasses.replace(
    DFLASH, slots="anchor-first", head="vanilla", markov_rank=8, has_confidence=True,
    confidence_with_markov=True,
).validate()  # fmt: skip
DFLASH2 = dataclasses.replace(
    DFLASH, head="selector", markov_rank=8, top_k=5, conv_group=16
).validate()


def seeing(*sees) -> block_params.BlockConfig:
    """Returns DFlash whose two layers see that much; one for both."""
    layers = tuple(block_params.LayerAttention(**one) for one in sees * 2)[:2]
    return dataclasses.replace(DFLASH, attention=layers).validate()


HEADS = {
    "eagle3": EAGLE,
    "peagle": PEAGLE,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "dflash2": DFLASH2,
    "rnn": dataclasses.replace(
        DSPARK, slots="fill-in", head="rnn", draft_vocab_size=64
    ),
    "gated": dataclasses.replace(DSPARK, head="gated", confidence_with_markov=False),
    "mixed": seeing({"window": 5, "is_causal": True}, {}),
    "anchored": seeing({"window": 4, "from_anchor": True}),
    "causal": seeing({"is_causal": True}),
}
DIALECTS = {
    "eagle3": "midlayer", "peagle": "speculators", "dflash": "z-lab",
    "dspark": "deepspec", "rnn": "speculators", "gated": "specforge",
    "dflash2": "z-lab", "mixed": "z-lab", "anchored": "speculators", "causal": "z-lab",
}  # fmt: skip
"""The layout that each head is saved in."""


def is_block(head) -> bool:
    return isinstance(head, block_params.BlockConfig)


def params_of(head):
    """Returns random weights, a block's norms and biases too, so that a missing one
    shows."""
    key = jax.random.key(3)
    if not is_block(head):
        return eagle3_params.init(key, head, embed=TARGET.embed, hot=HOT, stddev=0.3)
    made = block_params.init(
        key, head, embed=TARGET.embed, lm_head=TARGET.head, stddev=0.3
    )
    shared = {name: getattr(made, name) for name in ("hot", "embed", "lm_head")}
    rng = np.random.default_rng(5)

    def moved(leaf):
        if leaf.ndim > 1:
            return leaf
        return leaf + jnp.float32(rng.normal(0.1, 0.3, leaf.shape))

    own = jax.tree.map(moved, made.replace(**dict.fromkeys(shared)))
    return own.replace(**shared)


PARAMS = {name: params_of(head) for name, head in HEADS.items()}


def make(head, impl=SMALL.target.impl, **changes):
    """Returns the drafter of a head, which is named or given by its config."""
    head = HEADS[head] if isinstance(head, str) else head
    kind, slab, gamma_max = eagle3.Eagle3, GAMMA, GAMMA
    if is_block(head):
        kind, slab, gamma_max = block.BlockDrafter, head.block_size, head.num_drafts
    model = row_model.RowModel(config=head.layer, impl=impl, slab=slab)
    own = {"head": head, "model": model, "gamma_max": gamma_max}
    return kind(**own | changes)


@functools.cache
def features_of(taps=EAGLE.taps) -> np.ndarray:
    """Returns the target's features of the text."""
    return np.asarray(BENCH.features(TEXT[:-1], taps))


class Oracle:
    """A float64 head, of the files that a head is saved in."""

    def __init__(self, folder, name, params=None):
        self.config, files = HEADS[name], eagle3_files
        lm_head, kind = {}, eagle3_oracle.Head
        if is_block(self.config):
            files, kind = block_files, block_oracle.Head
            lm_head = {"lm_head": np.asarray(TARGET.head)}
        params = PARAMS[name] if params is None else params
        origin = head_dialects.Origin(target=SMALL.target.config)
        files.save(folder, self.config, params, dialect=DIALECTS[name], origin=origin)
        self.head = kind(
            config=json.loads((folder / "config.json").read_text()),
            tensors=safetensors.numpy.load_file(folder / "model.safetensors"),
            embed=np.asarray(TARGET.embed),
            **lm_head,
        )

    def draft(self, features, text, *, drawn=None):
        """Drafts after a text; returns tokens, logits `[W, Vd]` and survival, if any.

        With `drawn`, these tokens stand before later drafts instead of its own.
        """
        flat = np.asarray(features).reshape(len(features), -1)[: len(text) - 1]
        if is_block(self.config):
            return block_oracle.draft(self.head, flat, text[-1], drawn=drawn)
        read = list(text[1:])
        if self.config.is_parallel:
            return *eagle3_oracle.draft(self.head, flat, read, count=GAMMA), None
        tokens, logits = [], []
        for step in range(GAMMA):
            made = eagle3_oracle.run(self.head, flat, read, num_own=step)
            logits.append(made[1][-1])
            tokens.append(int(HOT[logits[-1].argmax()]))
            read.append(tokens[-1] if drawn is None else int(drawn[step]))
        return tokens, np.stack(logits), None

    def after(self, length, *, late=0, drawn=None):
        """Drafts after a prefix of `TEXT`; `late` shifts features: a fault."""
        features = np.roll(features_of(), late, axis=0)
        return self.draft(features, TEXT[:length], drawn=drawn)


def rounds_of(drafter, params, lengths, *, gammas=None, sampling=None):
    """Yields the second slot's proposals after prefixes of `TEXT`, as if alone."""
    num_slots, slot = 2, 1
    slots, features = each.lift(drafter, num_slots), features_of(drafter.taps)
    memory = slots.init(capacity=32, page_size=8)
    memory = slots.prefill(
        params, memory, TEXT[: lengths[0]], slot=slot, features=features
    )
    # NumPy on the host: jax would compile a program for each shape.
    is_slot = np.arange(num_slots) == slot
    tokens = decoding.padded([TEXT] * num_slots, 33)
    most = 1 + slots.gamma_max
    for number, length in enumerate(lengths):
        gamma = slots.gamma_max if gammas is None else gammas[number]
        asked = {
            "tokens": tokens,
            "length": np.where(is_slot, length, 1).astype(np.int32),
            "gamma": np.where(is_slot, gamma, 0).astype(np.int32),
            "sampling": sampling,
        }
        memory, proposal = decoding.propose(slots, params, memory, **asked)
        yield length, jax.tree.map(lambda leaf: np.asarray(leaf)[slot], proposal)
        if number + 1 < len(lengths):
            after = lengths[number + 1]
            handed = np.zeros((num_slots, most, *features.shape[1:]), np.float32)
            handed[slot, : after - length] = features[length - 1 : after - 1]
            told = {"asked": is_slot, "features": jnp.asarray(handed)}
            length = np.where(is_slot, after, 1).astype(np.int32)
            memory = decoding.commit(slots, params, memory, length, **told)


def counted(monkeypatch, drafter, slots, method):
    """Returns a drafter of a class of its own, for which nothing is compiled yet, and
    a list that grows with each run of a method."""
    runs, real = [], getattr(slots, method)

    def run(self, *inputs):
        jax.debug.callback(lambda: runs.append(1))
        return real(self, *inputs)

    monkeypatch.setattr(slots, method, run)
    return type("Counted", (type(drafter),), {})(**vars(drafter)), runs
