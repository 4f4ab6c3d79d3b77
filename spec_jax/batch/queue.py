"""Continuous batching: requests wait in a queue, and take the slots that come free.

On the host, around `rounds.generate`, which comes back whenever a slot ends while
somebody waits. Nothing is compiled again for another request, whatever its length,
gamma, seed or sampling settings.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import loop, protocols, rounds, sampling, session
from spec_jax.batch import drafter as drafter_lib, rounds as batch_rounds, rows
from spec_jax.gamma import policy as policy_lib
from spec_jax.paging import index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence to generate.

    Attributes:
      prompt: token ids.
      max_tokens: tokens to generate, at most.
      gamma: tokens to draft a round, at most; None is the drafter's `gamma_max`.
      settings: of sampling; None is greedy.
      draft_params: where a drafter takes something from each request (an oracle's
        trace): in place of the drafter's parameters, at prefill.
    """

    prompt: list[int]
    max_tokens: int
    gamma: int | None = None
    settings: sampling.SamplingSettings | None = None
    draft_params: protocols.Params = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A request that came to its end.

    Attributes:
      number: of the request, in the order of the queue.
      state: the slot's last state on the host, without cache and memory.
    """

    number: int
    state: rounds.RoundState

    @property
    def tokens(self) -> list[int]:
        """What was generated, without the prompt.

        Raises:
          FloatingPointError, RuntimeError: as `session.check_state`; `state` has the
            tokens all the same.
        """
        session.check_state(self.state)
        generated = np.asarray(self.state.origins) != int(rounds.Origin.PROMPT)
        return np.asarray(self.state.tokens)[generated].tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A target and a drafter for several slots, and what all requests share.

    Attributes:
      params: of the target and of the drafter.
      capacity: positions of a slot, or a little more: of the longest request.
      num_pages: of all slots together; None is enough for all of them in full. With
        fewer, a request waits until what it may need is free. An empty slot has one.
      prefill_by_rows: of the target, see `row_model.RowModel.prefill`.
      policy_state: the first state of `gamma_policy`, for every request.

    Raises:
      ValueError: a size below one, fewer pages than slots, a target and a drafter of
        different numbers of slots, a drafter that does not fit, or a policy without
        its state.
    """

    target: rows.RowBatch
    drafter: drafter_lib.BatchDrafter
    params: tuple[protocols.Params, protocols.Params]
    capacity: int
    page_size: int
    num_pages: int | None = None
    stop_ids: tuple[int, ...] = ()
    prefill_by_rows: bool | None = None
    gamma_policy: policy_lib.GammaPolicy | None = None
    policy_state: policy_lib.State = None

    def __post_init__(self):
        slots = self.target.num_slots
        if self.capacity < 1 or self.page_size < 1:
            raise ValueError(
                f"capacity={self.capacity} and page_size={self.page_size} must be at "
                "least 1"
            )
        if self.num_pages is not None and self.num_pages < slots:
            raise ValueError(
                f"num_pages={self.num_pages} is fewer than {slots} slots, and every "
                "slot has a page: allow more pages or fewer slots"
            )
        if self.drafter.num_slots != slots:
            raise ValueError(
                f"the target has {slots} slots and the drafter "
                f"{self.drafter.num_slots}: give both the same"
            )
        session.check_pair(self.target.model, self.drafter)
        if (self.gamma_policy is None) != (self.policy_state is None):
            raise ValueError("a gamma policy and its first state go together")

    @property
    def slot_capacity(self) -> int:
        """Positions of a slot: whole pages."""
        return index.pages_for(self.capacity, self.page_size) * self.page_size

    def check(self, request: Request) -> None:
        """Raises `ValueError` for a request that no slot could ever take."""
        session.check_prompt(
            request.prompt,
            vocab_size=self.target.config.vocab_size,
            capacity=self.slot_capacity,
        )
        session.check_max_tokens(request.max_tokens)
        if request.gamma is not None:
            session.check_gamma(request.gamma, self.drafter.gamma_max)
        if self.num_pages is None:
            return
        others = self.target.num_slots - 1
        if self._pages(request) > self.num_pages - others:
            raise ValueError(
                f"a request of {len(request.prompt)} + {request.max_tokens} tokens "
                f"needs {self._pages(request)} pages of {self.page_size}, and there "
                f"are {self.num_pages}, of which empty slots have {others}: allow more "
                "pages or generate fewer tokens"
            )

    def _pages(self, request: Request) -> int:
        """The most pages that a request comes to hold."""
        positions = min(
            len(request.prompt) + request.max_tokens, self.slot_capacity + 1
        )
        return self.target.pages_needed(positions - 1, self.page_size)

    def empty(self, *, draws: bool) -> batch_rounds.BatchState:
        """The state of free slots. Without `draws` its programs are greedy."""
        sizes = {
            "capacity": self.capacity,
            "page_size": self.page_size,
            "num_pages": self.num_pages,
        }
        slots = self.target.num_slots
        text = jnp.zeros((self.slot_capacity + 1,), jnp.int32)
        settings = sampling.make_settings(temperature=0.0) if draws else None
        one = rounds.init_state(
            text,
            length=jnp.int32(1),
            limit=jnp.int32(0),  # done
            cache=None,
            memory=None,
            gamma_max=self.drafter.gamma_max,
            settings=settings,
            policy=self.policy_state,
            vocab_size=self.target.config.vocab_size,
        )
        return batch_rounds.BatchState(
            slots=jax.tree.map(lambda leaf: jnp.stack([leaf] * slots), one),
            gamma=jnp.zeros((slots,), jnp.int32),
            cache=self.target.new_cache(**sizes),
            memory=self.drafter.init(**sizes),
        )

    def admit(
        self, state: batch_rounds.BatchState, slot: int, request: Request
    ) -> batch_rounds.BatchState:
        """Puts a request into a slot that is done; `state` is used up."""
        capacity, prompt = self.slot_capacity, session.token_list(request.prompt)
        text = np.zeros((capacity + 1,), np.int32)
        text[: len(prompt)] = prompt
        settings = request.settings
        if settings is None and state.slots.settings is not None:
            settings = sampling.make_settings(temperature=0.0)
        target_params, draft_params = self.params
        gamma = self.drafter.gamma_max if request.gamma is None else request.gamma
        # One call for all of a slot's small arrays: each by itself would cost as much.
        state = _occupy(
            self.target,
            self.drafter,
            draft_params,
            state,
            np.int32(slot),
            text=text,
            length=np.int32(len(prompt)),
            limit=np.int32(min(len(prompt) + request.max_tokens, capacity + 1)),
            capped=np.bool_(len(prompt) + request.max_tokens > capacity + 1),
            gamma=np.int32(gamma),
            settings=settings,
            policy=self.policy_state,
        )
        if request.draft_params is not None:
            draft_params = request.draft_params
        return state.replace(
            cache=self.target.prefill(
                target_params,
                state.cache,
                prompt,
                slot=slot,
                by_rows=self.prefill_by_rows,
            ),
            memory=self.drafter.prefill(draft_params, state.memory, prompt, slot=slot),
        )

    def run(
        self,
        requests: Sequence[Request],
        *,
        state: batch_rounds.BatchState | None = None,
        rounds_per_call: int = 1 << 30,
    ) -> Iterator[Finished]:
        """Generates all requests, and yields each when it ends.

        Args:
          state: what `empty` made, and used up; None makes it here. One that draws
            takes greedy requests too, not the other way round.
          rounds_per_call: how often the host looks at least, whatever happens.

        Raises:
          ValueError: a request that no slot can take, a greedy state for a request
            that samples, or less than a round a call; before anything runs.
          MemoryError: a slot found no page. What was finished was yielded.
          RuntimeError: a cache refused an operation: a fault of the program.
        """
        for request in requests:
            self.check(request)
        if rounds_per_call < 1:
            raise ValueError(f"{rounds_per_call=} must be at least 1")
        waiting = collections.deque(enumerate(requests))
        running: dict[int, int] = {}  # numbers of requests, by slot
        draws = any(request.settings is not None for request in requests)
        if state is None:
            state = self.empty(draws=draws)
        elif draws and state.slots.settings is None:
            raise ValueError(
                "a request samples, and the state is of a greedy program: make it by "
                "empty(draws=True)"
            )
        stop_ids = session.stop_array(self.stop_ids)
        while waiting or running:
            free = [s for s in range(self.target.num_slots) if s not in running]
            while waiting and free and self._fits(waiting[0][1], requests, running):
                number, request = waiting.popleft()
                running[free[0]] = number
                state = self.admit(state, free.pop(0), request)
            state = batch_rounds.generate(
                self.target,
                self.drafter,
                self.params,
                state,
                stop_ids=stop_ids,
                max_rounds=jnp.int32(rounds_per_call),
                until_one_ends=jnp.bool_(bool(waiting)),
                gamma_policy=self.gamma_policy,
            )
            session.check_refused([state.cache, state.memory])
            slots = jax.device_get(state.slots)
            has_ended = slots.done & ~slots.starved
            for slot in [slot for slot in running if has_ended[slot]]:
                one = jax.tree.map(lambda leaf, slot=slot: leaf[slot], slots)
                yield Finished(number=running.pop(slot), state=one)
            _check_pages(state)

    def _fits(self, request, requests, running) -> bool:
        """Whether its pages are there even if all others come to need all of theirs."""
        if self.num_pages is None:
            return True
        held = sum(self._pages(requests[number]) for number in running.values())
        idle = self.target.num_slots - len(running) - 1  # A slot keeps its first page.
        return held + idle + self._pages(request) <= self.num_pages


