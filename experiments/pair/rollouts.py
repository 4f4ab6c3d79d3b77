"""Continuations of texts by the target, greedy or drawn: what a drafter will meet.

Sixteen sequences at a time are decoded as the rows of one slab, with the weights as
they are shipped (bfloat16), so that the text is the target's own to the last bit.
"""

import argparse
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import fan_out, prompt_files, terminal
from spec_jax.engine import verification
from spec_jax.model import (
    config as config_lib,
    decoder,
    families,
    fingerprint,
    params as params_lib,
    tokenizer as tokenizer_lib,
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
      stop_ids: tokens that end a text; a slab whose texts have all ended is done.
    """

    params: params_lib.Params
    config: config_lib.ModelConfig
    prefixes: np.ndarray
    length: int
    impl: str
    lengths: np.ndarray | None = None
    seeds: np.ndarray | None = None
    wanted: int | None = None
    stop_ids: tuple[int, ...] = ()

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
        told.update(f"{self.stop_ids}".encode())
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
            stop_ids=self.stop_ids,
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


def prompt_ids(
    args: argparse.Namespace, tokenizer: tokenizer_lib.Tokenizer
) -> list[list[int]]:
    """Returns the tokens of prompts; of raw text the last `--prefix`, of a chat all.

    A chat without its beginning is none that a user sends.

    Args:
      args: flags of `train_drafter.py`.

    Raises:
      ValueError: chats that leave nothing to write.
    """
    prompts = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    if not tokenizer.has_chat_template or args.raw:
        texts = ("\n\n".join(m["content"] for m in x.messages) for x in prompts)
        # The end of a longer prompt: its continuation has the more to go on.
        return [tokenizer.encode(x, begins=True)[-args.prefix :] for x in texts]
    ids = [tokenizer.encode(tokenizer.apply_chat(x.messages)) for x in prompts]
    long = [len(x) for x in ids if len(x) >= args.length]
    if long:
        raise ValueError(
            f"{len(long)} of {len(ids)} prompts have up to {max(long)} tokens with the "
            f"chat template, which are not cut, and --length {args.length} leaves "
            f"nothing to write; take --length {max(long) + args.prefix}, say, or leave "
            "these prompts out"
        )
    return ids


def ended(
    tokens: np.ndarray, given: np.ndarray, stop_ids: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Ends texts at the first stop token that the target wrote, which is kept.

    Args:
      tokens: texts `[n, T]`.
      given: tokens of their prefixes `[n]`.

    Returns:
      The texts, with the stop token again in the place of what is behind it, and the
      rows after which a token was written, `[n, T] bool`: see `targets.Texts`.
    """
    places = np.arange(tokens.shape[1])
    is_stop = np.isin(tokens, stop_ids) & (places >= given[:, None])
    has_ended = np.logical_or.accumulate(is_stop, axis=1)
    last = np.take_along_axis(tokens, is_stop.argmax(axis=1)[:, None], axis=1)
    mask = (places >= given[:, None] - 1) & ~has_ended
    return np.where(has_ended, last, tokens), mask


@functools.partial(jax.jit, static_argnames=("config", "length", "impl", "stop_ids"))
def _continue(params, prefixes, lengths, settings, *, config, length, impl, stop_ids):
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

    def step(carry):
        position, kv, text, has_ended = carry
        rows = decoder.Rows(
            tokens=text[:, position],
            slots=slots,
            positions=jnp.full((SLOTS,), position, jnp.int32),
            num_active=jnp.int32(SLOTS),
        )
        forward_rows = families.of(config).forward_rows
        kv, outputs = forward_rows(params, config, rows, kv, impl=impl)
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
        token = jnp.where(is_given, given, chosen)
        has_ended |= ~is_given & verification.is_stop(token, stop_ids)
        return position + 1, kv, text.at[:, position + 1].set(token), has_ended

    _, _, text, _ = jax.lax.while_loop(
        lambda carry: (carry[0] < length - 1) & ~jnp.all(carry[3]),
        step,
        (jnp.int32(0), kv, text, jnp.zeros((SLOTS,), bool)),
    )
    return text
