"""What a drafter of a batch does."""

from typing import Protocol

from jaxtyping import Array, Bool, Int

from spec_jax import protocols, sampling


Settings = sampling.SamplingSettings | None


class BatchDrafter(Protocol):
    """As `protocols.Drafter`, for `[B]` texts; the memory is that of all slots.

    A slot that is asked for nothing, gamma 0, costs nothing where that is possible. A
    proposal's fields have a leading axis of slots.
    """

    gamma_max: int
    num_slots: int

    def init(
        self, *, capacity: int, page_size: int, num_pages: int | None = None
    ) -> protocols.Memory:
        """The empty memory of all slots; sizes as in `protocols.Drafter`."""
        ...

    def prefill(
        self,
        params: protocols.Params,
        memory: protocols.Memory,
        prompt: list[int],
        *,
        slot: int,
    ) -> protocols.Memory:
        """Takes a prompt into a slot that is empty or was released. Donates `memory`.

        A slot is released by a `commit` of length 1, which forgets all of it.
        """
        ...

    def propose(
        self,
        params: protocols.Params,
        memory: protocols.Memory,
        *,
        tokens: Int[Array, "B max_len"],
        length: Int[Array, " B"],
        gamma: Int[Array, " B"],
        settings: Settings,
    ) -> tuple[protocols.Memory, protocols.Proposal]:
        """Drafts at most `gamma[b]` tokens for slot `b`.

        `settings`, with leaves `[B]`, are those of the target's draws.
        """
        ...

    def commit(
        self,
        params: protocols.Params,
        memory: protocols.Memory,
        length: Int[Array, " B"],
        *,
        asked: Bool[Array, " B"],
    ) -> protocols.Memory:
        """Learns what is committed in the slots that are asked."""
        ...
