"""Results of a generation: tokens with their text, origins, metrics, provenance."""

import dataclasses
import html
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.analysis import metrics as metrics_lib
from spec_jax.engine import state as states


Origin = states.Origin
Status = states.Status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The generation for one prompt.

    Attributes:
      tokens: generated, without the prompt; the last is the one that ended them, if
        any did.
      pieces: the text of each token, "" for a special one unless it was asked for: a
        character that spans tokens belongs to the one that completes it. They end
        before a stop text. Empty without a tokenizer.
      origins: where each of them came from.
      prompt_tokens: the prompt's token ids.
      status: why the generation ended.
      metrics: names and numbers, see `metrics.summarise`; `e2e_s` is the seconds that
        the whole call took, compilation included where it was the first of its kind.
      provenance: what decides bits: versions, device, implementation, dtype, slab; and,
        where gamma was chosen by them, `round_costs`, which decide counts of rounds;
        and of a drawn text the `seed` that draws this one sample alone.
      log_probs, drawn_log_probs: `[tokens]` float32, nats, as `scoring.Scores` has
        them; None unless `log_probs=True` was asked for.
      top_tokens, top_log_probs: `[tokens, k]` int32 and float32, likewise; None unless
        `top_logprobs=k` was asked for, which gives the others, too.
    """

    tokens: list[int]
    pieces: list[str]
    origins: list[Origin]
    prompt_tokens: list[int]
    status: Status
    metrics: metrics_lib.Metrics
    provenance: Mapping[str, Any]
    log_probs: np.ndarray | None = dataclasses.field(default=None, compare=False)
    drawn_log_probs: np.ndarray | None = dataclasses.field(default=None, compare=False)
    top_tokens: np.ndarray | None = dataclasses.field(default=None, compare=False)
    top_log_probs: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def text(self) -> str:
        """The text of `tokens`, up to a stop text; "" without a tokenizer."""
        return "".join(self.pieces)

    def _repr_html_(self) -> str:
        """Returns the text with accepted drafts, corrections and bonus tokens told
        apart by colour, as notebooks show it."""
        spans = [
            f'<span style="background:{_COLOURS[origin]}">{html.escape(piece)}</span>'
            for piece, origin in zip(self.pieces, self.origins, strict=False)
        ]
        legend = " ".join(
            f'<span style="background:{colour}">{origin.name.lower()}</span>'
            for origin, colour in _COLOURS.items()
        )
        return f"<pre>{''.join(spans)}</pre><small>{legend}</small>"


_COLOURS = {
    Origin.ACCEPTED: "#b7e4c7",
    Origin.CORRECTION: "#ffd6a5",
    Origin.BONUS: "#bde0fe",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of tokens of one origin that a round committed.

    Attributes:
      text: whole characters; one that spans tokens is in the piece that completes it,
        and what may begin a stop text in the one that shows that it does not.
      tokens: token ids.
      origin: where they came from.
    """

    text: str
    tokens: list[int]
    origin: Origin
