"""How much may the default policy of gamma lose, whatever a drafter costs and is worth?

Simulates it without any model: texts whose drafts are kept by chance, of one acceptance
or of two, first and second half, and rounds of stated costs, in steps of plain
decoding. Each text begins with nothing known. Prints the time beside plain decoding's,
of the worst text too, and beside that of the best constant gamma in hindsight. Exit
status: 0 within --bound, 2 a text is slower, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import flags, records, tables, terminal
from spec_jax import default_gamma
from spec_jax.gamma import costs as costs_lib, policy as policy_lib, simulation


WITHIN, SLOWER = 0, 2

ACCEPTANCE = ("0", "0.1", "0.3", "0.6", "0.9", "0.9-0", "0-0.9")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unusable ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    group = parser.add_argument_group("texts")
    cli.add(
        group,
        f"""
        --acceptance A,...={",".join(ACCEPTANCE)}  chance that a draft is kept, given
            those before it were; A-B is A up to the middle of the text, and then B
        --texts N=32  of each kind
        --gen-tokens TOKENS=256  of each text
        --seed I=0  of all draws
        """,
        **{"A,...": cli.names(acceptance)},
    )
    group = parser.add_argument_group("rounds")
    cli.add(
        group,
        """
        --draft-cost C,...=0,0.05,0.2,0.6  steps of plain decoding that a draft takes
        --row-cost C=0.03  steps that a further row of a window takes
        --gamma TOKENS=7  tokens drafted per round, at most
        --bound SHARE=0.02  of the time of plain decoding, by which a text may be slower
        """,
        **{"C,...": costs, "C": share, "SHARE": share},
    )
    flags.add_out(parser, rows="one per acceptance and cost")
    return parser.parse_args(argv)


def share(text: str) -> float:
    """The type of a number that is not negative."""
    value = float(text)
    if not 0 <= value < np.inf:
        raise ValueError(f"{text} must be finite and not negative")
    return value


def costs(text: str) -> tuple[float, ...]:
    """The type of a list of such numbers."""
    return tuple(share(part) for part in text.split(","))


def acceptance(text: str) -> str:
    """The type of chances, one or two."""
    chances = [share(part) for part in text.split("-")]
    if len(chances) > 2 or max(chances) > 1:
        raise ValueError(f"{text} is no chance, nor two")
    return text


def draw(args: argparse.Namespace, name: str) -> jax.Array:
    """Returns whether each draft would be kept, `[texts, tokens, gamma] bool`."""
    size = args.texts, args.gen_tokens, args.gamma
    first, *second = (float(part) for part in name.split("-"))
    is_first = np.arange(args.gen_tokens) < args.gen_tokens / 2
    chance = np.where(is_first, first, second[0] if second else first)
    luck = np.random.default_rng(args.seed).random(size)
    return jnp.asarray(luck < chance[:, None])


def rounds_of(policy, states, texts: jax.Array, *, by_state: bool) -> np.ndarray:
    """Returns rounds by gamma, `[texts, gamma + 1]`; of each state if it has many."""

    def one(state, text):
        begun, most = simulation.begin(policy, state), jnp.int32(text.shape[0])
        return simulation.simulate(policy, begun, text, max_rounds=most).rounds_at

    simulate = jax.vmap(one, in_axes=(None, 0))
    if by_state:
        simulate = jax.vmap(simulate, in_axes=(0, None))
    return np.asarray(simulate(states, texts), np.float64)


def row(args: argparse.Namespace, name: str, draft_cost: float) -> dict[str, Any]:
    """Returns what one drafter does to texts of one acceptance."""
    texts = draw(args, name)
    round_s = 1 + (draft_cost + args.row_cost) * np.arange(args.gamma + 1)
    made, first = default_gamma.make(costs_lib.RoundCosts(round_s=(*round_s.tolist(),)))
    seconds = rounds_of(made, first, texts, by_state=False) @ round_s
    fixed = policy_lib.Fixed(gamma_max=args.gamma)
    gammas = jnp.arange(args.gamma + 1, dtype=jnp.int32)
    fixed_s = (rounds_of(fixed, gammas, texts, by_state=True) @ round_s).sum(1)
    found = simulation.Regret(seconds=seconds.sum(), fixed_s=tuple(fixed_s.tolist()))
    return {
        "kind": "drawn_regret",
        "acceptance": name,
        "draft_cost": draft_cost,
        "loss": found.overhead,
        "worst_loss": float(seconds.max() / args.gen_tokens - 1),
        "regret": found.regret,
        "best_gamma": found.best_gamma,
    }


NOTE = (
    "percent of the time of plain decoding, below 0 is faster, of all texts (of the "
    "worst); of that of the best constant gamma"
)


def run(args: argparse.Namespace) -> int:
    """Simulates and shows everything; returns the exit status."""
    console, found = terminal.console(), []
    names = ("texts", "gen_tokens", "seed", "row_cost", "gamma", "bound")
    with records.open_out(args) as out:
        out.common = {name: getattr(args, name) for name in names}
        out.common |= records.provenance()
        for name in args.acceptance:
            for draft_cost in args.draft_cost:
                found.append(row(args, name, draft_cost))
                out.write(found[-1])
    lines = [
        {"acceptance": name}
        | {f"draft {row['draft_cost']:g}": cell(row) for row in found if
           row["acceptance"] == name}
        for name in args.acceptance
    ]  # fmt: skip
    tables.print_rows(lines, dict.fromkeys(lines[0], "s"), console)
    tables.print_note(NOTE, console)
    return WITHIN if all(row["worst_loss"] <= args.bound for row in found) else SLOWER


def cell(row: dict[str, Any]) -> str:
    """The numbers of a row, in percent."""
    shares = (row["loss"], row["worst_loss"], row["regret"])
    return "{:+.1f} ({:+.1f}); {:+.1f}".format(*(100 * share for share in shares))


main = cli.script("regret_drawn.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
