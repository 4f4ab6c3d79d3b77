"""What a run shows: a text, its tokens told apart by origin; the tree of a round."""

import dataclasses
from collections.abc import Mapping
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


def draw(
    lm: loading.LanguageModel,
    settings: runs.Settings,
    first: results.PromptResult,
    *,
    seed: int,
) -> results.PromptResult:
    """Draws a text for a prompt, by `SETTINGS`, once speculatively and once plainly.

    Args:
      settings: of the measured runs, which are greedy.
      first: the result whose prompt is taken.
    """
    drawn = sampling.make_settings(**SETTINGS, min_p=0.0, seed=seed)
    settings = dataclasses.replace(settings, sampling=drawn, num_slots=1)
    return dataclasses.replace(
        first,
        spec=[runs.run_speculative(lm, settings, first.prompt_ids)],
        plain=[runs.run_plain(lm, settings, first.prompt_ids)],
        mismatches=0 if settings.is_exact else None,
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
    sample: results.PromptResult,
    lm: loading.LanguageModel,
    console: rich_console.Console,
    *,
    how: str,
) -> None:
    """Prints a heading, and the first text, its tokens told apart by their origin.

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
    pieces = lm.tokenizer.decode_pieces([*sample.prompt_ids, *run.tokens])
    shown = len(sample.prompt_ids)
    text = _marked("".join(pieces[:shown]), Origin.PROMPT)
    for piece, origin in zip(pieces[shown:], run.origins, strict=True):
        text.append_text(_marked(piece, Origin(origin)))
    legend = [_marked(origin.name.lower(), origin) for origin in _LOOKS]
    # `Text`, because brackets in source code are no markup; and soft-wrapped, because
    # a line of source code is one line.
    for line in (heading, rich_text.Text("  ").join(legend), text):
        console.print(line, soft_wrap=True, highlight=False)


_LOOKS = {
    Origin.PROMPT: ("dim", "", "\u25b6"),
    Origin.ACCEPTED: ("green", "", ""),
    Origin.CORRECTION: ("bold red", "\u27e6", "\u27e7"),
    Origin.BONUS: ("blue", "\u27ea", "\u27eb"),
}
"""Style, and what stands around the prompt and the target's own tokens: these are told
apart without colours too, and where they are white space. No programming language uses
these brackets."""

_CONTROLS = {
    code: f"\\x{code:02x}"
    for code in (*range(32), *range(127, 160))
    if code not in (9, 10)
}
"""Control characters, which would act on the terminal, spelled out; not those of white
space."""


def _marked(piece: str, origin: Origin) -> rich_text.Text:
    style, before, after = _LOOKS[origin]
    return rich_text.Text.assemble(
        (f"{before}{piece.translate(_CONTROLS)}{after}", style)
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
    found: list[round_lib.RoundInfo] = []
    while len(found) < MOST_ROUNDS and bool(state.slots.running[0]):
        state, info = run_round(scheduler.speculator, state)
        found.append(jax.device_get(info))
    if not found:
        raise ValueError(f"prompt {name}: no round is left to draw a tree of")
    kept = [int(info.outcome.num_accepted[0]) for info in found]
    best = int(np.argmax(kept))
    return {
        **{"kind": "tree", "id": name, "round": best},
        **_tree_of(lm, found[best], kept[best]),
    }


def _tree_of(
    lm: loading.LanguageModel, info: round_lib.RoundInfo, kept: int
) -> dict[str, Any]:
    """Returns what a row says of a round."""
    count = int(info.proposal.num_drafted[0])
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
    path = [0, *row["kept"]]
    console.print(
        f"Round {row['round']} of prompt {row['id']}: {len(row['tokens']) - 1} drafts, "
        f"{len(row['kept'])} kept (+), then the target's own token (=)",
        style="bold",
        highlight=False,
    )
    nodes: list[rich_tree.Tree] = []
    for column, parent in enumerate(row["parents"]):
        mark, style = ("+", "bold green") if column in path else (" ", "dim")
        label = _label(row["pieces"][column], mark, style)
        nodes.append(nodes[parent].add(label) if nodes else rich_tree.Tree(label))
    # First of the children: what was kept reads from top to bottom.
    own = rich_tree.Tree(_label(row["own_piece"], "=", "bold blue"))
    nodes[path[-1]].children.insert(0, own)
    console.print(nodes[0])


def _label(piece: str, mark: str, style: str) -> rich_text.Text:
    """A token as Python writes it: white space and control characters are seen."""
    return rich_text.Text(f"{mark} {ascii(piece)[1:-1]}".strip(), style=style)
