"""Whole speculative generations at forced acceptance, against plain ones.

Target and draft run for real; what is proposed is overwritten so that a given share is
accepted (`forced_drafter`): random weights accept nothing. Every run must yield the
tokens of decoding alone, and its keys and values as integers. The context is noise,
the same for all runs, and no prefill is timed.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import bench, forced_drafter, noise, works
from spec_jax import loading, testing
from spec_jax.engine import protocols, requests as requests_lib, state as states
from spec_jax.model import row_model
from spec_jax.paging import index


PLAIN = "plain"

Rate = float | str
"""A share of drafts, or the name of a data set."""


def rates(text: str) -> tuple[float | str, ...]:
    """The type of a flag that lists rates to be forced, and names of data sets."""
    known = forced_drafter.DATA_SETS
    try:
        parts = text.split(",")
        found = tuple(part if part in known else float(part) for part in parts)
    except ValueError:
        found = ()
    if not found or not all(rate in known or 0 < rate < 1 for rate in found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of rates between 0 and 1, such as 0.4,0.6; of a head "
            f"it may name {' or '.join(known)}"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Runs:
    """What the runs share.

    Attributes:
      start, limit: lengths before and after a generation.
      tokens: a random text `[max_len]`, of which `start` tokens count.
      caches: of the target, and the draft's memory, of which runs take copies.
    """

    lm: loading.LanguageModel
    start: int
    limit: int
    tokens: jax.Array
    caches: tuple[Any, Any]

    def plain(self) -> works.Work:
        """Decodes the text."""
        work = works.plain_steps(
            self.lm.target,
            self.lm.params,
            self.tokens,
            self.start,
            steps=self.limit - self.start,
            cache=self.caches[0],
            program="forced: plain",
        )
        return dataclasses.replace(work, calls=1)

    def rounds(self, trace: Any, kept: Any, gamma: int) -> works.Work:
        """Generates the text `trace` by rounds that keep `kept`, see `ForcedParams`."""

        def memory_at(memory: Any, length: int) -> forced_drafter.ForcedMemory:
            inner = noise.memory_at(memory, length)
            text, right = jnp.asarray(trace)[None], jnp.asarray(kept)[None]
            return forced_drafter.ForcedMemory(inner=inner, trace=text, kept=right)

        vocab_size = self.lm.target.config.vocab_size
        drafter = forced_drafter.ForcedDrafter(
            inner=self.lm.drafter, vocab_size=vocab_size
        )
        work = works.rounds(
            dataclasses.replace(self.lm, drafter=drafter),
            self.tokens,
            self.start,
            gamma,
            limit=self.limit,
            caches=self.caches,
            max_rounds=self.limit,
            memory_at=memory_at,
            program="forced: rounds",
        )
        return dataclasses.replace(work, calls=1)

    def programs(self, gamma: int) -> list[works.Work]:
        """Returns what `measure` calls, to be traced and not run."""
        size = self.tokens.shape[0]
        kept = np.zeros((size + self.lm.gamma_max,), np.int32)
        return [self.plain(), self.rounds(np.zeros((size,), np.int32), kept, gamma)]

    def written(self, kv: Any) -> Any:
        """Returns keys and values of what was generated, `[L, T, K, H]` each.

        Less the last token, which has none.
        """
        return _written(kv, self.start - 1, size=self.limit - self.start)


@functools.partial(jax.jit, static_argnames=("size",))
def _written(kv, start, *, size):
    positions = start + jnp.arange(size)
    pages = kv.page_table[row_model.SLOT, positions // kv.page_size]
    at = positions % kv.page_size
    return [jnp.stack([pool[pages, at] for pool in pools]) for pools in (kv.k, kv.v)]


def differing(actual: Any, expected: Any) -> int:
    """Counts the elements of two pytrees that differ as integers."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return sum(
        int(np.sum(testing.bits(left) != testing.bits(right))) for left, right in pairs
    )


def make_runs(
    lm: loading.LanguageModel,
    *,
    start: int,
    generated: int,
    page_size: int,
    as_shapes: bool = False,
) -> Runs:
    """Makes caches for generations after `start` tokens of noise, or their shapes."""
    limit = start + generated
    capacity = index.pages_for(limit + lm.gamma_max + 1, page_size) * page_size
    sizes = {"capacity": capacity, "page_size": page_size}
    make = jax.eval_shape if as_shapes else lambda call: call()
    kv = make(functools.partial(noise.noisy_cache, lm.target, **sizes))
    memory = make(functools.partial(noise.noisy_memory, lm.drafter, **sizes))
    tokens = works.text_of(lm.target, capacity)
    return Runs(lm=lm, start=start, limit=limit, tokens=tokens, caches=(kv, memory))


