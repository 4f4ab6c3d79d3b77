"""What a run shows: a text, its tokens told apart by origin; the tree of a round."""

import dataclasses
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich import console as rich_console, text as rich_text, tree as rich_tree

from experiments.lib import results, runs
from spec_jax import compilation, loading
from spec_jax.engine import round as round_lib, state as states
from spec_jax.rules import sampling


Origin = states.Origin

SETTINGS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
"""How the text is drawn where the measured runs are greedy and nothing was asked for:
greedy texts of small models repeat themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One generated text."""

    prompt_id: str
    prompt_ids: list[int]
    how: str  # the settings that drew it, in words
    run: runs.Speculative  # the speculative run
    plain: runs.Plain  # autoregressive decoding under the same settings
    is_measured: bool  # whether the metrics count this run
    is_exact: bool = True  # whether the text is to be that of autoregressive decoding

    @property
    def matched(self) -> bool | None:
        """Whether the text is that of decoding alone; None where it need not be.

        One of logits that are not finite is wrong, whatever it is compared with.
        """
        if self.nonfinite or self.is_exact:
            return runs.matches(self.run, self.plain)
        return None

    @property
    def nonfinite(self) -> int:
        """The most tokens of either run of logits that are not finite."""
        return max(self.run.nonfinite, self.plain.nonfinite)


def draw(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    first: results.PromptResult,
    *,
    seed: int,
) -> Sample:
    """Draws a text for a prompt, by `SETTINGS`, once speculatively and once plainly.

    Args:
      settings: of the measured runs, which are greedy.
      first: the result whose prompt is taken.
    """
    drawn = sampling.make_settings(**SETTINGS, min_p=0.0, seed=seed)
    settings = dataclasses.replace(settings, sampling=drawn, num_slots=1)
    return Sample(
        prompt_id=first.prompt.id,
        prompt_ids=first.prompt_ids,
        how=describe(**SETTINGS, seed=seed),
        run=runs.run_speculative(lm, settings, first.prompt_ids),
        plain=runs.run_plain(lm, settings, first.prompt_ids),
        is_measured=False,
        is_exact=settings.is_exact,
    )


def of_measured(first: results.PromptResult, *, how: str) -> Sample:
    """Returns the text of a measured run; its settings in words are the caller's."""
    return Sample(
        prompt_id=first.prompt.id,
        prompt_ids=first.prompt_ids,
        how=how,
        run=first.spec[0],
        plain=first.plain[0],
        is_measured=True,
        is_exact=first.mismatches is not None,
    )


def describe(
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    seed: int,
) -> str:
    """The settings of a draw in words, those that do nothing left out."""
    if temperature == 0:
        return "greedy"
    words = [f"temperature {temperature:g}"]
    words += [f"top-p {top_p:g}"] if top_p < 1 else []
    words += [f"top-k {top_k}"] if top_k is not None else []
    words += [f"min-p {min_p:g}"] if min_p > 0 else []
    return ", ".join([*words, f"seed {seed}"])


def show(
    sample: Sample, lm: loading.LanguageModel, console: rich_console.Console
) -> None:
    """Prints a heading, and the text, its tokens told apart by where they came from."""
    heading = rich_text.Text(f"Prompt {sample.prompt_id}: {sample.how}; ", style="bold")
    if sample.nonfinite:
        heading.append(f"{sample.nonfinite} tokens of NaN or infinity", "bold red")
    elif sample.matched is None:
        heading.append("of the distribution of autoregressive decoding")
    elif sample.matched:
        heading.append("equal to autoregressive decoding")
    else:
        place = runs.first_difference(sample.run.tokens, sample.plain.tokens)
        heading.append(
            f"NOT EQUAL to autoregressive decoding at token {place}", "bold red"
        )
    if not sample.is_measured:
        heading.append(" (the numbers below are of the measured, greedy runs)")
    console.print(heading, soft_wrap=True, highlight=False)
    origins = [Origin.PROMPT] * len(sample.prompt_ids)
    pieces = lm.tokenizer.decode_pieces([*sample.prompt_ids, *sample.run.tokens])
    print_text(pieces, [*origins, *sample.run.origins], console)


def print_text(
    pieces: Sequence[str], origins: Sequence[int], console: rich_console.Console
) -> None:
    """Prints a text whose tokens are told apart by where they came from.

    By colour or, where the console shows none, by marks. Tabs are shown as spaces, and
    control characters are spelled out.

    Args:
      pieces: the text of each token.
      origins: the `Origin` of each token.
      console: where to print.
    """
    is_coloured = console.is_terminal and console.color_system and not console.no_color
    can_print = "utf" in console.encoding
    made = _coloured if is_coloured else _marked
    # `Text`, because brackets in source code are no markup; and soft-wrapped, because
    # a line of source code is one line.
    for text in made(pieces, [Origin(origin) for origin in origins], can_print):
        console.print(text, soft_wrap=True, highlight=False)


_STYLES = {
    Origin.PROMPT: "dim",
    Origin.ACCEPTED: "green",
    Origin.CORRECTION: "bold red",
    Origin.BONUS: "blue",
}


