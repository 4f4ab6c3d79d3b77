"""Continuations of texts by the target, greedy or drawn: what a drafter will meet.

Sixteen sequences at a time are decoded as the rows of one slab, with the weights as
they are shipped (bfloat16), so that the text is the target's own to the last bit.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import fan_out, terminal
from spec_jax.model import (
    config as config_lib,
    fingerprint,
    params as params_lib,
    qwen3,
)
from spec_jax.ops import argmax, dispatch
from spec_jax.paging import allocator, cache
from spec_jax.rules import sampling


SLOTS = 16
PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slabs:
    """Prefixes in slabs of `SLOTS`, and the target that continues them.

    Attributes:
      prefixes: `[n, P]`, `n` of whole slabs.
      length: tokens of a text, its prefix included.
      lengths: tokens of each prefix `[n]`; all `P` of them if None.
      seeds: `[n]`, of sequences drawn at temperature 1; those below 0 are greedy, and
        so are all if None.
      wanted: texts that are of use, from the first; the others fill the last slab.
    """

    params: params_lib.Params
    config: config_lib.Qwen3Config
    prefixes: np.ndarray
    length: int
    impl: str
    lengths: np.ndarray | None = None
    seeds: np.ndarray | None = None
    wanted: int | None = None

    @property
    def given(self) -> np.ndarray:
        """Tokens of each prefix `[n]`."""
        if self.lengths is not None:
            return self.lengths
        return np.full(len(self.prefixes), self.prefixes.shape[1], np.int32)

    @property
    def digest(self) -> str:
        """Twelve digits of the SHA-256 of all that decides the texts."""
        isa = dispatch.instruction_set(self.impl)
        told = hashlib.sha256(fingerprint.of_params(self.params).encode())
        told.update(f"{self.config} {self.length} {self.impl} {isa}".encode())
        for part in (self.prefixes, self.given, self.seeds):
            told.update(b"-" if part is None else np.asarray(part, np.int64).tobytes())
        return told.hexdigest()[:12]

    def __call__(self, number: int) -> Iterator[np.ndarray]:
        """Yields the texts of one slab, int32 `[SLOTS, length]`."""
        slab = slice(number * SLOTS, (number + 1) * SLOTS)
        text = _continue(
            self.params,
            jnp.asarray(self.prefixes[slab], jnp.int32),
            jnp.asarray(self.given[slab], jnp.int32),
            None if self.seeds is None else _settings(self.seeds[slab]),
            config=self.config,
            length=self.length,
            impl=self.impl,
        )
        yield np.asarray(text)


def generate(
    slabs: Slabs, *, kept: pathlib.Path, fan: fan_out.Fan = fan_out.here
) -> np.ndarray:
    """Continues all prefixes; returns int32 `[n, length]`.

    Args:
      kept: a file to which each slab is added when it is finished, and those before
        it. A run that finds it goes on after its last whole slab; it stays behind.
      fan: what has slabs continued; see `fan_out.of`.

    Raises:
      ValueError: `kept` is of other prefixes, or a slab would be left incomplete.
    """
    count = len(slabs.prefixes)
    if count % SLOTS:
        raise ValueError(
            f"{count} rollouts are not of whole slabs of {SLOTS}; choose a "
            "multiple as --rollouts"
        )
    done = _whole_slabs(kept, slabs)
    with kept.open("ab") as file:
        file.truncate(done.nbytes)  # The slab that a kill cut short.
        missing = range(len(done) // SLOTS, count // SLOTS)
        found = fan_out.in_order(fan(slabs, missing), missing)
        with terminal.progress() as bar:
            sizes = {"total": count // SLOTS, "completed": missing.start}
            task = bar.add_task("rollouts", **sizes)
            for texts in found:
                for text in texts:
                    file.write(text.tobytes())
                file.flush()
                bar.advance(task)
    return np.fromfile(kept, np.int32).reshape(-1, slabs.length)


def _settings(seeds):
    """Settings of the slots of one slab."""
    made = [
        sampling.make_settings(temperature=float(seed >= 0), seed=max(int(seed), 0))
        for seed in seeds
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def _whole_slabs(kept: pathlib.Path, slabs: Slabs) -> np.ndarray:
    """What `kept` holds of whole slabs, `[rows, length]`; none where it is missing."""
    length, prefixes = slabs.length, slabs.prefixes
    if not kept.exists():
        return np.empty((0, length), np.int32)
    tokens = np.fromfile(kept, np.int32)
    rows = len(tokens) // (SLOTS * length) * SLOTS
    done = tokens[: rows * length].reshape(rows, length)
    given = np.arange(prefixes.shape[1]) < slabs.given[:rows, None]
    same = done[:, : prefixes.shape[1]] == prefixes[:rows].astype(np.int32)
    if not same[given].all():
        raise ValueError(f"{kept}: text of other prefixes or another length; delete it")
    return done


@functools.partial(jax.jit, static_argnames=("config", "length", "impl"))
def _continue(params, prefixes, lengths, settings, *, config, length, impl):
    """One slab of sequences: each step decodes one token of every slot."""
    pages = -(-length // PAGE_SIZE)
    kv = cache.init(
        num_layers=config.num_layers,
        num_slots=SLOTS,
        num_pages=SLOTS * pages,
        page_size=PAGE_SIZE,
        pages_per_slot=pages,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
    )
    for slot in range(SLOTS):
        kv = allocator.reserve(allocator.register(kv, slot), slot, length)
    slots = jnp.arange(SLOTS, dtype=jnp.int32)
    text = jnp.pad(prefixes, ((0, 0), (0, length - prefixes.shape[1])))

    def step(position, carry):
        kv, text = carry
        rows = qwen3.Rows(
            tokens=text[:, position],
            slots=slots,
            positions=jnp.full((SLOTS,), position, jnp.int32),
            num_active=jnp.int32(SLOTS),
        )
        kv, outputs = qwen3.forward_rows(params, config, rows, kv, impl=impl)
        chosen = argmax.argmax(outputs.logits, num_active=rows.num_active, impl=impl)
        if settings is not None:
            draws = settings.temperature != 0
            drawn = sampling.sample_each(
                outputs.logits,
                settings,
                positions=jnp.full((SLOTS,), position + 1, jnp.int32),
                draws=draws,
            )
            chosen = jnp.where(draws, drawn, chosen)
        given = text[:, position + 1]
        is_given = position + 1 < lengths
        return kv, text.at[:, position + 1].set(jnp.where(is_given, given, chosen))

    _, text = jax.lax.fori_loop(0, length - 1, step, (kv, text))
    return text
