"""A drafter that knows the text which plain decoding writes.

It proposes that text at no cost, and so shows a ceiling: what rounds would gain by the
best of drafters. With wrong drafts at chosen places it shows what they gain at a
*forced* acceptance. Either is a number about rounds, never about a drafter.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import pytree
from spec_jax.engine import protocols


class Trace(pytree.Node):
    """The answer of a request, for the oracle."""

    tokens: jax.Array  # [size] int32, prompt and plain output
    is_right: jax.Array  # [size] bool, whether a draft for the position is to be right
    length: jax.Array  # [] int32, tokens of the text


def make_trace(text: list[int], *, rate: float = 1.0, seed: int = 0) -> Trace:
    """Makes the trace of a text, with right drafts at `rate` of its positions.

    Each position is right or wrong by a draw of its own, which `seed` decides alone: a
    draft is kept with probability `rate` if all before it were, wherever rounds begin.

    Args:
      text: prompt and output; nothing is drafted after it.

    Raises:
      ValueError: no text, or a rate outside [0, 1].
    """
    if not text:
        raise ValueError("the text is empty: an oracle needs what plain decoding wrote")
    if not 0 <= rate <= 1:
        raise ValueError(f"{rate=} is outside [0, 1]")
    is_right = np.random.default_rng(seed).random(len(text)) < rate
    return Trace(
        tokens=jnp.asarray(np.asarray(text, np.int32)),
        is_right=jnp.asarray(is_right),
        length=jnp.int32(len(text)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(protocols.Drafter):
    """Drafts from a `Trace`, which is its memory: `prefill` takes one as `params`.

    Attributes:
      vocab_size: of the target; a wrong token is another one of these.

    Raises:
      ValueError: a vocabulary in which no token is wrong.
    """

    gamma_max: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise ValueError(
                f"vocab_size={self.vocab_size} must be at least 2, for a token to be "
                "wrong"
            )

    def init(self, *, capacity: int, page_size: int) -> Trace:
        """Allocates an empty trace, of whole pages and one token more."""
        size = -(-capacity // page_size) * page_size + 1
        return Trace(
            tokens=jnp.zeros((size,), jnp.int32),
            is_right=jnp.zeros((size,), bool),
            length=jnp.int32(0),
        )

    def prefill(self, params: Trace, memory: Trace, prompt: list[int]) -> Trace:
        """Takes in the trace of a request.

        Raises:
          ValueError: no trace, or one that is longer than a text can become.
        """
        del prompt
        if not isinstance(params, Trace):
            raise ValueError(
                "an oracle takes the trace of each request: give it as `draft_params`"
            )
        room = memory.tokens.shape[0] - params.tokens.shape[0]
        if room < 0:
            raise ValueError(
                f"a trace of {params.tokens.shape[0]} tokens for a text of "
                f"{memory.tokens.shape[0]} at most: cut it"
            )
        # A copy: the memory is donated, and the trace is the caller's.
        return jax.tree.map(
            jnp.copy,
            params.replace(
                tokens=jnp.pad(params.tokens, (0, room)),
                is_right=jnp.pad(params.is_right, (0, room)),
            ),
        )

    def propose(self, params, memory, *, tokens, length, gamma):
        """Drafts `gamma` tokens, or fewer at the end of the trace."""
        del params, tokens
        positions = length + jnp.arange(self.gamma_max, dtype=jnp.int32)
        # A position past the end reads the last token, which is not drafted.
        right, is_right = (
            leaf.at[positions].get(mode="clip")
            for leaf in (memory.tokens, memory.is_right)
        )
        return memory, protocols.Proposal(
            tokens=jnp.where(is_right, right, (right + 1) % self.vocab_size),
            num_drafted=jnp.clip(memory.length - length, 0, gamma),
        )
