"""Whole speculative generations at forced acceptance, against plain ones.

Target and draft really run; proposals are overwritten so that a given share is accepted
(`forced_drafter`), since random weights accept nothing. Every run must yield the tokens
of decoding alone, and its keys and values, equal as integers. The context is noise, the
same for all runs, and no prefill is timed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.lib import bench, forced_drafter, noise, works
from spec_jax import loading
from spec_jax.debug import evidence
from spec_jax.engine import protocols, requests as requests_lib, state as states
from spec_jax.paging import cache as paged


PLAIN = "plain"

Rate = float | str
"""A share of drafts, or the name of a data set."""


def rate(text: str) -> Rate:
    """Parses a rate to be forced: a share, or the name of a data set."""
    if text in DATA_SETS:
        return text
    value = float(text)
    if not 0 < value < 1:
        raise ValueError(
            f"{text} is not between 0 and 1; of a head it may name "
            f"{' or '.join(DATA_SETS)}"
        )
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """Generations of one text."""

    lm: loading.LanguageModel
    start: int  # tokens of noise before a generation
    num_new: int  # tokens of a generation
    page_size: int
    as_shapes: bool = False  # whether works are traced, and not run

    @property
    def limit(self) -> int:
        """Tokens of the text after a generation."""
        return self.start + self.num_new

    @functools.cached_property
    def stage(self) -> works.Stage:
        """The caches of all works."""
        positions, how = self.limit + self.lm.gamma_max + 1, self.as_shapes
        return works.make_stage(self.lm, positions, self.page_size, as_shapes=how)

    def plain(self) -> works.Work:
        """Returns the work that decodes the text; its time is that of one token."""
        how = {"steps": self.num_new, "program": "forced: plain"}
        return self.stage.plain_steps(self.start, **how)

    def rounds(self, trace: Any, kept: Any, gamma: int) -> works.Work:
        """Returns the work that writes `trace` in rounds; see `ForcedParams`."""

        def memory_at(memory: Any, length: int) -> forced_drafter.ForcedMemory:
            inner = noise.memory_at(memory, length)
            text, right = jnp.asarray(trace)[None], jnp.asarray(kept)[None]
            return forced_drafter.ForcedMemory(inner=inner, trace=text, kept=right)

        size = self.lm.target.config.vocab_size
        drafter = forced_drafter.lift(self.lm.drafter, 1, vocabulary=size)
        how = {"limit": self.limit, "max_rounds": self.limit, "drafter": drafter}
        how |= {"memory_at": memory_at, "program": "forced: rounds"}
        return self.stage.rounds(self.start, gamma, **how)

    def programs(self, gamma: int) -> list[works.Work]:
        """Returns the works that `measure` calls, to be traced and not run."""
        trace = np.zeros(self.stage.text.shape, np.int32)
        kept = np.zeros((trace.size + self.lm.gamma_max,), np.int32)
        return [self.plain(), self.rounds(trace, kept, gamma)]

    def written(self, kv: paged.PagedKV) -> np.ndarray:
        """Returns keys and values of all tokens but the last, which has none: of the
        context, which is the same in all runs, and of generated tokens, as integers."""
        return np.stack(evidence.committed_kv(kv, self.limit - 1))


def measure(
    runs: Runs,
    gamma: int,
    rates: Sequence[Rate],
    *,
    repeats: int,
    head: str | None = None,
) -> list[dict[str, Any]]:
    """Returns a row for each rate, timed in turns with autoregressive decoding.

    Args:
      head: the head whose published acceptance a data set's name stands for.

    Raises:
      RuntimeError: two plain runs of one text differ.
    """
    first, again = (runs.plain().once() for _ in range(2))
    trace = np.asarray(first.tokens)
    if not np.array_equal(trace, again.tokens):
        raise RuntimeError("two plain runs of one text differ")
    expected = runs.written(first.cache)
    del first, again  # Frees their caches.
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
        call = lambda state: last.append(work.call(state)) or last[0]
        # Not warmed up by a call before it: one call has many steps.
        timed = bench.stopwatch(call, work.prepared)

        def checked() -> float:
            seconds, state = timed(), last.pop()
            wrong = int(np.sum(runs.written(state.cache) != expected))
            # Keeps counts alone: the cache is large.
            slot = requests_lib.slot_of(state.slots, 0)
            done[rate].append(counts(runs, trace, slot, wrong))
            return seconds / runs.num_new

        return checked

    cases = {PLAIN: functools.partial(runs.plain().thunk, warms=False)}
    cases |= {rate: functools.partial(case, rate) for rate in rates}
    timings = bench.run(cases, repeats=repeats)
    return [
        {"kind": "rounds", "acceptance": "forced", "gamma": gamma, "forced_rate": rate}
        # The run that differs most from decoding, or has most logits of NaN.
        | max(done[rate], key=lambda run: [run[name] for name in FAULTS])
        | times(timings, rate, done[rate][0]["tokens_per_target_step"])
        for rate in rates
    ]


FAULTS = ("nonfinite_logits", "differing_tokens", "differing_kv")


def counts(
    runs: Runs, trace: np.ndarray, slot: states.Slots, differing_kv: int
) -> dict[str, Any]:
    """Returns the counts of a run; `equal` is false where a token or a bit differs, and
    where logits are not finite, since equal texts from NaN prove nothing.

    Args:
      slot: its leaves lack the axis of slots.
    """
    new = slice(runs.start, runs.limit)
    differing = int(np.sum(np.asarray(slot.tokens)[new] != trace[new]))
    differing += abs(runs.limit - int(slot.length))
    nonfinite, num_rounds = int(slot.num_nonfinite), int(slot.num_rounds)
    return {
        "acceptance_rate": int(slot.num_accepted) / max(int(slot.num_proposed), 1),
        "accepted_hist": slot.accepted_hist,
        "rounds": num_rounds,
        "tokens": runs.num_new,
        "tokens_per_target_step": runs.num_new / num_rounds,
        "context": runs.start,
        "nonfinite_logits": nonfinite,
        "matched": differing == nonfinite == 0,
        "differing_tokens": differing,
        "differing_kv": differing_kv,
        "equal": differing == nonfinite == differing_kv == 0,
    }


def times(timings: bench.Timings, rate: Rate, per_round: float) -> dict[str, Any]:
    """Returns the times of a token and of a round at a rate, and the speed-up.

    Args:
      timings: seconds of a token.
      per_round: tokens that a round commits.
    """
    seconds, plain_s = timings.seconds[rate], timings.seconds[PLAIN]
    made = {"n": len(seconds), "warm_up_s": timings.warm_up[rate]}
    for name, values in {
        "plain_ms": [1e3 * s for s in plain_s],
        "spec_ms": [1e3 * s for s in seconds],
        "round_ms": [1e3 * s * per_round for s in seconds],
        "speedup": bench.ratios(plain_s, seconds),
    }.items():
        made |= bench.spread_fields(name, values, ("q1", "q3"))
    return made


def choose_kept(
    chances: Sequence[float], *, start: int, limit: int, size: int, tries: int = 200
) -> np.ndarray:
    """Returns how many drafts a round that begins at each length keeps, `[size]` int32.

    Draft `i` is right with chance `chances[i]` if all before it are, so that accepted
    lengths spread like a real drafter's; the draw nearest to the mean rate is taken.

    Args:
      chances: of each draft of a chain, or of a path of a tree.
      start, limit: lengths of the text before the first round and after the last.
    """
    gamma, rate = len(chances), np.cumprod(chances).sum() / len(chances)

    def drawn(seed: int) -> np.ndarray:
        is_right = np.random.default_rng(seed).random((size, gamma)) < chances
        return np.cumprod(is_right, axis=1).sum(axis=1).astype(np.int32)

    def gap(kept: np.ndarray) -> float:
        proposed, accepted = simulate(kept, start=start, limit=limit, gamma=gamma)
        return abs(accepted / max(proposed, 1) - rate)

    return min(map(drawn, range(tries)), key=gap)


def simulate(
    kept: np.ndarray, *, start: int, limit: int, gamma: int
) -> tuple[int, int]:
    """Returns how many drafts, on one path, a generation proposes and accepts."""
    length, proposed, accepted = start, 0, 0
    while length < limit:
        drafted = min(gamma, limit - length - 1)
        right = min(int(kept[length]), drafted)
        proposed, accepted = proposed + drafted, accepted + right
        length += right + 1
    return proposed, accepted


# Tokens of a round, the target's own included, and the chance of the first draft where
# it is known (chat and mathematics): Qwen3-8B with seven drafts at temperature 1 and
# heads trained alike (https://arxiv.org/abs/2607.05147, table 1 and section 5).
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


def chances(rate: Rate, gamma: int, *, head: str | None) -> list[float]:
    """Returns the chance of each draft, given that all before it are kept.

    Args:
      rate: the share of drafts to be kept; or one of `DATA_SETS`, for the published
        tokens of a round of `head` with seven drafts: then all drafts but the first
        have one chance, chosen to give this number.
    """
    if not isinstance(rate, str):
        return [conditional(rate, gamma)] * gamma
    tokens, first = _PUBLISHED[head, rate]
    share = (tokens - 1) / _PUBLISHED_DRAFTS
    others = conditional(share, _PUBLISHED_DRAFTS, first)
    return [others if first is None else first, *[others] * (gamma - 1)]


def conditional(rate: float, gamma: int, first: float | None = None) -> float:
    """Returns the chance `p` of each draft, given that all before it are kept, by which
    `rate` of them are kept: `p + p**2 + .. + p**gamma = rate * gamma`.

    Args:
      first: the chance of the first draft, if it differs from that of the others, `p`.
    """
    from scipy import optimize  # Few runs of latency.py need it.

    def excess(p: float) -> float:
        reached = (p if first is None else first) * sum(p**i for i in range(gamma))
        return reached - rate * gamma

    return optimize.brentq(excess, 0.0, 1.0)
