"""Scheduling: requests wait in a queue, and take the slots that come free.

It runs on the host, around `round.generate`, which returns whenever a slot ends while
requests wait. Nothing is compiled again for another request, whatever its length,
gamma, seed, stop tokens or sampling settings. One sequence is a scheduler of one slot.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from spec_jax.engine import (
    admission,
    checks,
    ends as ends_lib,
    held as held_lib,
    processing as processing_lib,
    protocols,
    requests as requests_lib,
    round as round_lib,
    rows,
    state as states,
)
from spec_jax.gamma import policy as policy_lib
from spec_jax.paging import index
from spec_jax.processors import processor as processor_lib
from spec_jax.rules import rule as rule_lib, sampling as sampling_lib
from spec_jax.typing import check_whole


def _check_policy(policy: Any, drafter: protocols.SlotDrafter) -> None:
    """Raises `ValueError` for a policy that does not fit the drafter's proposals."""
    name = type(policy).__name__
    if not policy_lib.reads_ranks(policy):
        if protocols.is_tree(drafter):
            raise ValueError(
                f"{name} chooses the length of a chain from how many of its drafts "
                "stay, which is not known of a tree's nodes: give gamma as a number of "
                "nodes, take gamma.goodput.RankGoodput, or draft chains"
            )
    elif policy.gamma_max != drafter.gamma_max:
        raise ValueError(
            f"{name} counts drafts up to rank {policy.gamma_max}, and the drafter has "
            f"gamma_max={drafter.gamma_max}: give both the same"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A speculator whose target and drafter have slots, and sizes for all requests.

    Attributes:
      capacity: positions of the longest request; a slot has these, in whole pages.
      num_pages: of all slots together; None is enough for all of them in full. With
        fewer, a request waits until what it may need is free. An empty slot has one.
      stop_ids: of requests that do not name their own.
      num_stop: stop tokens of a request at most; as many as `stop_ids` if None. A
        request with more is refused; another number is another shape, and compiles
        again.
      prefill_by_rows: of the target, see `row_model.RowModel.prefill`.
      policy_state: the first state of the gamma policy, for every request; or for the
        first of each slot, where the policy goes on: `policy.keeps_state`.
      shares: whether a request begins with the pages of a slot whose prompt begins
        alike, in place of a prefill; of a `rows.SlotRows` on a paged cache. So does the
        drafter, if it `shares_prompts`.

    Raises:
      ValueError: a size below one, a page of more positions than the model has, a
        target and a drafter of different numbers of slots, a drafter that does not fit,
        a policy that does not fit the drafter, a policy without its state, or a number
        of pages for slots that share them.
    """

    speculator: round_lib.Speculator
    capacity: int
    page_size: int
    num_pages: int | None = None
    stop_ids: tuple[int, ...] = ()
    num_stop: int | None = None
    prefill_by_rows: bool | None = None
    policy_state: policy_lib.State = None
    shares: bool = False

    def __post_init__(self) -> None:
        target, drafter = self.target, self.drafter
        slots = target.num_slots
        check_whole(capacity=self.capacity)
        config = target.config
        positions = None if config is None else config.max_position_embeddings
        index.check_page_size(self.page_size, num_positions=positions)
        if self.shares and self.num_pages is not None:
            raise ValueError(
                f"num_pages={self.num_pages} of slots that share pages, which hold "
                "them longer: leave num_pages out, or shares"
            )
        if drafter.num_slots != slots:
            raise ValueError(
                f"the target has {slots} slots and the drafter {drafter.num_slots}: "
                "give both the same"
            )
        checks.check_pair(target, drafter)
        policy = self.speculator.gamma_policy
        if policy is not None:
            _check_policy(policy, drafter)
        if (policy is None) != (self.policy_state is None):
            raise ValueError("a gamma policy and its first state go together")
        if policy_lib.schedules(policy):
            cast(Any, policy).check(self.policy_state, num_slots=slots, rule=self.rule)

    @property
    def target(self) -> rows.SlotRows:
        """The speculator's target."""
        return cast(rows.SlotRows, self.speculator.target)

    @property
    def drafter(self) -> protocols.SlotDrafter:
        """The speculator's drafter."""
        return self.speculator.drafter

    @property
    def rule(self) -> rule_lib.Rule:
        """The speculator's rule of acceptance."""
        return rule_lib.of(self.speculator.rule)

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the target; None where that is no model."""
        config = self.target.config
        return None if config is None else config.vocab_size

    @property
    def slot_capacity(self) -> int:
        """Positions of a slot: whole pages."""
        return index.pages_for(self.capacity, self.page_size) * self.page_size

    @property
    def _drafter_shares(self) -> bool:
        return self.shares and protocols.complete(self.drafter).shares_prompts

    @property
    def _stop_size(self) -> int:
        return max(1, len(self.stop_ids), self.num_stop or 0)

    def check(self, request: requests_lib.Request) -> None:
        """Raises `ValueError` for a request that no slot could ever take."""
        checks.check_prompt(
            request.prompt,
            vocab_size=self.vocab_size,
            capacity=self.slot_capacity,
        )
        check_whole(max_tokens=request.max_tokens)
        if request.gamma is not None:
            check_whole(gamma=request.gamma, least=0, most=self.drafter.gamma_max)
        if request.processor is not None:
            processing_lib.check(request.processor, vocab_size=self.vocab_size)
        if request.stop_ids is not None:
            num_stop = checks.stop_array(request.stop_ids).size
            if num_stop > self._stop_size:
                raise ValueError(
                    f"a request has {num_stop} stop tokens, and the scheduler room for "
                    f"{self._stop_size}: give it num_stop={num_stop}"
                )
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

    def _pages(self, request: requests_lib.Request) -> int:
        """Returns the most pages that a request comes to hold."""
        limit, _ = checks.limit_of(
            len(request.prompt), request.max_tokens, self.slot_capacity
        )
        num_positions = limit - 1
        if protocols.is_tree(self.drafter):
            # A tree's drafts have places of their own, beyond where its paths end.
            most = limit - 2 + self.drafter.gamma_max
            num_positions = max(num_positions, min(most, self.slot_capacity))
        return index.pages_for(num_positions, self.page_size)

    def empty(
        self, *, draws: bool, processor: processor_lib.Processor | None = None
    ) -> states.State:
        """Allocates the state of free slots; without `draws` a greedy one.

        Args:
          processor: of the first request; all requests use its tables.
        """
        one = self._processing(processor, [0])
        slots = self.target.num_slots
        sizes: dict[str, Any] = {
            "capacity": self.capacity,
            "page_size": self.page_size,
            "num_pages": self.num_pages,
        }
        # Passed only where it is True: few targets and drafters have this argument.
        shares = {"shares": True} if self.shares else {}
        drafter_shares = shares if self._drafter_shares else {}
        return states.State(
            slots=states.empty_slots(
                num_slots=self.target.num_slots,
                max_len=self.slot_capacity + 1,
                num_stop=self._stop_size,
                gamma_max=self.drafter.gamma_max,
                depth_max=protocols.depth_max(self.drafter),
                sampling=sampling_lib.make_settings(temperature=0.0) if draws else None,
                policy=self.policy_state,
            ),
            cache=self.target.new_cache(**sizes, **shares),
            memory=self.drafter.init(**sizes, **drafter_shares),
            processing=None if one is None else processing_lib.of_slots(one, slots),
        )

    def _processing(
        self, processor: processor_lib.Processor | None, prompt: list[int]
    ) -> processing_lib.Processing | None:
        """Returns the processing of one request, after its prompt."""
        return processing_lib.begin(
            processor,
            checks.text_buffer(prompt, self.slot_capacity),
            np.int32(len(prompt)),
            vocab_size=self.vocab_size,
        )

    def admit(
        self,
        state: states.State,
        slot: int,
        request: requests_lib.Request,
        *,
        refills: bool = True,
        held: held_lib.Held | None = None,
    ) -> states.State:
        """Begins a request in a slot that does not generate; `state` is used up.

        Target and drafter take in the prompt but for its last token, which is pending:
        the first generated token comes from the rows like all others.

        Args:
          refills: whether a sequence may have ended in some slot, whose pages are then
            freed; False, where no slot has had one, is a smaller program.
          held: the prompts that slots hold, of a cache that `shares`: the request
            begins with one of them where it can, and is noted. No other slot is freed.
        """
        prompt = checks.token_list(request.prompt)
        begun = None if held is None else held.beginning(prompt, slot)
        kept = None if held is None else np.int32(0)
        if begun is not None and begun.source == slot:
            kept = np.int32(begun.length)
        limit, capped = checks.limit_of(
            len(prompt), request.max_tokens, self.slot_capacity
        )
        settings = request.sampling
        if settings is None and state.slots.sampling is not None:
            settings = sampling_lib.make_settings(temperature=0.0)
        one = self._processing(request.processor, prompt)
        processing_lib.check_fits(state.processing, one)
        target_params, draft_params = self.speculator.params
        gamma = self.drafter.gamma_max if request.gamma is None else request.gamma
        stop_ids = self.stop_ids if request.stop_ids is None else request.stop_ids
        # One call for all of a slot's small arrays: each by itself would cost as much.
        state = admission.occupy(
            self.target,
            self.drafter,
            draft_params,
            state,
            np.int32(slot),
            refills=refills,
            gamma_policy=self.speculator.gamma_policy,
            kept=kept,
            request={
                "tokens": checks.text_buffer(prompt, self.slot_capacity),
                "length": np.int32(len(prompt)),
                "limit": np.int32(limit),
                "capped": np.bool_(capped),
                "gamma": np.int32(gamma),
                "stop_ids": checks.stop_array(stop_ids, size=self._stop_size),
                "sampling": settings,
                "policy": self.policy_state,
            },
        )
        if one is not None:
            processing = processing_lib.occupy(state.processing, one, np.int32(slot))
            state = state.replace(processing=processing)
        if request.draft_params is not None:
            draft_params = request.draft_params
        cache, features = admission.take_in(
            self.target,
            self.drafter,
            target_params,
            state.cache,
            prompt,
            slot,
            begun=begun,
            by_rows=self.prefill_by_rows,
        )
        to_drafter: dict[str, Any] = {"slot": slot}
        if protocols.taps_of(self.drafter):
            to_drafter["features"] = features
        if begun is not None and self._drafter_shares:
            to_drafter["begun"] = begun
        memory = self.drafter.prefill(draft_params, state.memory, prompt, **to_drafter)
        if held is not None:
            shared = 0 if begun is None else begun.length
            held.put(slot, prompt, features=features, shared=shared)
        return state.replace(cache=cache, memory=memory)

    def _held(self) -> held_lib.Held | None:
        """Returns an empty record of prompts, if slots share them."""
        if not self.shares:
            return None
        by_rows = self.prefill_by_rows
        if by_rows is None:
            by_rows = self.target.prefills_by_rows
        return held_lib.Held(by_rows=by_rows)

    def check_all(
        self, requests: Sequence[requests_lib.Request]
    ) -> processor_lib.Processor | None:
        """Returns the processor of the first request, if any.

        Raises:
          ValueError: as `check`, or processors that cannot share a run.
        """
        for request in requests:
            self.check(request)
        each = [request.processor for request in requests]
        if len({one is None for one in each}) > 1:
            raise ValueError(
                "some requests have a processor and some have none: give all of a run "
                "one, such as penalties() that change nothing"
            )
        first = each[0] if each else None
        for one in each:
            if first is not None and one is not None and one is not first:
                processor_lib.check_same(first, one)
        return first

    def begin(self, *requests: requests_lib.Request) -> states.State:
        """Returns the state of requests in the first slots, the others empty.

        Raises:
          ValueError: as `check`, or more requests than slots.
        """
        if len(requests) > self.target.num_slots:
            raise ValueError(
                f"{len(requests)} requests for {self.target.num_slots} slots: make as "
                "many slots, or `run` them"
            )
        first = self.check_all(requests)
        draws = any(one.sampling is not None for one in requests)
        state = self.empty(draws=draws, processor=first)
        held = self._held()
        for slot, request in enumerate(requests):
            state = self.admit(state, slot, request, refills=False, held=held)
        return state

    def run(
        self,
        requests: Sequence[requests_lib.Request],
        *,
        state: states.State | None = None,
        keep: Callable[[states.State, int], Any] = lambda state, slot: None,
        ends: ends_lib.Ends | None = None,
    ) -> Iterator[requests_lib.Finished]:
        """Generates all requests, and yields each when it ends.

        Args:
          keep: `keep(state, slot)` is called when the request of a slot has ended; its
            result is `Finished.kept`.
          state: made by `empty`, and used up; None: it is made here. A state that draws
            takes greedy requests, too; a greedy one takes no other requests.
          ends: ends requests besides their stop tokens: see `ends.apply`. The host then
            looks after each round, and cuts what the round committed behind an end.

        Raises:
          ValueError: a request that no slot can take, or a greedy state for a request
            that samples; before anything runs.
          MemoryError: a slot found no page. Finished requests were yielded.
          RuntimeError: a cache refused an operation: a fault of the program.
        """
        first = self.check_all(requests)
        draws = any(request.sampling is not None for request in requests)
        if state is None:
            state = self.empty(draws=draws, processor=first)
        elif draws and state.slots.sampling is None:
            raise ValueError(
                "a request samples, and the state is of a greedy program: make it by "
                "empty(draws=True)"
            )
        waiting = collections.deque(enumerate(requests))
        running: dict[int, int] = {}  # numbers of requests, by slot
        refills, held = False, self._held()
        while waiting or running:
            free = [s for s in range(self.target.num_slots) if s not in running]
            while waiting and free and self._fits(waiting[0][1], requests, running):
                number, request = waiting.popleft()
                running[free[0]] = number
                state = self.admit(
                    state, free.pop(0), request, refills=refills, held=held
                )
            state = round_lib.run(
                self.speculator,
                state,
                max_rounds=round_lib.UNTIL_DONE if ends is None else 1,
                until_one_ends=bool(waiting),
            )
            checks.check_refused([state.cache, state.memory])
            slots = jax.device_get(state.slots)
            if ends is not None:
                state, slots = ends_lib.apply(state, slots, running, ends)
            for number, slot in _ended(slots, running):
                yield requests_lib.Finished(
                    number=number,
                    slot=requests_lib.slot_of(slots, slot),
                    vocab_size=self.vocab_size,
                    kept=keep(state, slot),
                    shared=0 if held is None else held.shared[slot],
                )
            refills = True
            checks.check_pages(slots.status, slots.length, state.cache)

    def _fits(self, request, requests, running) -> bool:
        """Returns whether the pool has its pages even if all others need their most."""
        if self.num_pages is None:
            return True
        held = sum(self._pages(requests[number]) for number in running.values())
        idle = self.target.num_slots - len(running) - 1  # A slot keeps its first page.
        return held + idle + self._pages(request) <= self.num_pages


def _ended(slots: states.Slots, running: dict[int, int]):
    """Yields the numbers and the slots of requests that ended with pages enough, and
    removes them from `running`."""
    waits = (int(states.Status.RUNNING), int(states.Status.OUT_OF_PAGES))
    for slot in list(running):
        if int(slots.status[slot]) not in waits:
            yield running.pop(slot), slot
