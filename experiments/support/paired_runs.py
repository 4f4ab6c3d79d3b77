"""One prompt, plain and speculative, in one process: tokens, counters and times.

Both runs get a fresh cache, allocated outside the timed region. The clock runs over
the prompt's prefill and over one call that generates everything; compilation is
done before, by `warm_up`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations import decode_rounds, verify_paths
from experiments.support import model_pair
from spec_jax import autoregressive, rounds, session
from spec_jax.analysis import metrics
from spec_jax.drafters import oracle
from spec_jax.engine import protocols
from spec_jax.gamma import policy
from spec_jax.model import qwen3
from spec_jax.rules import acceptance, sampling as sampling_lib


ACCEPTANCES = ("verify", "decode")
"""What decides tokens: verify logits (`rounds`), or decoding (`decode_rounds`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does with a prompt, beside the models."""

    gamma: int
    gen_tokens: int
    capacity: int
    page_size: int
    stop_ids: tuple[int, ...] = ()
    prefill_by_rows: bool | None = None  # None: what the models do by default
    acceptance: str = "verify"  # of ACCEPTANCES
    sampling: sampling_lib.SamplingSettings | None = None  # None: greedy
    gamma_policy: policy.GammaPolicy | None = None  # None: always `gamma`
    policy_state: policy.State = None  # before each prompt's first round


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """A plain run."""

    tokens: list[int]  # generated, without the prompt
    timing: metrics.Timing
    nonfinite: int = 0  # tokens chosen from logits that are not finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculative:
    """A speculative run."""

    tokens: list[int]
    origins: list[rounds.Origin]
    counters: metrics.Counters
    timing: metrics.Timing
    mismatches: int | None  # counted on the way; None where only a replay can tell
    policy_state: policy.State = None  # after the last round


def run_plain(
    pair: model_pair.ModelPair, settings: Settings, prompt: list[int]
) -> Plain:
    """Plain decoding.

    Raises:
      ValueError: a prompt that cannot be used.
      MemoryError: out of pages.
    """
    kv = pair.target.new_cache(capacity=settings.capacity, page_size=settings.page_size)
    stop_ids = session.stop_array(settings.stop_ids)
    max_steps = jnp.int32(settings.gen_tokens)
    jax.block_until_ready((kv, stop_ids, max_steps))

    def begin() -> autoregressive.DecodeState:
        return session.begin_plain(
            pair.target,
            pair.params[0],
            kv,
            prompt,
            max_tokens=settings.gen_tokens,
            prefill_by_rows=settings.prefill_by_rows,
            settings=settings.sampling,
        )

    def generate(state: autoregressive.DecodeState) -> autoregressive.DecodeState:
        return autoregressive.generate(
            pair.target, pair.params[0], state, stop_ids=stop_ids, max_steps=max_steps
        )

    state, tokens, timing = _time(begin, generate, num_prompt=len(prompt))
    return Plain(tokens=tokens, timing=timing, nonfinite=int(state.num_nonfinite))


def run_speculative(
    pair: model_pair.ModelPair, settings: Settings, prompt: list[int]
) -> Speculative:
    """Speculative decoding; raises as `run_plain`."""
    run = Rounds(pair, settings, prompt)
    jax.block_until_ready(run.arrays)
    state, tokens, timing = _time(run.begin, run.generate, num_prompt=len(prompt))
    inner = inner_state(state)
    origins = np.asarray(inner.origins)[len(prompt) : int(inner.length)]
    decoded = isinstance(state, decode_rounds.DecodeRoundState)
    return Speculative(
        tokens=tokens,
        origins=[rounds.Origin(origin) for origin in origins],
        counters=count(state, len(tokens), verifier=pair.verifier),
        timing=timing,
        mismatches=int(state.num_mismatches) if decoded else None,
        policy_state=inner.policy,
    )


RoundsState = rounds.RoundState | decode_rounds.DecodeRoundState


class Rounds:
    """The rounds of one prompt: allocated at once, then `begin`, then `generate`.

    Attributes:
      params: of target and drafter: the pair's, or for an oracle those of the prompt.
    """

    def __init__(
        self, pair: model_pair.ModelPair, settings: Settings, prompt: list[int]
    ):
        session.check_gamma(settings.gamma, pair.drafter.gamma_max)
        sizes = {"capacity": settings.capacity, "page_size": settings.page_size}
        self._pair, self._settings, self._prompt = pair, settings, prompt
        self._kv = pair.target.new_cache(**sizes)
        self._memory = pair.drafter.init(**sizes)
        self.params = pair.params
        if isinstance(pair.drafter, oracle.Oracle):
            self.params = pair.params[0], make_trace(pair, settings, prompt)
        self._commit = None
        if settings.acceptance == "decode":
            self._commit = pair.target.new_cache(**sizes)
        self._stop_ids = session.stop_array(settings.stop_ids)
        self._gamma = jnp.int32(settings.gamma)
        self._limit = jnp.int32(settings.gen_tokens)

    @property
    def arrays(self) -> list:
        """What was allocated: to be complete before a clock starts."""
        caches = [self._kv, self._memory, self._commit]
        return [caches, self.params[1], self._stop_ids, self._gamma, self._limit]

    def begin(self) -> RoundsState:
        """Prefills: the caches are used up."""
        shared = {
            "max_tokens": self._settings.gen_tokens,
            "prefill_by_rows": self._settings.prefill_by_rows,
            "settings": self._settings.sampling,
        }
        pair = self._pair
        state = session.begin(
            pair.target,
            pair.drafter,
            self.params,
            self._kv,
            self._memory,
            self._prompt,
            policy=self._settings.policy_state,
            **shared,
        )
        if self._commit is None:
            return state
        commit = session.begin_plain(
            pair.target, pair.params[0], self._commit, self._prompt, **shared
        )
        return decode_rounds.init_state(state, commit_cache=commit.cache)

    def generate(
        self, state: RoundsState, *, max_rounds: jax.Array | None = None
    ) -> RoundsState:
        """All rounds, or at most `max_rounds`; the state is donated."""
        pair = self._pair
        shared = {
            "gamma": self._gamma,
            "stop_ids": self._stop_ids,
            "max_rounds": self._limit if max_rounds is None else max_rounds,
        }
        if isinstance(state, decode_rounds.DecodeRoundState):
            return decode_rounds.generate(
                pair.target, pair.verifier, pair.drafter, self.params, state, **shared
            )
        return rounds.generate(
            pair.verifier,
            pair.drafter,
            self.params,
            state,
            gamma_policy=self._settings.gamma_policy,
            **shared,
        )


def make_trace(
    pair: model_pair.ModelPair, settings: Settings, prompt: list[int]
) -> oracle.Trace:
    """What an oracle knows of a prompt: the text, decoded plainly before any clock."""
    text = [*prompt, *run_plain(pair, settings, prompt).tokens]
    # One shape for all prompts. What is behind the text is never committed.
    room = settings.capacity + 1 - len(text)
    return oracle.make_trace(text + [acceptance.PAD] * room)


def inner_state(
    state: autoregressive.DecodeState | RoundsState,
) -> autoregressive.DecodeState | rounds.RoundState:
    """The state that holds the tokens."""
    if isinstance(state, decode_rounds.DecodeRoundState):
        return state.inner
    return state


_State = TypeVar(
    "_State",
    autoregressive.DecodeState,
    rounds.RoundState,
    decode_rounds.DecodeRoundState,
)


def _time(
    begin: Callable[[], _State],
    generate: Callable[[_State], _State],
    *,
    num_prompt: int,
) -> tuple[_State, list[int], metrics.Timing]:
    """Runs both, and returns the last state, its generated tokens and the times.

    Args:
      begin: the prefill; what it needs is complete before the clock starts.
      generate: everything after that.
    """
    started = time.perf_counter()
    state = jax.block_until_ready(begin())
    prefilled = time.perf_counter()
    state = jax.block_until_ready(generate(state))
    finished = time.perf_counter()
    inner = inner_state(state)
    check_state(inner)
    tokens = np.asarray(inner.tokens)[num_prompt : int(inner.length)].tolist()
    timing = metrics.Timing(
        prefill_s=prefilled - started,
        decode_s=finished - prefilled,
        tokens=len(tokens),
    )
    return state, tokens, timing


def check_state(state: autoregressive.DecodeState | rounds.RoundState) -> None:
    """As `session.check_state`, but for logits that are not finite.

    Those are counted, and a run with any of them is not matched: what came out before
    them is shown, as what differs is.
    """
    with contextlib.suppress(FloatingPointError):
        session.check_state(state)


def count(
    state: RoundsState, num_tokens: int, *, verifier: protocols.Target | None = None
) -> metrics.Counters:
    """The statistics of a finished state as plain numbers.

    Args:
      verifier: where it goes row by row, each row counts as a forward.
    """
    by_decoding = {}
    if isinstance(state, decode_rounds.DecodeRoundState):
        by_decoding = {
            "commit_decode_steps": int(state.num_commit_steps),
            "mirror_decode_steps": int(state.num_mirror_steps),
            "correction_steps": int(state.num_correction_steps),
        }
    state = inner_state(state)
    goes_by_row = isinstance(verifier, verify_paths.RowLoop)
    return metrics.Counters(
        tokens=num_tokens,
        rounds=int(state.num_rounds),
        proposed=int(state.num_proposed),
        accepted=int(state.num_accepted),
        cut=int(state.num_cut),
        accepted_hist=tuple(np.asarray(state.accepted_hist).tolist()),
        proposed_at=tuple(np.asarray(state.proposed_at).tolist()),
        accepted_at=tuple(np.asarray(state.accepted_at).tolist()),
        row_steps=int(state.num_proposed) if goes_by_row else 0,
        nonfinite=int(state.num_nonfinite),
        **by_decoding,
    )


def count_mismatches(
    pair: model_pair.ModelPair, settings: Settings, prompt: list[int], tokens: list[int]
) -> int:
    """Positions of a generated text at which plain decoding chooses otherwise.

    Replays the text through plain decoding: every position is judged after the
    prefix that was really committed, whatever came before it.
    """
    kv = pair.target.new_cache(capacity=settings.capacity, page_size=settings.page_size)
    state = session.begin_plain(
        pair.target,
        pair.params[0],
        kv,
        prompt,
        max_tokens=settings.gen_tokens,
        prefill_by_rows=settings.prefill_by_rows,
    )
    new = slice(len(prompt), len(prompt) + len(tokens))
    text = np.array(state.tokens)
    text[new] = tokens
    _, chosen = autoregressive.replay(
        pair.target,
        pair.params[0],
        state.cache,
        tokens=jnp.asarray(text),
        start=jnp.int32(new.start),
        stop=jnp.int32(new.stop),
        settings=settings.sampling,
    )
    return int(np.sum(np.asarray(chosen)[new] != np.asarray(tokens)))


def one_a_bucket(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts that between them need every executable that all of them need."""
    by_bucket = {qwen3.bucket(max(1, len(prompt) - 1)): prompt for prompt in prompts}
    return list(by_bucket.values())


def warm_up(
    pair: model_pair.ModelPair, settings: Settings, prompts: list[list[int]]
) -> float:
    """Compiles everything that the prompts need; returns the seconds it took."""
    started = time.perf_counter()
    brief = dataclasses.replace(settings, gen_tokens=1)
    for prompt in one_a_bucket(prompts):
        plain = run_plain(pair, brief, prompt)
        run_speculative(pair, brief, prompt)
        count_mismatches(pair, brief, prompt, plain.tokens)
    return time.perf_counter() - started
