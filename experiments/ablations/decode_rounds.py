"""Rounds whose tokens come from decoding: verification is paid for, and not trusted.

The way around a verify path that does not keep the row contract: what it computes is
compared with decoding, and thrown away. A target of the engine, of one slot with two
caches:

    commit cache   written by decoding alone; its logits decide every token
    mirror cache   the verify path writes a window, which is rolled back; then the
                   committed rows are decoded into it too

    verify     the window on the mirror cache: v_0 .. v_g;  roll it back
               decode x[n-1], d_1, .. on the commit cache, as long as the token that
               comes out is the next draft: a + 1 forwards
               decode the same rows on the mirror cache: a + 1 forwards
    truncate   both to n'-1

Three forwards a row, where the engine's own target has one a window: this is a
historical design, measured next to its successor.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.ablations import verify_paths
from spec_jax import pytree
from spec_jax.engine import baseline, protocols, rows, verification
from spec_jax.model import params as params_lib
from spec_jax.paging import cache as paged
from spec_jax.rules import sampling as sampling_lib


class Caches(pytree.Node):
    """Both caches, and what is known and counted between a window and the next."""

    mirror: paged.PagedKV
    commit: paged.PagedKV
    sampling: protocols.Sampling  # of the run, leaves [1]
    start: jax.Array  # [] int32, position of the last window
    differs: jax.Array  # [R] bool, rows of it with another verify token
    failed: jax.Array  # [1] bool, it found no page
    follows_correction: jax.Array  # [] bool, the pending token replaced a draft
    commit_steps: jax.Array  # [] int32, forwards on the commit cache
    mirror_steps: jax.Array  # [] int32, decoding forwards on the mirror cache
    correction_steps: jax.Array  # [] int32, commit steps that fed a correction
    mismatches: jax.Array  # [] int32, committed rows with another verify token


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRounds(rows.SlotRows):
    """A target of one slot whose tokens `model` decodes, whatever `path` computes."""

    num_slots: int = 1
    path: baseline.RowTarget
    width: int  # columns of a window, `gamma_max + 1`
    # Of the run, for `new_cache`, which hands it on as data; None is greedy
    sampling: sampling_lib.SamplingSettings | None = dataclasses.field(
        default=None, compare=False
    )

    def new_cache(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> Caches:
        """Allocates both caches; see `rows.SlotRows.new_cache`."""
        sizes = {"capacity": capacity, "page_size": page_size, "num_pages": num_pages}
        zero = lambda: jnp.zeros((), jnp.int32)
        return Caches(
            mirror=super().new_cache(**sizes),
            commit=super().new_cache(**sizes),
            sampling=jax.tree.map(lambda leaf: jnp.array(leaf)[None], self.sampling),
            start=zero(),
            differs=jnp.zeros((self.width,), bool),
            failed=jnp.zeros((1,), bool),
            follows_correction=jnp.zeros((), bool),
            commit_steps=zero(),
            mirror_steps=zero(),
            correction_steps=zero(),
            mismatches=zero(),
        )

    def prefill(self, params, kv: Caches, prompt: list[int], **keywords) -> Caches:
        """Writes the prompt's K/V into both caches, as `rows.SlotRows.prefill`."""
        return kv.replace(
            mirror=super().prefill(params, kv.mirror, prompt, **keywords),
            commit=super().prefill(params, kv.commit, prompt, **keywords),
        )

    def verify(
        self, params: params_lib.Params, kv: Caches, window: protocols.Window
    ) -> tuple[Caches, protocols.Verified]:
        """Verifies by the path, and decodes; the logits are those of decoding."""
        tokens, start, num_active = (
            window.tokens[0],
            window.start[0],
            window.num_active[0],
        )
        mirror, logits = self.path.forward(
            params, kv.mirror, tokens=tokens, start=start, num_active=num_active
        )
        failed = self.path.is_out_of_pages(mirror)
        seen, _ = verification.target_tokens(
            self.path, verify_paths.in_one_slot(logits, window), kv.sampling
        )
        mirror = self.path.truncate(mirror, start)
        commit, logits, own, fed = self._decode(
            params, kv.commit, kv.sampling, tokens, start, num_active, is_given=False
        )
        mirror, _, _, mirrored = self._decode(
            params, mirror, kv.sampling, tokens, start, fed, is_given=True
        )
        failed |= self.model.is_out_of_pages(commit) | self.model.is_out_of_pages(
            mirror
        )
        counted = (~failed).astype(jnp.int32)
        kv = kv.replace(
            mirror=mirror,
            commit=commit,
            start=start,
            differs=(seen[: self.width] != own) & ~failed,
            failed=failed[None],
            follows_correction=fed < num_active,
            commit_steps=kv.commit_steps + counted * fed,
            mirror_steps=kv.mirror_steps + counted * mirrored,
            correction_steps=kv.correction_steps
            + counted * kv.follows_correction.astype(jnp.int32),
        )
        return kv, verify_paths.in_one_slot(logits, window)

    def _decode(self, params, cache, sampling, tokens, start, num_rows, *, is_given):
        """Decodes rows of the window one at a time.

        Args:
          num_rows: the most that are decoded.
          is_given: decode all of them; otherwise stop after the first whose token is
            not the next of the window.

        Returns:
          The cache, the logits of each row, the token that each chose (-1 where none
          was decoded), and how many rows were decoded.
        """

        def keep_going(carry):
            row, goes_on, *_ = carry
            return goes_on & (row < num_rows)

        def step(carry):
            """Decodes one row, and says whether its token leads to the next."""
            row, _, cache, logits, own = carry
            one = protocols.Window(
                tokens=tokens[row][None, None],
                start=(start + row)[None],
                num_active=jnp.ones((1,), jnp.int32),
            )
            cache, part = self.model.forward(
                params,
                cache,
                tokens=one.tokens[0],
                start=one.start[0],
                num_active=one.num_active[0],
            )
            chosen, _ = verification.target_tokens(
                self.model, verify_paths.in_one_slot(part, one), sampling
            )
            follows = tokens.at[row + 1].get(mode="fill", fill_value=-1)
            goes_on = is_given | (chosen[0] == follows)
            goes_on &= ~self.model.is_out_of_pages(cache)
            logits, own = logits.at[row].set(part[0]), own.at[row].set(chosen[0])
            return row + 1, goes_on, cache, logits, own

        logits = jnp.zeros((self.width, self.config.vocab_size), jnp.float32)
        # What is not decoded must not look like a draft that was right.
        own = jnp.full((self.width,), -1, jnp.int32)
        row, _, cache, logits, own = jax.lax.while_loop(
            keep_going, step, (jnp.int32(0), jnp.bool_(True), cache, logits, own)
        )
        return cache, logits, own, row

    def truncate(
        self, kv: Caches, new_len: Int[Array, " B"], *, asked: Bool[Array, " B"]
    ) -> Caches:
        """Truncates both caches, and counts the mismatches among what is kept."""
        is_kept = kv.start + jnp.arange(self.width) < new_len[0]
        mismatches = jnp.sum(kv.differs & is_kept, dtype=jnp.int32)
        return kv.replace(
            mirror=super().truncate(kv.mirror, new_len, asked=asked),
            commit=super().truncate(kv.commit, new_len, asked=asked),
            differs=jnp.zeros_like(kv.differs),
            mismatches=kv.mismatches + mismatches,
        )

    def out_of_pages(self, kv: Caches) -> Bool[Array, " B"]:
        """Returns whether the last window found no page in either cache."""
        return kv.failed

    def recount(self, run: Any, kv: Caches) -> Any:
        """Returns the run with the forwards and the mismatches that were counted."""
        counters = dataclasses.replace(
            run.counters,
            commit_decode_steps=int(kv.commit_steps),
            mirror_decode_steps=int(kv.mirror_steps),
            correction_steps=int(kv.correction_steps),
        )
        return dataclasses.replace(
            run, counters=counters, mismatches=int(kv.mismatches)
        )
