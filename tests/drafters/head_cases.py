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
from model import block_oracle, eagle3_oracle, head_layouts as layouts
from model.head_layouts import is_block

from spec_jax import testing
from spec_jax.drafters import block, each, eagle3
from spec_jax.model import head_dialects, row_model


GAMMA = 4
TARGET = decoding.TARGET_PARAMS
BENCH = testing.Bench(
    target=dataclasses.replace(SMALL.target, slab=GAMMA + 1),
    params=TARGET,
    prompts=((7, 3, 90, 7, 3, 41, 7, 3), (5,)),
    max_tokens=16,
)
TEXT = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77, 30, 9, 51, 62, 11, 40, 3, 17, 80]
LAYOUTS = {
    "eagle3": ("midlayer", layouts.EAGLE),
    "peagle": ("speculators", layouts.PARALLEL),
    "dflash": ("z-lab", layouts.DFLASH),
    "dspark": ("deepspec", layouts.with_heads("vanilla")),
    "dflash2": ("z-lab", layouts.DFLASH2),
    "rnn": ("speculators", layouts.with_heads(
        "rnn", slots="fill-in", draft_vocab_size=64)),
    "gated": ("specforge", layouts.with_heads("gated", confidence_with_markov=False)),
    "mixed": ("z-lab", layouts.seeing(window=5, is_causal=True, rest="all")),
    "anchored": ("speculators", layouts.seeing(window=4, from_anchor=True)),
    "causal": ("z-lab", layouts.seeing(is_causal=True)),
}  # fmt: skip
"""The layout that each head is saved in, and its config for another target."""


def of_two_layers(head):
    """Returns a head for the target here, which has two layers."""
    return dataclasses.replace(head, taps=(1, 0)).validate()


HEADS = {name: of_two_layers(head) for name, (_, head) in LAYOUTS.items()}
PARAMS = {
    name: layouts.make_params(head, target=TARGET) for name, head in HEADS.items()
}


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
def features_of(taps=HEADS["eagle3"].taps) -> np.ndarray:
    """Returns the target's features of the text."""
    return np.asarray(BENCH.features(TEXT[:-1], taps))


class Oracle:
    """A float64 head, of the files that a head is saved in."""

    def __init__(self, folder, name, params=None):
        self.config, kind, lm_head = HEADS[name], eagle3_oracle.Head, {}
        if is_block(self.config):
            kind, lm_head = block_oracle.Head, {"lm_head": np.asarray(TARGET.head)}
        layouts.files_of(self.config).save(
            folder,
            self.config,
            params or PARAMS[name],
            dialect=LAYOUTS[name][0],
            origin=head_dialects.Origin(target=SMALL.target.config),
        )
        self.head = kind(
            config=json.loads((folder / "config.json").read_text()),
            tensors=safetensors.numpy.load_file(folder / "model.safetensors"),
            embed=np.asarray(TARGET.embed),
            **lm_head,
        )

    def draft(self, features, text, *, drawn=None):
        """Drafts after a text; returns tokens, logits `[W, Vd]` and survival, if any.
        With `drawn`, these tokens stand before later drafts instead of its own."""
        flat = np.asarray(features).reshape(len(features), -1)[: len(text) - 1]
        if is_block(self.config):
            return block_oracle.draft(self.head, flat, text[-1], drawn=drawn)
        how = {"count": GAMMA, "drawn": drawn}
        return *eagle3_oracle.draft(self.head, flat, text[1:], **how), None

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
