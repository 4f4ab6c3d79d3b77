"""Superseded designs of verification, which `experiments/history.py` runs.

    flash           a window through the batched products and the one-shot attention of
                    prefill, which have numerics of their own
    row-loop        one row after the other: equal to decoding, one forward a row
    library-rows    rows as tall as the window, through the library's products: what
                    one gets without a row contract
    paged-decode    rows in a slab: equal to decoding by the row contract

`flash` and `library-rows` break the contract on purpose: they are here to be measured,
and for the microscope to tell them apart from what keeps it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import pytree
from spec_jax.engine import protocols, rows
from spec_jax.model import (
    config as config_lib,
    observe as observe_lib,
    params as params_lib,
    rotary,
    row_model,
    sequence,
)
from spec_jax.ops import bits, paged_attention, rms_norm, rope, swiglu, weights
from spec_jax.paging import allocator, cache as paged


#
# A window through the library's products: they are compiled for its height, and XLA
# takes another path for one row than for five.
#


def run_window(
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    kv: paged.PagedKV,
    *,
    tokens: Int[Array, " R"],
    start: Int[Array, ""],
    num_active: Int[Array, ""],
    is_one_shot: bool,
    observe: observe_lib.Observe,
) -> tuple[paged.PagedKV, Float[Array, "R V"]]:
    """Runs the active tokens at positions from `start`, and writes their K/V.

    The pages must have been reserved, and lengths do not change. Logits are float32.

    Args:
      is_one_shot: attention is that of prefill, not that of rows.
      observe: sees all of `observe.OPERATIONS`, and may change any.
    """
    norm = functools.partial(rms_norm.rms_norm, eps=config.rms_norm_eps)
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    (R,) = tokens.shape
    positions = start + jnp.arange(R, dtype=jnp.int32)
    where = {
        "slots": jnp.full((R,), row_model.SLOT, jnp.int32),
        "positions": positions,
        "num_active": num_active,
    }
    frequencies, scale = rotary.rope_table(config)
    angles = rope.angles(
        positions, jnp.asarray(frequencies), scale=scale, dtype=params.embed.dtype
    )
    x = observe(None, "embed", weights.take_rows(params.embed, tokens))
    for number, layer in enumerate(params.layers):
        see = functools.partial(observe, number)
        normed = see("input_norm", norm(x, layer.input_norm))
        heads = sequence.matmul(normed, layer.qkv).reshape(R, N + 2 * K, H)
        q, k, v = jnp.split(heads, (N, N + K), axis=1)
        q, k, v = see("q", q), see("k", k), see("v", v)
        q, k = (
            see("q_norm", norm(q, layer.q_norm)),
            see("k_norm", norm(k, layer.k_norm)),
        )
        q = see("q_rope", rope.rotate(q, *angles))
        k = see("k_rope", rope.rotate(k, *angles))
        k, v = see("k_cache", k), see("v_cache", v)
        kv = paged.write(kv, number, k=k, v=v, **where)
        if is_one_shot:
            attended = _attend_at_once(q, kv, number, start + num_active, positions)
        else:
            attended = paged_attention.paged_attention(
                *(q, kv.k[number], kv.v[number]),
                page_table=kv.page_table,
                scale=H**-0.5,
                **where,
            )
        attended = see("attention", attended.reshape(R, -1))
        out = see("attention_out", sequence.matmul(attended, layer.attention_out))
        x = see("attention_residual", x + out)
        normed = see("mlp_norm", norm(x, layer.mlp_norm))
        gate, up = jnp.split(sequence.matmul(normed, layer.gate_up), 2, axis=1)
        gate, up = see("gate", gate), see("up", up)
        hidden = see("swiglu", swiglu.swiglu(jnp.concatenate([gate, up], axis=1)))
        down = see("down", sequence.matmul(hidden, layer.down))
        x = see("mlp_residual", x + down)
    normed = observe(None, "final_norm", norm(x, params.final_norm))
    head = weights.matrix(params.head)
    logits = jnp.einsum("rd,vd->rv", normed, head, preferred_element_type=jnp.float32)
    return kv, observe(None, "logits", logits)


def _attend_at_once(q, kv, number, end, positions):
    """Returns one softmax over the whole capacity, as prefill takes over its bucket.

    Scores and softmax are float32; probabilities are cast before the second product.
    """
    (R, N, H), T = q.shape, kv.slot_capacity
    K = kv.k[number].shape[2]

    def gathered(pages):
        table = kv.page_table[row_model.SLOT]
        found = bits.to_bits(pages).at[table].get(mode="fill", fill_value=0)
        found = bits.from_bits(found, pages.dtype).reshape(T, K, H)
        # Bytes of positions that nobody wrote may be NaN, and 0 * NaN is NaN.
        return jnp.where((jnp.arange(T) < end)[:, None, None], found, 0)

    keys, values = gathered(kv.k[number]), gathered(kv.v[number])
    scores = jnp.einsum(
        "rkgh,tkh->kgrt",
        q.reshape(R, K, N // K, H),
        keys,
        preferred_element_type=jnp.float32,
    )
    visible = jnp.arange(T)[None, :] <= positions[:, None]
    visible = jnp.broadcast_to(visible, scores.shape)
    scores = jnp.where(visible, scores * H**-0.5, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("kgrt,tkh->rkgh", probs, values).reshape(R, N, H)


#
# Verify paths: targets of one slot, for rounds and for decoding
#


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSlot(rows.SlotRows):
    """A target of one slot that verifies by `forward`; `model` allocates and prefills.

    It is a `baseline.RowTarget` too.
    """

    num_slots: int = 1

    def verify(self, params, kv, window):
        """Runs the active columns; see `target.Target`."""
        kv, logits = self.forward(params, kv, **_of_slot(window))
        num_active = jnp.where(self.is_out_of_pages(kv), 0, window.num_active)
        return kv, in_one_slot(logits, window.replace(num_active=num_active))

    def is_out_of_pages(self, kv):
        """Returns whether the last reservation found no page."""
        return self.model.is_out_of_pages(kv)


def _of_slot(window: protocols.Window) -> dict[str, Array]:
    """Returns the rows of a window of one slot, for `forward`."""
    names = ("tokens", "start", "num_active")
    return {name: getattr(window, name)[0] for name in names}


def in_one_slot(
    logits: Float[Array, "P V"], window: protocols.Window
) -> protocols.Verified:
    """Returns the rows of a window of one slot, row `i` of column `i`."""
    height, (_, width) = logits.shape[0], window.tokens.shape
    columns = jnp.arange(width, dtype=jnp.int32)[None]
    return protocols.Verified(
        logits=logits,
        slots=jnp.zeros((height,), jnp.int32),
        positions=window.start[0] + jnp.arange(height, dtype=jnp.int32),
        num_active=window.num_active[0],
        at=jnp.where(columns < window.num_active[:, None], columns, height),
    )


def decode_rows(
    model: row_model.RowModel,
    params: params_lib.Params,
    kv: paged.PagedKV,
    *,
    tokens: Int[Array, " R"],
    start: Int[Array, ""],
    num_active: Int[Array, ""],
    height: int,
    is_given: bool = True,
) -> tuple[paged.PagedKV, Array, Array, Array]:
    """Decodes rows of a window one at a time, each a forward of its own.

    Args:
      num_active: the most that are decoded.
      height: of the results, no less than the rows.
      is_given: decode all of them; otherwise stop after the first whose token is not
        the next of the window.

    Returns:
      The cache, the logits `[height, V]`, the token that each row chose (-1 where none
      was decoded), and how many rows were decoded.
    """

    def keep_going(carry):
        row, goes_on, *_ = carry
        return goes_on & (row < num_active)

    def step(carry):
        row, _, kv, logits, own = carry
        one = {"tokens": tokens[row][None], "num_active": jnp.int32(1)}
        kv, part = model.forward(params, kv, start=start + row, **one)
        chosen = model.choose(part, jnp.int32(1))[0]
        follows = tokens.at[row + 1].get(mode="fill", fill_value=-1)
        goes_on = (is_given | (chosen == follows)) & ~model.is_out_of_pages(kv)
        logits, own = logits.at[row].set(part[0]), own.at[row].set(chosen)
        return row + 1, goes_on, kv, logits, own

    logits = jnp.zeros((height, model.config.vocab_size), jnp.float32)
    # A row that is not decoded must not look like a draft that was right.
    own = jnp.full((height,), -1, jnp.int32)
    row, _, kv, logits, own = jax.lax.while_loop(
        keep_going, step, (jnp.int32(0), jnp.bool_(True), kv, logits, own)
    )
    return kv, logits, own, row


class RowLoop(OneSlot):
    """Verifies by decoding: each active row is a forward of its own."""

    def forward(self, params, kv, *, tokens, start, num_active):
        """As `RowModel.forward`, in `num_active` forwards of one row."""
        # An earlier failure is not this call's.
        kv = allocator.reserve(kv, row_model.SLOT, start)
        given = {"tokens": tokens, "start": start, "num_active": num_active}
        return decode_rows(self.model, params, kv, height=self.model.slab, **given)[:2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryWindow(OneSlot):
    """Verifies a window as tall as it is: a row's bits depend on the height.

    A window of one row is autoregressive decoding as this path would do it.
    """

    is_one_shot: bool

    def forward(
        self, params, kv, *, tokens, start, num_active, observe=observe_lib.pass_on
    ):
        """As `RowModel.forward`, with the numerics of `run_window`."""
        slot = row_model.SLOT
        follows = start == kv.length[slot]
        kv = kv.replace(refused=kv.refused.at[slot].set(kv.refused[slot] | ~follows))
        kv = allocator.reserve(kv, slot, start + num_active)
        num_active = jnp.where(self.is_out_of_pages(kv), 0, num_active)
        given = {"tokens": tokens, "start": start, "num_active": num_active}
        how = {"is_one_shot": self.is_one_shot, "observe": observe}
        kv, logits = run_window(params, self.config, kv, **given, **how)
        return allocator.extend(kv, slot, start + num_active), logits

    def choose(self, logits, num_active):
        """Returns the first token of highest logit."""
        del num_active
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


class Caches(pytree.Node):
    """Both caches of `DecodeRounds`, and what is known between windows."""

    mirror: paged.PagedKV
    commit: paged.PagedKV
    start: jax.Array  # [] int32, position of the last window
    differs: jax.Array  # [R] bool, rows of it with another verify token
    failed: jax.Array  # [1] bool, it found no page
    mismatches: jax.Array  # [] int32, committed rows with another verify token


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRounds(rows.SlotRows):
    """A target of one slot whose greedy tokens `model` decodes: `path` is not trusted.

    The way around a path that does not keep the row contract, for three forwards a row:

        verify     the window on the mirror cache: v_0 .. v_g;  roll it back
                   decode x[n-1], d_1, .. on the commit cache, as long as the token that
                   comes out is the next draft: a + 1 forwards
                   decode the same rows on the mirror cache: a + 1 forwards
        truncate   both to n'-1
    """

    num_slots: int = 1
    path: Any  # a `baseline.RowTarget` on the caches of `model`
    width: int  # columns of a window, `gamma_max + 1`

    def new_cache(self, **sizes) -> Caches:
        """Allocates both caches; see `rows.SlotRows.new_cache`."""
        return Caches(
            mirror=super().new_cache(**sizes),
            commit=super().new_cache(**sizes),
            start=jnp.zeros((), jnp.int32),
            differs=jnp.zeros((self.width,), bool),
            failed=jnp.zeros((1,), bool),
            mismatches=jnp.zeros((), jnp.int32),
        )

    def prefill(self, params, kv: Caches, prompt: list[int], **keywords) -> Caches:
        """Writes the prompt's K/V into both caches, as `rows.SlotRows.prefill`."""
        return kv.replace(
            mirror=super().prefill(params, kv.mirror, prompt, **keywords),
            commit=super().prefill(params, kv.commit, prompt, **keywords),
        )

    def verify(self, params, kv: Caches, window):
        """Verifies by the path, and decodes; the logits are those of decoding."""
        given = _of_slot(window)
        mirror, logits = self.path.forward(params, kv.mirror, **given)
        failed = self.path.is_out_of_pages(mirror)
        seen = self.path.choose(logits, given["num_active"])
        mirror = self.model.truncate(mirror, given["start"])
        decode = functools.partial(decode_rows, self.model, params, height=self.width)
        commit, logits, own, fed = decode(kv.commit, **given, is_given=False)
        mirror, *_ = decode(mirror, **(given | {"num_active": fed}))
        for one in (commit, mirror):
            failed |= self.model.is_out_of_pages(one)
        kv = kv.replace(
            mirror=mirror,
            commit=commit,
            start=given["start"],
            differs=(seen[: self.width] != own) & ~failed,
            failed=failed[None],
        )
        return kv, in_one_slot(logits, window)

    def truncate(self, kv: Caches, new_len: Int[Array, " B"], *, asked) -> Caches:
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
        """Returns the run with the mismatches that were counted."""
        return dataclasses.replace(run, mismatches=int(kv.mismatches))


LIBRARY = ("flash", "library-rows")
"""Paths of the library's products, which fuse nothing and take `observe`."""


def target(
    name: str, model: row_model.RowModel, *, decodes: int | None = None
) -> rows.SlotRows:
    """Returns the engine's target of one slot that verifies by the path of that name.

    Args:
      decodes: columns of a window, where decoding decides in its place.

    Raises:
      ValueError: a path that does not run models of this family.
    """
    if name not in LIBRARY:
        of_rows = {"paged-decode": rows.of(model, 1), "row-loop": RowLoop(model=model)}
        return of_rows[name]
    if not isinstance(model.config, config_lib.Qwen3Config):
        raise ValueError(
            f"verify path {name!r} runs models of qwen3, and this is one of "
            f"{model.config.model_type}: take 'paged-decode' or 'row-loop'"
        )
    path = LibraryWindow(model=model, is_one_shot=name == "flash")
    if decodes is None:
        return path
    return DecodeRounds(model=model, path=path, width=decodes)