def _coloured(
    pieces: Sequence[str], origins: Sequence[Origin], can_print: bool
) -> tuple[rich_text.Text, rich_text.Text]:
    """Legend and text in colours; white space of the target's own is made visible."""
    line_end = "\u21b5" if can_print else "\\n"
    legend = rich_text.Text()
    for origin, style in _STYLES.items():
        legend.append(origin.name.lower(), style=style).append("  ")
    legend.append(f"({line_end} a line end in that colour)", style="dim")
    text = rich_text.Text()
    for piece, origin in zip(pieces, origins, strict=True):
        style, piece = _STYLES[origin], _without_controls(piece)
        if origin in (Origin.CORRECTION, Origin.BONUS):
            piece = piece.replace("\n", line_end + "\n")
            if piece.isspace():
                style += " reverse"
        text.append(piece, style=style)
    return legend, text


MARKS = ("\u25b6", "\u27e6\u27e7", "\u27ea\u27eb"), ("[|]", ("[-", "-]"), ("{+", "+}"))
"""Where the prompt ends, around a correction, and around a bonus token: white brackets
and a triangle, which no programming language uses; and in ASCII."""


def _marked(
    pieces: Sequence[str], origins: Sequence[Origin], can_print: bool
) -> tuple[rich_text.Text, rich_text.Text]:
    """Legend and text with plain marks."""
    start, correction, bonus = MARKS[0 if can_print else 1]
    around = {Origin.CORRECTION: correction, Origin.BONUS: bonus}
    legend = (
        f"prompt {start} accepted  {'correction'.join(correction)}  "
        f"{'bonus'.join(bonus)}"
    )
    text, has_started = rich_text.Text(), False
    for piece, origin in zip(pieces, origins, strict=True):
        if origin != Origin.PROMPT and not has_started:
            text.append(start)
            has_started = True
        text.append(_without_controls(piece).join(around.get(origin, ("", ""))))
    return rich_text.Text(legend), text


def _without_controls(piece: str) -> str:
    """Spells out control characters, which would act on the terminal."""
    return "".join(
        f"\\x{ord(char):02x}"
        if unicodedata.category(char) == "Cc" and char not in "\n\t"
        else char
        for char in piece
    )


MOST_ROUNDS = 32
"""Of a text, that are looked at for the one to show."""


def find_tree(
    lm: loading.LanguageModel, settings: runs.Settings, prompt: list[int], *, name: str
) -> dict[str, Any]:
    """Runs a prompt again, round by round; returns the row of the one that kept most.

    Of equal ones the first.

    Args:
      settings: of runs with trees.
      name: of the prompt.
    """
    settings = dataclasses.replace(settings, num_slots=1)
    scheduler = runs.make_scheduler(lm, settings)
    state = scheduler.begin(runs.make_request(lm, settings, prompt))
    run_round = compilation.jit(round_lib.run_round)
    best: tuple[int, round_lib.RoundInfo] | None = None
    for number in range(MOST_ROUNDS):
        if not bool(state.slots.running[0]):
            break
        state, info = run_round(scheduler.speculator, state)
        info = jax.device_get(info)
        if best is None or _kept(info) > _kept(best[1]):
            best = number, info
    if best is None:
        raise ValueError(f"prompt {name}: no round is left to draw a tree of")
    return {"kind": "tree", "id": name, "round": best[0], **_tree_of(lm, best[1])}


def _kept(info: round_lib.RoundInfo) -> int:
    return int(info.outcome.num_accepted[0])


def _tree_of(lm: loading.LanguageModel, info: round_lib.RoundInfo) -> dict[str, Any]:
    """Returns what a row says of a round."""
    count, kept = int(info.proposal.num_drafted[0]), _kept(info)
    tokens = np.asarray(info.window.tokens[0, : count + 1]).tolist()
    own = int(info.outcome.tokens[0, kept])
    piece = lambda token: lm.tokenizer.decode([token])
    return {
        "tokens": tokens,  # by column: the pending token, then the drafts
        "parents": np.asarray(info.window.parents[0, : count + 1]).tolist(),
        "kept": np.asarray(info.outcome.path[0, :kept]).tolist(),
        "own": own,
        "pieces": [piece(token) for token in tokens],
        "own_piece": piece(own),
    }


def show_tree(row: Mapping[str, Any], console: rich_console.Console) -> None:
    """Prints the tree of a row, the kept path marked and the target's own token."""
    drafts, kept = len(row["tokens"]) - 1, {0, *row["kept"]}
    last = row["kept"][-1] if row["kept"] else 0
    console.print(
        f"Round {row['round']} of prompt {row['id']}: {drafts} drafts, "
        f"{len(row['kept'])} kept (+), then the target's own token (=)",
        style="bold",
        highlight=False,
    )
    branches = {}
    for column, parent in enumerate(row["parents"]):
        label = _label(row["pieces"][column], "+" if column in kept else " ")
        if column == 0:
            branches[0] = root = rich_tree.Tree(label, guide_style="dim")
        else:
            branches[column] = branches[parent].add(label)
        if column == last:
            own = branches[column].add(_label(row["own_piece"], "="))
            # First of the children: what was kept reads from top to bottom.
            branches[column].children.remove(own)
            branches[column].children.insert(0, own)
    console.print(root)


def _label(piece: str, mark: str) -> rich_text.Text:
    """A token as Python writes it: white space and control characters are seen."""
    style = {"+": "bold green", "=": "bold blue", " ": "dim"}[mark]
    return rich_text.Text(f"{mark} {ascii(piece)[1:-1]}".strip(), style=style)
