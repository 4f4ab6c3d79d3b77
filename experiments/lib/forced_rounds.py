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
    known = DATA_SETS
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
        kept = choose_kept(
            chances(rate, depth, head=head),
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


def choose_kept(
    chances: Sequence[float], *, start: int, limit: int, size: int, tries: int = 200
) -> np.ndarray:
    """How many drafts a round keeps that begins at each length, `[size]` int32.

    Draft `i` is right with `chances[i]` if all before it are, so that accepted lengths
    are as spread as those of a real drafter; the best of many draws is taken.

    Args:
      chances: of each draft of a chain, or of a path of a tree.
      start, limit: lengths of the text before the first round and after the last.
    """
    gamma, best, best_gap = len(chances), None, np.inf
    rate = np.cumprod(chances).sum() / gamma
    for seed in range(tries):
        is_right = np.random.default_rng(seed).random((size, gamma)) < chances
        kept = np.cumprod(is_right, axis=1).sum(axis=1).astype(np.int32)
        proposed, accepted = simulate(kept, start=start, limit=limit, gamma=gamma)
        gap = abs(accepted / max(proposed, 1) - rate)
        if gap < best_gap:
            best, best_gap = kept, gap
    return best


def conditional(rate: float, gamma: int, first: float | None = None) -> float:
    """The chance of each draft, given all before it, by which `rate` of them are kept.

    The `p` with `p + p**2 + .. + p**gamma = rate * gamma`, by bisection.

    Args:
      first: the chance of the first draft, if it is another: `p` is then of the others.

    Raises:
      ValueError: a rate outside (0, 1).
    """
    if not 0 < rate < 1:
        raise ValueError(f"a forced acceptance of {rate} is not between 0 and 1")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        reached = (p if first is None else first) * sum(p**i for i in range(gamma))
        low, high = (p, high) if reached < rate * gamma else (low, p)
    return low


# Tokens of a round, the target's own among them, and the chance of the first draft
# where it is known (chat and mathematics): Qwen3-8B with seven drafts at temperature 1,
# trained alike (https://arxiv.org/abs/2607.05147, table 1 and section 5).
_PUBLISHED = {
    ("dspark", "mt-bench"): (3.72, None),
    ("dspark", "gsm8k"): (6.17, 0.93),
    ("dflash", "mt-bench"): (3.11, 0.72),
    ("dflash", "gsm8k"): (5.33, 0.88),
    ("eagle3", "mt-bench"): (2.66, 0.53),
    ("eagle3", "gsm8k"): (5.30, 0.81),
}
_PUBLISHED_DRAFTS = 7
DATA_SETS = tuple(dict.fromkeys(name for _, name in _PUBLISHED))


def chances(rate: float | str, gamma: int, *, head: str | None) -> list[float]:
    """The chance of each draft, given all before it.

    Args:
      rate: the share of drafts to be kept; or one of `DATA_SETS`, for what is published
        of `head`. That is a length of seven drafts: all drafts but the first have one
        chance, by which it comes out.

    Raises:
      ValueError: a rate outside (0, 1), or a data set without a head.
    """
    if not isinstance(rate, str):
        return [conditional(rate, gamma)] * gamma
    if (head, rate) not in _PUBLISHED:
        raise ValueError(
            f"the acceptance of {rate} is that of a head: name one with --head"
        )
    tokens, first = _PUBLISHED[head, rate]
    share = (tokens - 1) / _PUBLISHED_DRAFTS
    others = conditional(share, _PUBLISHED_DRAFTS, first)
    return [others if first is None else first, *[others] * (gamma - 1)]


def simulate(
    kept: np.ndarray, *, start: int, limit: int, gamma: int
) -> tuple[int, int]:
    """Drafts proposed and accepted, on one path, by the rounds of a generation."""
    length, proposed, accepted = start, 0, 0
    while length < limit:
        drafted = min(gamma, limit - length - 1)
        right = min(int(kept[length]), drafted)
        proposed, accepted = proposed + drafted, accepted + right
        length += right + 1
    return proposed, accepted
