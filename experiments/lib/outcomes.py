"""Acceptance outcomes of every draft along a text: what any policy of gamma meets.

Plain decoding writes the text. After each of its tokens the drafter is asked for
`gamma_max` drafts, and each is compared with what the text goes on with: which drafts
are kept does not depend on who asks. Greedy, so that the text alone decides.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.lib import prompt_files, runs
from spec_jax import loading
from spec_jax.analysis import trace
from spec_jax.engine import protocols, rows as rows_lib


SETS = ("easy", "hard", "mixed", "adversarial")
"""The sets of texts that `make_sets` makes, in the order in which they are shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt, its autoregressive continuation, and the outcomes of drafts."""

    prompt: prompt_files.Prompt
    prompt_ids: list[int]
    tokens: list[int]  # generated
    # `[len(tokens), gamma_max]` bool, as `gamma.simulation` takes it: whether draft `i`
    # of a round is kept where it stands at a token, if those before were
    is_kept: np.ndarray
    # Whether drafts are made wrong, whatever the drafter says
    is_adversarial: bool = False

    @property
    def num_kept(self) -> float:
        """Drafts that a window of `gamma_max` keeps, over windows at every token."""
        return mean_kept(self.is_kept)


def record(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    prompt: prompt_files.Prompt,
    prompt_ids: list[int],
) -> Text:
    """Decodes the prompt, and asks the drafter after every token; raises as `write`."""
    generated = runs.write(lm, settings, prompt_ids)
    text = [*prompt_ids, *generated]
    scheduler = runs.make_scheduler(lm, settings)
    state = scheduler.begin(runs.make_request(lm, settings, prompt_ids))
    tokens = np.zeros(state.slots.tokens.shape[1:], np.int32)
    tokens[: len(text)] = text
    drafts, num_drafted = _ask_at_each(
        scheduler.drafter,
        lm.drafter_params,
        state.memory,
        jnp.asarray(tokens),
        _features(lm, settings, text, num_prompt=len(prompt_ids)),
        start=jnp.int32(len(prompt_ids)),
        stop=jnp.int32(len(text)),
    )
    asked = slice(len(prompt_ids), len(text))
    return Text(
        prompt=prompt,
        prompt_ids=prompt_ids,
        tokens=generated,
        is_kept=outcomes(
            np.asarray(drafts)[asked], np.asarray(num_drafted)[asked], generated
        ),
    )


def _features(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    text: list[int],
    *,
    num_prompt: int,
) -> np.ndarray | None:
    """Returns the text's features `[capacity, taps, D]`; None where none are read."""
    taps = protocols.taps_of(lm.drafter)
    if not taps:
        return None
    found = trace.record_features(
        rows_lib.SlotRows(model=lm.target, num_slots=1),
        lm.params,
        text,
        num_prompt=num_prompt,
        taps=taps,
        capacity=settings.capacity,
    )
    # Of one size, so that texts share an executable.
    return np.pad(found, ((0, settings.capacity - len(found)), (0, 0), (0, 0)))


def outcomes(
    drafts: Int[np.ndarray, "num_tokens gamma_max"],
    num_drafted: Int[np.ndarray, " num_tokens"],
    generated: Sequence[int],
) -> np.ndarray:
    """Whether draft `i` is kept at each token, `[num_tokens, gamma_max] bool`.

    Args:
      drafts: row `n` was drafted to follow the first `n` generated tokens.
      num_drafted: how many of each row are real.
    """
    # Draft `i` behind `n` tokens stands where token `n + i` does.
    num_tokens, gamma_max = drafts.shape
    i = np.arange(gamma_max)
    asked = np.arange(num_tokens)[:, None] - i
    is_real = (asked >= 0) & (num_drafted[asked] > i)
    return is_real & (drafts[asked, i] == np.asarray(generated, np.int32)[:, None])


def mean_kept(is_kept: Bool[np.ndarray, "num_tokens gamma_max"]) -> float:
    """Drafts that a window keeps on average, over windows that begin at every token."""
    num_tokens, gamma_max = is_kept.shape
    i = np.arange(gamma_max)
    at = np.arange(num_tokens)[:, None] + i
    windows = (at < num_tokens) & is_kept[np.minimum(at, num_tokens - 1), i]
    return int(np.logical_and.accumulate(windows, axis=1).sum()) / num_tokens


def make_sets(texts: Sequence[Text]) -> dict[str, list[Text]]:
    """Texts on which policies are compared, by the names in `SETS`.

    Easy and hard are the third of the prompts with the most and with the fewest drafts
    kept; mixed is both in turn; adversarial is mixed with every draft wrong.

    Raises:
      ValueError: fewer than two texts.
    """
    if len(texts) < 2:
        raise ValueError(
            f"{len(texts)} prompts: easy and hard ones cannot be told apart; give two "
            "or more"
        )
    by_kept = sorted(texts, key=lambda text: text.num_kept)
    third = max(1, len(texts) // 3)
    hard, easy = by_kept[:third], by_kept[::-1][:third]
    mixed = [text for pair in zip(easy, hard, strict=True) for text in pair]
    adversarial = [
        dataclasses.replace(
            text, is_kept=np.zeros_like(text.is_kept), is_adversarial=True
        )
        for text in mixed
    ]
    return dict(zip(SETS, (easy, hard, mixed, adversarial), strict=True))


@functools.partial(jax.jit, static_argnames=("drafter",))
def _ask_at_each(
    drafter: protocols.SlotDrafter,
    params: protocols.Params,
    memory: protocols.Memory,
    tokens: Int[Array, " max_len"],
    features: Float[Array, "T taps D"] | None,
    *,
    start: Int[Array, ""],
    stop: Int[Array, ""],
) -> tuple[Int[Array, "max_len gamma_max"], Int[Array, " max_len"]]:
    """What is drafted behind `tokens[:n]`, for each `n` in `start .. stop - 1`."""
    (max_len,) = tokens.shape
    drafts = jnp.zeros((max_len, drafter.gamma_max), jnp.int32)

    def ask(length, carry):
        """One proposal; then a token of the text is committed."""
        memory, drafts, num_drafted = carry
        # No more than the cache has positions for.
        gamma = jnp.minimum(drafter.gamma_max, max_len - 1 - length)
        memory, proposal = drafter.propose(
            params,
            memory,
            tokens=tokens[None],
            length=length[None],
            gamma=gamma[None],
            sampling=None,
        )
        handed = {}
        if features is not None:
            shape = 1, 1 + protocols.depth_max(drafter), *features.shape[1:]
            row = features[length - 1]
            handed["features"] = jnp.zeros(shape, row.dtype).at[0, 0].set(row)
        memory = drafter.commit(
            params, memory, length[None] + 1, asked=jnp.ones((1,), bool), **handed
        )
        drafts = drafts.at[length].set(proposal.tokens[0])
        return memory, drafts, num_drafted.at[length].set(proposal.num_drafted[0])

    _, drafts, num_drafted = jax.lax.fori_loop(
        start, stop, ask, (memory, drafts, jnp.zeros((max_len,), jnp.int32))
    )
    return drafts, num_drafted
