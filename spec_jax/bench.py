"""A tiny target, and texts that are decoded on it: what drafters are checked on."""

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax import autoregressive, protocols, rounds as rounds_lib, session
from spec_jax.model import config as config_lib, params as params_lib, row_model


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
      target: its slab has `gamma_max + 1` rows of the drafter's, or more.
      prompts: of different lengths, one of them a single token.
      max_tokens: generated per prompt.
      capacity: positions of every cache, whole pages; less than `max_tokens` more than
        a prompt, if a full cache is to be met.

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
    def sizes(self) -> dict[str, int]:
        """Of the target's cache and of the drafter's memory."""
        return {"capacity": self.capacity, "page_size": self.page_size}

    def plain(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> list[int]:
        """The prompt and what plain decoding writes behind it.

        Raises as `session.begin_plain` and `session.check_state`.
        """
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        kv = self.target.new_cache(**self.sizes)
        state = session.begin_plain(
            self.target, self.params, kv, list(prompt), max_tokens=max_tokens
        )
        state = autoregressive.generate(
            self.target,
            self.params,
            state,
            stop_ids=session.stop_array(stop_ids),
            max_steps=jnp.int32(max_tokens),
        )
        return session.committed(state)

    def rounds(
        self,
        drafter: protocols.Drafter,
        params: protocols.Params,
        prompt: tuple[int, ...],
        *,
        gamma: int,
        max_tokens: int,
        stop_ids: tuple[int, ...],
    ) -> list[int]:
        """The prompt and what rounds write behind it; raises as `plain`.

        Args:
          params: the drafter's.
        """
        both = self.params, params
        state = session.begin(
            self.target,
            drafter,
            both,
            self.target.new_cache(**self.sizes),
            drafter.init(**self.sizes),
            list(prompt),
            max_tokens=max_tokens,
        )
        state = rounds_lib.generate(
            self.target,
            drafter,
            both,
            state,
            gamma=jnp.int32(gamma),
            stop_ids=session.stop_array(stop_ids),
            max_rounds=jnp.int32(max_tokens),
        )
        return session.committed(state)


def tiny(gamma_max: int) -> Bench:
    """A random target of one layer, and prompts that repeat themselves."""
    return Bench(
        target=row_model.RowModel(config=TINY, impl="xla", slab=gamma_max + 1),
        params=params_lib.init(jax.random.key(0), TINY, stddev=0.3),
        prompts=((7, 3, 90, 7, 3, 41, 7, 3), (5,), (1, 2, 3, 4) * 7),
    )
