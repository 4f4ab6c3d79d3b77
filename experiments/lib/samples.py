"""A sample of a run: a text whose tokens are told apart by their origin."""

import unicodedata

from rich import text as rich_text

from experiments.lib import results, runs, terminal
from spec_jax import loading
from spec_jax.engine import state as states


Origin = states.Origin


def show(sample: results.PromptResult, lm: loading.LanguageModel, *, how: str) -> None:
    """Prints a heading, and the first text, with tokens told apart by their origin.

    Args:
      how: the settings that drew it, in words.
    """
    (run, *_), (plain, *_) = sample.spec, sample.plain
    heading = rich_text.Text(f"Prompt {sample.prompt.id}: {how}; ", style="bold")
    if sample.nonfinite:
        heading.append(f"{sample.nonfinite} tokens of NaN or infinity", "bold red")
    elif sample.matched is None:
        heading.append("of the distribution of autoregressive decoding")
    elif (place := runs.first_difference(run.tokens, plain.tokens)) is None:
        heading.append("equal to autoregressive decoding")
    else:
        words = f"NOT EQUAL to autoregressive decoding at token {place}"
        heading.append(words, "bold red")
    pieces = lm.tokenizer.decode_pieces([*sample.prompt.ids, *run.tokens])
    shown = len(sample.prompt.ids)
    text = _marked("".join(pieces[:shown]), Origin.PROMPT)
    for piece, origin in zip(pieces[shown:], run.origins, strict=True):
        text.append_text(_marked(piece, Origin(origin)))
    legend = [_marked(origin.name.lower(), origin) for origin in _LOOKS]
    # As `Text`, because brackets in source code are no markup; and soft-wrapped,
    # because a line of source code is one line.
    for line in (heading, rich_text.Text("  ").join(legend), text):
        terminal.console().print(line, soft_wrap=True)


_LOOKS = {
    Origin.PROMPT: ("dim", "", "\u25b6"),
    Origin.ACCEPTED: ("green", "", ""),
    Origin.CORRECTION: ("bold red", "\u27e6", "\u27e7"),
    Origin.BONUS: ("blue", "\u27ea", "\u27eb"),
}
"""Style, and marks before and after the prompt and the target's own tokens, by which
these are told apart without colours, and where they are white space. No programming
language uses these brackets."""


def _spelled(piece: str) -> str:
    """Returns a text whose control characters, which would act on the terminal, are
    spelled out, except tabs and line feeds."""
    is_control = lambda x: unicodedata.category(x) == "Cc" and x not in "\t\n"
    return "".join(f"\\x{ord(x):02x}" if is_control(x) else x for x in piece)


def _marked(piece: str, origin: Origin) -> rich_text.Text:
    style, before, after = _LOOKS[origin]
    return rich_text.Text.assemble((f"{before}{_spelled(piece)}{after}", style))
