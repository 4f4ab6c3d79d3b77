"""The tree of one round: its drafts, which of them the target would have written."""

import dataclasses
from typing import Any

import jax
import numpy as np
from rich import console as rich_console, text as rich_text, tree as rich_tree

from experiments.lib import runs
from spec_jax import compilation, loading
from spec_jax.engine import round as round_lib


Row = dict[str, Any]

MOST_ROUNDS = 32
"""Of a text, that are looked at for the one to show."""


def find(
    lm: loading.LanguageModel, settings: runs.Settings, prompt: list[int], *, name: str
) -> Row:
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
    return {"kind": "tree", "id": name, "round": best[0], **_describe(lm, best[1])}


def _kept(info: round_lib.RoundInfo) -> int:
    return int(info.outcome.num_accepted[0])


def _describe(lm: loading.LanguageModel, info: round_lib.RoundInfo) -> Row:
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


def show(row: Row, console: rich_console.Console) -> None:
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
