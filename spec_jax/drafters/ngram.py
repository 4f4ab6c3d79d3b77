"""Prompt lookup: what followed the last time that the text ended like this.

Saxena (2023), https://github.com/apoorvumang/prompt-lookup-decoding. The last `n`
tokens are sought in `tokens[:length]`, prompt and output, for `n` from `n_max` down to
`n_min`; the first `n` that is found decides. Which of its occurrences is taken:

    "last"   the most recent one. It is often so near the end that fewer than `gamma`
             tokens follow it: then the draft repeats them, as if the text had a period.
    "first"  the earliest one, as in Hugging Face's `PromptLookupCandidateGenerator`
             and in vLLM. The draft ends where the text ends.

`hugging_face` makes the drafter that drafts exactly what Hugging Face's generator does.

Every `n` at every position costs one integer compare, `max_len * n_max` in all, on the
device and inside the loop.
"""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

from spec_jax.drafters import suffix_match, text_tree
from spec_jax.engine import protocols


Match = Literal["last", "first"]
"""The occurrence of the longest match that is continued."""

MATCHES: tuple[str, ...] = get_args(Match)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup(text_tree.TextDrafter):
    """Drafts by lookup. There are no parameters, and no memory but the text.

    Where nothing matches nothing is drafted, and the round is a step of plain
    decoding.

    Attributes:
      n_max, n_min: the longest and the shortest match that is looked for.
      match: one of `MATCHES`, see above.
      stop_ids: a chain ends before the first of these tokens; trees ignore them.
      tree: of the continuations of all matches, in place of the one by `match`.

    Raises:
      ValueError: unless `1 <= n_min <= n_max`; another `match`; as `check_nodes`.
    """

    n_max: int = 3
    n_min: int = 1
    match: Match = "last"
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.n_min <= self.n_max:
            raise ValueError(
                f"n_min={self.n_min} and n_max={self.n_max} are not "
                "1 <= n_min <= n_max: give lengths of matches in that order"
            )
        if self.match not in MATCHES:
            raise ValueError(f"match={self.match!r} is not one of {', '.join(MATCHES)}")

    def propose(self, params, memory, *, tokens, length, gamma):
        """Drafts the tokens that follow the match."""
        del params
        suffix = suffix_match.suffix_of(tokens, length, self.n_max)
        matched = suffix_match.match_lengths(tokens, suffix)
        at = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        # The end matches itself, and is followed by nothing.
        matched = jnp.where((at < length) & (matched >= self.n_min), matched, 0)
        if self.tree is not None:
            text = jnp.where(at < length, tokens, suffix_match.NONE)
            found = text_tree.propose(text, matched, tree=self.tree, gamma=gamma)
            return memory, found
        num_drafted = jnp.where(jnp.any(matched > 0), gamma, 0)
        offsets = jnp.arange(self.gamma_max, dtype=jnp.int32)
        if self.match == "first":
            start = jnp.argmax(matched).astype(jnp.int32)
            num_drafted = jnp.minimum(num_drafted, length - start)
        else:
            start = jnp.max(jnp.where(matched == jnp.max(matched), at, 0))
            offsets %= jnp.maximum(length - start, 1)
        # Tokens that an index past the text reads are not drafted.
        drafts = tokens.at[start + offsets].get(mode="clip")
        if self.stop_ids:
            is_stop = jnp.isin(drafts, jnp.array(self.stop_ids, jnp.int32))
            before = jnp.where(jnp.any(is_stop), jnp.argmax(is_stop), self.gamma_max)
            num_drafted = jnp.minimum(num_drafted, before)
        return memory, protocols.Proposal(
            tokens=drafts, num_drafted=num_drafted.astype(jnp.int32)
        )


NGram = PromptLookup
"""The drafter by its name in the registry."""


def hugging_face(
    *, gamma_max: int, n_max: int = 2, stop_ids: tuple[int, ...] = ()
) -> PromptLookup:
    """Returns the drafter that drafts as Hugging Face's prompt lookup does.

    It differs from the default one in four ways: it continues the earliest occurrence
    of the longest match, and not the latest; it drafts no further than the text goes;
    it matches at most 2 tokens, Hugging Face's default, and not 3; and a draft ends
    before a stop token, which the default one drafts like any other. `gamma`
    bounds the drafts, so that no draft is past the limit of the generation. Hugging
    Face drafts past that limit and cuts what was accepted there.

    Args:
      gamma_max: `prompt_lookup_num_tokens`.
      n_max: `max_matching_ngram_size`.
      stop_ids: `eos_token_id`.
    """
    return PromptLookup(
        gamma_max=gamma_max, n_max=n_max, match="first", stop_ids=stop_ids
    )
