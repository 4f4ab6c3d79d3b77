"""Suffix decoding: what mostly followed, wherever the text has ended like this.

Oliaro et al., SuffixDecoding (2024), https://arxiv.org/abs/2411.04975, by the rules of
its implementation in ArcticInference. There are two bodies of text: the sequence
itself, prompt and output, and a corpus of earlier generations. In each of them:

    match         for each m = match_min .. match_max, all places that follow the last m
                  tokens
    path          the token that most often stands at those places (of equally frequent
                  ones the one that does so first), then the one that most often
                  follows that, and so on
    probability   of a token on the path: the product of the shares that it and those
                  before it had of the places that still went on
    budget        at most floor(m * max_factor) tokens, at most gamma; the path ends
                  before the first token of a probability below min_probability
    score         the sum of the probabilities: tokens expected to be kept

The m of the highest score decides, of equal ones the longest; the sequence itself
decides where its score is at least that of the corpus.

A suffix tree stores how often each string occurs, so as not to search for it. Here the
places are found by compares and counted, `match_max * gamma_max` counts of every
position of both bodies per round: the same numbers, in static shapes and on the
device. A place where a text ends is followed by nothing and has no share. Native
kernels find the same, to the bit, and look only at places that match.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax import pytree
from spec_jax.drafters import suffix_match, text_tree
from spec_jax.engine import protocols
from spec_jax.native import look_ups


class Corpus(pytree.Node):
    """Earlier generations, newest last: the parameters of `SuffixDecoding`."""

    tokens: jax.Array  # [size] int32, `suffix_match.NONE` between and before them
    groups: jax.Array  # [size] int32 in [0, size), equal where tokens are


class Lookup(pytree.Node):
    """A proposal, and how many of its tokens are expected to be kept."""

    proposal: protocols.Proposal
    score: jax.Array  # [] float32, tokens expected to be kept


def empty_corpus(size: int) -> Corpus:
    """Makes a corpus with room for `size` tokens, separators included.

    Raises:
      ValueError: a size below one.
    """
    if size < 1:
        raise ValueError(f"a corpus of {size=} tokens: it must hold at least 1")
    return _corpus(np.full((size,), suffix_match.NONE, np.int32))


def remember(corpus: Corpus, generation: list[int]) -> Corpus:
    """Adds a finished generation, on the host; the oldest tokens make room.

    The shapes stay, so that nothing is compiled again. The corpus keeps the end
    of a generation that is longer than it.

    Raises:
      ValueError: a negative token.
    """
    if generation and min(generation) < 0:
        raise ValueError(f"a generation has token {min(generation)}, below 0")
    size = corpus.tokens.shape[0]
    added = np.asarray([suffix_match.NONE, *generation], np.int32)
    return _corpus(np.concatenate([np.asarray(corpus.tokens), added])[-size:])


def _corpus(tokens: np.ndarray) -> Corpus:
    _, groups = np.unique(tokens, return_inverse=True)
    return Corpus(
        tokens=jnp.asarray(tokens), groups=jnp.asarray(groups.astype(np.int32))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuffixDecoding(text_tree.TextDrafter):
    """Drafts the most frequent continuation. The parameters are a `Corpus`.

    There is no memory but the text.

    Attributes:
      match_max: the longest match whose places are counted.
      match_min: the shortest one.
      max_factor: tokens drafted per token of the match, at most; `inf`: no bound.
      min_probability: where a path ends.
      tree: of the continuations in both bodies, in place of the path of the highest
        score.
      impl: resolved, see `ops.dispatch`: what looks up a path; a tree is XLA's.

    Raises:
      ValueError: matches or a factor that draft nothing, a probability outside (0, 1],
        or a `gamma_max` that is not the tree's nodes.
    """

    match_max: int = 8
    match_min: int = 1
    max_factor: float = 1.0
    min_probability: float = 0.1
    impl: str = "xla"

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.match_min <= self.match_max:
            raise ValueError(
                f"match_min={self.match_min} must be at least 1 and at most "
                f"match_max={self.match_max}"
            )
        if not self.match_max * self.max_factor >= 1:
            raise ValueError(
                f"max_factor={self.max_factor} drafts nothing even for a match of "
                f"match_max={self.match_max} tokens: raise one of them"
            )
        if not 0 < self.min_probability <= 1:
            raise ValueError(
                f"min_probability={self.min_probability} is outside (0, 1]"
            )

    def propose(self, params, memory, *, tokens, length, gamma):
        """Drafts what `look_up` finds: often fewer than `gamma` tokens, or none."""
        if self.tree is not None:
            proposal = self._tree(self.tree, params, tokens, length, gamma)
            return memory, proposal
        found = self.look_up(params, tokens=tokens, length=length, gamma=gamma)
        return memory, found.proposal

    def _tree(self, tree, corpus, tokens, length, gamma) -> protocols.Proposal:
        """Returns the tree of what followed in the sequence and in the corpus."""
        suffix = suffix_match.suffix_of(tokens, length, self.match_max)
        is_known = jnp.arange(tokens.shape[0], dtype=jnp.int32) < length
        own = jnp.where(is_known, tokens, suffix_match.NONE)
        none = jnp.full((1,), suffix_match.NONE, jnp.int32)
        body = jnp.concatenate([own, none, corpus.tokens])
        matched = suffix_match.match_lengths(body, suffix)
        matched = jnp.where(matched < self.match_min, 0, matched)
        return text_tree.propose(body, matched, tree=tree, gamma=gamma)

    def look_up(
        self,
        corpus: Corpus,
        *,
        tokens: Int[Array, " max_len"],
        length: Int[Array, ""],
        gamma: Int[Array, ""],
    ) -> Lookup:
        """Returns the path of the highest score, and the score.

        Nothing is counted, and nothing found, where `gamma` is 0.
        """
        if self.impl == "native":
            return self._by_kernels(corpus, tokens, length, gamma)

        def search() -> Lookup:
            return self._search(corpus, tokens, length, gamma)

        found = jax.eval_shape(search)
        return jax.lax.cond(
            gamma > 0,
            search,
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found),
        )

    @property
    def _budgets(self) -> np.ndarray:
        """Tokens by the length of the match, from 1 on; 0 below `match_min`."""
        sizes = np.arange(1, self.match_max + 1, dtype=np.int32)
        # Bounded before the cast: the product may exceed int32, or be infinite.
        most = np.minimum(np.floor(sizes * self.max_factor), self.gamma_max)
        return np.where(sizes < self.match_min, 0, most).astype(np.int32)

    def _by_kernels(self, corpus, tokens, length, gamma) -> Lookup:
        drafts, num_drafted, survival, score = look_ups.look_up(
            tokens,
            length,
            gamma,
            corpus.tokens,
            budgets=self._budgets,
            gamma_max=self.gamma_max,
            min_probability=self.min_probability,
        )
        proposal = protocols.Proposal(
            tokens=drafts, num_drafted=num_drafted, survival=survival
        )
        return Lookup(proposal=proposal, score=score)

    def _search(self, corpus, tokens, length, gamma) -> Lookup:
        """Returns the result of `look_up` for a `gamma` above 0, by XLA."""
        suffix = suffix_match.suffix_of(tokens, length, self.match_max)
        is_known = jnp.arange(tokens.shape[0], dtype=jnp.int32) < length
        own = jnp.where(is_known, tokens, suffix_match.NONE)
        _, groups = jnp.unique(own, return_inverse=True, size=own.shape[0])
        groups = groups.astype(jnp.int32)
        ours = self._best_path(Corpus(tokens=own, groups=groups), suffix, gamma)
        earlier = self._best_path(corpus, suffix, gamma)
        is_ours = ours.score >= earlier.score
        return jax.tree.map(lambda a, b: jnp.where(is_ours, a, b), ours, earlier)

    def _best_path(
        self, body: Corpus, suffix: Int[Array, " match_max"], gamma: Int[Array, ""]
    ) -> Lookup:
        """Returns the best path over all lengths of match in one body of text."""
        matched = suffix_match.match_lengths(body.tokens, suffix)
        sizes = np.arange(1, self.match_max + 1, dtype=np.int32)
        # A path may reach past the end, where nothing follows.
        room = (0, self.gamma_max)
        walk = functools.partial(
            self._path,
            jnp.pad(body.tokens, room, constant_values=suffix_match.NONE),
            jnp.pad(body.groups, room),
        )
        paths = jax.vmap(walk)(
            matched[None, :] >= sizes[:, None], jnp.minimum(gamma, self._budgets)
        )
        # `argmax` takes the first of equals, and the longest match is to win.
        best = self.match_max - 1 - jnp.argmax(paths.score[::-1])
        return jax.tree.map(lambda x: x[best], paths)

    def _path(
        self,
        text: Int[Array, " padded"],
        groups: Int[Array, " padded"],
        places: Bool[Array, " size"],
        budget: Int[Array, ""],
    ) -> Lookup:
        """Follows the most frequent continuation of the marked places.

        Args:
          text, groups: a body and `gamma_max` places more.
          places: true at the positions that follow a match.
        """
        (size,) = places.shape

        def step(carry, offset):
            """Takes the token that most places continue with, and keeps those."""
            places, probability, goes_on, score = carry
            token = jax.lax.dynamic_slice_in_dim(text, offset, size)
            group = jax.lax.dynamic_slice_in_dim(groups, offset, size)
            places &= token != suffix_match.NONE
            votes = jnp.zeros(size, jnp.int32).at[group].add(places.astype(jnp.int32))
            votes = jnp.where(places, votes[group], 0)
            first = jnp.argmax(votes)
            share = votes[first] / jnp.maximum(jnp.sum(places, dtype=jnp.int32), 1)
            probability *= share.astype(jnp.float32)
            # If no place votes, the share is 0 and the path ends here.
            goes_on &= (offset < budget) & (probability >= self.min_probability)
            places &= token == token[first]
            survival = jnp.where(goes_on, probability, 0.0)
            carry = places, probability, goes_on, score + survival
            return carry, (token[first], survival, goes_on)

        start = (places, jnp.float32(1), jnp.bool_(True), jnp.float32(0))
        offsets = jnp.arange(self.gamma_max, dtype=jnp.int32)
        last, (drafts, survival, is_drafted) = jax.lax.scan(step, start, offsets)
        return Lookup(
            proposal=protocols.Proposal(
                tokens=drafts,
                num_drafted=jnp.sum(is_drafted, dtype=jnp.int32),
                survival=survival,
            ),
            score=last[-1],
        )
