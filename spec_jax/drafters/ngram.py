"""Prompt lookup: what followed the last time that the text ended like this.

Saxena (2023), https://github.com/apoorvumang/prompt-lookup-decoding. The last `n`
tokens are sought in `tokens[:length]`, prompt and output, for `n` from `n_max` down to
`n_min`; the first `n` that is found decides, and of its occurrences the earliest, as
in Hugging Face's `PromptLookupCandidateGenerator` and in vLLM. The tokens behind that
occurrence are the draft, as far as there are any.

Every `n` at every position costs one integer compare, `max_len * n_max` in all, on the
device and inside the loop.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import protocols
from spec_jax.drafters import suffix_match


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Drafts by lookup. There are no parameters, and no memory but the text.

    Where nothing matches nothing is drafted, and the round is a step of plain
    decoding.

    Attributes:
      n_max, n_min: the longest and the shortest match that is looked for.

    Raises:
      ValueError: unless `1 <= n_min <= n_max`.
    """

    gamma_max: int
    n_max: int = 3
    n_min: int = 1

    def __post_init__(self):
        if not 1 <= self.n_min <= self.n_max:
            raise ValueError(
                f"n_min={self.n_min} and n_max={self.n_max} are not "
                "1 <= n_min <= n_max: give lengths of matches in that order"
            )

    def init(self, *, capacity: int, page_size: int) -> tuple[()]:
        """Nothing."""
        del capacity, page_size
        return ()

    def prefill(self, params: None, memory: tuple[()], prompt: list[int]) -> tuple[()]:
        """Nothing: the prompt is in the text."""
        del params, prompt
        return memory

    def propose(
        self,
        params: None,
        memory: tuple[()],
        *,
        tokens: Int[Array, " max_len"],
        length: Int[Array, ""],
        gamma: Int[Array, ""],
    ) -> tuple[tuple[()], protocols.Proposal]:
        """Drafts what stands behind the match: fewer than `gamma` near the end."""
        del params
        suffix = suffix_match.suffix_of(tokens, length, self.n_max)
        matched = suffix_match.match_lengths(tokens, suffix)
        # The end matches itself, and is followed by nothing.
        is_followed = jnp.arange(tokens.shape[0], dtype=jnp.int32) < length
        matched = jnp.where(is_followed & (matched >= self.n_min), matched, 0)
        start = jnp.argmax(matched).astype(jnp.int32)  # the first of the longest
        num_known = jnp.where(matched[start] > 0, length - start, 0)
        behind = jnp.pad(tokens, (0, self.gamma_max))
        return memory, protocols.Proposal(
            tokens=jax.lax.dynamic_slice_in_dim(behind, start, self.gamma_max),
            num_drafted=jnp.minimum(gamma, num_known).astype(jnp.int32),
        )

    def commit(
        self, params: None, memory: tuple[()], length: Int[Array, ""]
    ) -> tuple[()]:
        """Nothing."""
        del params, length
        return memory
