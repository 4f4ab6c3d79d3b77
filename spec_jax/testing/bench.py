"""A tiny target, and texts that are decoded on it: what drafters are checked on."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax

from spec_jax import algorithms
from spec_jax.engine import protocols, requests as requests_lib
from spec_jax.model import (
    config as config_lib,
    params as params_lib,
    row_model,
)


TINY = config_lib.Qwen3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    dtype="float32",
)
"""One layer, 96 tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A target, prompts and sizes.

    Attributes:
      target: its slab has at least `gamma_max + 1` rows, of the drafter's `gamma_max`.
      prompts: of different lengths, one of them a single token.
      max_tokens: generated per prompt.
      capacity: positions of every cache, whole pages. A cache becomes full if this is
        less than a prompt and `max_tokens` together.

    Raises:
      ValueError: no prompt, or sizes that do not go together.
    """

    target: row_model.RowModel
    params: params_lib.Params
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int = 24
    capacity: int = 40
    page_size: int = 8

    def __post_init__(self):
        if not self.prompts:
            raise ValueError("a bench without prompts checks nothing: give it one")
        if self.page_size < 1 or self.capacity % self.page_size:
            raise ValueError(
                f"capacity={self.capacity} is not a number of whole pages of "
                f"page_size={self.page_size}"
            )

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the target's cache and of the drafter's memory."""
        return {"capacity": self.capacity, "page_size": self.page_size}

    def plain(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> list[int]:
        """Returns the prompt and what autoregressive decoding writes after it.

        Raises as `Autoregressive.init` and `Autoregressive.generated`.
        """
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        base = algorithms.autoregressive(self.target)
        state = base.init(
            self.params,
            [list(prompt)],
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            **self.sizes,
        )
        return [*prompt, *base.generated(base.run(self.params, state))[0]]

    def features(self, text: Sequence[int], taps: tuple[int, ...]) -> jax.Array:
        """Returns the features `[T, taps, D]` that decoding computes of a text.

        It has one row for each position, and padding to a bucket of a prefill by rows.
        """
        _, features = self.target.prefill(
            self.params,
            self.target.new_cache(**self.sizes),
            list(text),
            taps=taps,
            by_rows=True,
        )
        return cast(jax.Array, features)

    def rounds(
        self,
        drafter: protocols.SlotDrafter,
        params: protocols.Params,
        requests: Sequence[requests_lib.Request],
    ) -> list[list[int]]:
        """Returns each request's prompt and what rounds write after it.

        Args:
          params: the drafter's.

        Raises as `Scheduler.run`.
        """
        queue = algorithms.speculative(self.target, drafter).scheduler(
            (self.params, params),
            num_slots=drafter.num_slots,
            num_stop=1,
            **self.sizes,
        )
        finished = {one.number: one for one in queue.run(requests)}
        return [
            list(request.prompt) + finished[number].tokens
            for number, request in enumerate(requests)
        ]


def tiny(gamma_max: int) -> Bench:
    """Makes a random target of one layer, and prompts that repeat themselves."""
    return Bench(
        target=row_model.RowModel(config=TINY, impl="xla", slab=gamma_max + 1),
        params=params_lib.init(jax.random.key(0), TINY, stddev=0.3),
        prompts=((7, 3, 90, 7, 3, 41, 7, 3), (5,), (1, 2, 3, 4) * 7),
    )