def measure(
    runs: Runs,
    gamma: int,
    rates: Sequence[Rate],
    *,
    repeats: int,
    head: str | None = None,
) -> list[dict[str, Any]]:
    """Returns a row of each rate, timed in turns with autoregressive decoding.

    Args:
      head: whose published acceptance a data set's name stands for.

    Raises:
      RuntimeError: two plain runs of one text differ.
    """
    first, again = (runs.plain().once() for _ in range(2))
    trace = np.asarray(first.tokens)
    if not np.array_equal(trace, again.tokens):
        raise RuntimeError("two plain runs of one text differ")
    expected = runs.written(first.cache)
    del first, again  # And their caches.
    drafter = runs.lm.drafter
    depth = drafter.depth_max if protocols.is_tree(drafter) else gamma
    done: dict[Rate, list[dict[str, Any]]] = {rate: [] for rate in rates}

    def case(rate: Rate) -> bench.Thunk:
        kept = forced_drafter.choose_kept(
            forced_drafter.chances(rate, depth, head=head),
            start=runs.start,
            limit=runs.limit,
            # A window may reach past the text.
            size=trace.size + drafter.gamma_max,
        )
        work, last = runs.rounds(trace, kept, gamma), []
        # Without a call before it, of which there are many steps already.
        timed = bench.stopwatch(
            lambda state: last.append(work.apply(work.function, state)) or last[0],
            lambda: work.prepare(work.caches),
        )

        def checked() -> float:
            seconds, state = timed(), last.pop()
            wrong = differing(runs.written(state.cache), expected)
            # Without the cache, which is large.
            slot = requests_lib.slot_of(state.slots, 0)
            done[rate].append(counts(runs, trace, slot, wrong))
            return seconds

        return checked

    cases = {PLAIN: functools.partial(runs.plain().thunk, warms=False)}
    cases |= {rate: functools.partial(case, rate) for rate in rates}
    timings = bench.run(cases, repeats=repeats)
    return [
        {"kind": "rounds", "acceptance": "forced", "gamma": gamma, "forced_rate": rate}
        # The run that differs most from decoding, or has most logits of NaN.
        | max(done[rate], key=lambda run: [run[name] for name in FAULTS])
        | times(timings, rate, done[rate][0]["rounds"], runs.limit - runs.start)
        for rate in rates
    ]


FAULTS = ("nonfinite_logits", "differing_tokens", "differing_kv")


def counts(
    runs: Runs, trace: np.ndarray, slot: states.Slots, differing_kv: int
) -> dict[str, Any]:
    """Returns what a run did; `equal` is false where a token or a bit differs, and
    where logits are not finite: equal texts of NaN show nothing.

    Args:
      slot: leaves without the axis of slots.
    """
    new = slice(runs.start, runs.limit)
    differing = int(np.sum(np.asarray(slot.tokens)[new] != trace[new]))
    differing += abs(runs.limit - int(slot.length))
    nonfinite = int(slot.num_nonfinite)
    proposed, accepted = int(slot.num_proposed), int(slot.num_accepted)
    num_rounds, generated = int(slot.num_rounds), runs.limit - runs.start
    return {
        "acceptance_rate": accepted / max(proposed, 1),
        "accepted_hist": slot.accepted_hist,
        "rounds": num_rounds,
        "tokens": generated,
        "tokens_per_target_step": generated / num_rounds,
        "context": runs.start,
        "nonfinite_logits": nonfinite,
        "matched": differing == nonfinite == 0,
        "differing_tokens": differing,
        "differing_kv": differing_kv,
        "equal": differing == nonfinite == differing_kv == 0,
    }


def times(
    timings: bench.Timings, rate: Rate, num_rounds: int, num_tokens: int
) -> Mapping[str, Any]:
    """Returns a rate's times: a token's, a round's, and the speed-up."""
    seconds, plain_s = timings.seconds[rate], timings.seconds[PLAIN]
    each = {
        "plain_ms": [1e3 * s / num_tokens for s in plain_s],
        "spec_ms": [1e3 * s / num_tokens for s in seconds],
        "round_ms": [1e3 * s / num_rounds for s in seconds],
        "speedup": bench.ratios(plain_s, seconds),
    }
    made = {"n": len(seconds), "warm_up_s": timings.warm_up[rate]}
    for name, values in each.items():
        made |= bench.quartile_fields(name, values)
    return made
