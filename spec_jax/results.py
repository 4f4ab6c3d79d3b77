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
    """A text generated for one prompt.

    Attributes:
      tokens: the generated ones, without the prompt; a token that ended the generation
        is the last.
      pieces: the text of each token, "" for special ones that are skipped. A character
        that spans tokens belongs to the one that completes it. They end before a stop
        text. Empty without a tokenizer.
      origins: where each token came from.
      prompt_tokens: the prompt's token ids.
      status: why the generation ended.
      metrics: names and numbers, see `metrics.summarise`; `e2e_s`: seconds of all that
        the call generates (`decode`: of this sample), with compilation if it was due.
      provenance: the settings that decide bits: version, device, implementation, dtype,
        slab, rule; `round_costs`, which decide counts of rounds, if gamma was chosen by
        costs; and the `seed` that draws this one sample alone, if it was drawn.
      log_probs, drawn_log_probs: `[tokens]` float32, nats, see `scoring.Scores`; None
        without `log_probs=True` and `top_logprobs`.
      top_tokens, top_log_probs: `[tokens, k]` int32 and float32, likewise; None without
        `top_logprobs=k`.
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
        """Returns the text as HTML for notebooks, with accepted drafts, corrections and
        bonus tokens in different colours."""
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
      text: whole characters; one that spans tokens is in the piece that completes it;
        text that may begin a stop text is in the piece that shows that it does not.
      tokens: token ids.
      origin: where they came from.
    """

    text: str
    tokens: list[int]
    origin: Origin