@loop.donates(static_argnames=("target", "drafter"))
def _occupy(
    target,
    drafter,
    draft_params,
    state,
    slot,
    *,
    text,
    length,
    limit,
    capped,
    gamma,
    settings,
    policy,
):
    """Writes a slot's first state, and frees what sequences that are done hold.

    In this slot and in all others: whoever comes next was promised all pages that
    nobody needs any more.
    """
    asked = state.slots.done | (jnp.arange(target.num_slots, dtype=jnp.int32) == slot)
    zeros = jnp.zeros_like(state.gamma)
    one = rounds.init_state(
        text,
        length=length,
        limit=limit,
        cache=None,
        memory=None,
        gamma_max=drafter.gamma_max,
        settings=settings,
        policy=policy,
        capped=capped,
        vocab_size=target.config.vocab_size,
    )
    return state.replace(
        slots=jax.tree.map(lambda all_, x: all_.at[slot].set(x), state.slots, one),
        gamma=state.gamma.at[slot].set(gamma),
        cache=target.truncate(state.cache, zeros, asked=asked),
        memory=drafter.commit(draft_params, state.memory, zeros + 1, asked=asked),
    )


def _check_pages(state: batch_rounds.BatchState) -> None:
    """Raises `MemoryError` where the loop could only say that a slot found no page."""
    starved = np.flatnonzero(np.asarray(state.slots.starved))
    kv = state.cache
    if starved.size:
        raise MemoryError(
            f"out of pages in slots {starved.tolist()}: {int(kv.num_free)} of "
            f"{kv.num_pages} pages of {kv.page_size} tokens are free"
        )
