"""Rows of results for the published tables, and the words of cells on a row."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.lib import curves, files, reproduction, terminal
from spec_jax.debug import evidence
from spec_jax.drafters import tree_shapes


ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"

Row = Mapping[str, Any]


class Cells(dict):
    """A row for `str.format_map`, which has `WORDS` besides its numbers."""

    def __missing__(self, name: str) -> str:
        return WORDS[name](self)


def rows_of(pattern: str, kind: str) -> list[Row]:
    """Returns the rows of a kind in the files of results of a pattern, in order."""
    return [
        row
        for path in sorted(RESULTS.glob(pattern))
        for row in files.read_rows(path)
        if row.get("kind") == kind
    ]


def rows_of_table(name: str, source: str) -> list[Cells]:
    """Returns the rows of a table, from the sources that `tables.md` names for it."""
    if name in MADE:
        return [*map(Cells, MADE[name]())]
    patterns, kind = source.split(": ")
    found = [row for pattern in patterns.split() for row in rows_of(pattern, kind)]
    return [Cells(row) for row in found if SHOWN.get(name, bool)(row)]


def is_equal(row: Row) -> bool:
    """Returns whether all that a cell of `constrained.py --table` compares is equal."""
    equal = {row[what] for what in evidence.WHATS}
    return not row["nonfinite"] and equal == {row["prompts"]}


def _drafted(row: Row) -> str:
    """Returns the flag of what is drafted: a tree, or gamma."""
    if row.get("tree"):
        return f"--tree {tree_shapes.parse(row['tree'])}"
    return f"--gamma {row['gamma']}"


def _drawn(row: Row) -> str:
    """Returns the flags by which tokens are drawn, and drafts accepted."""
    flags = f" --temperature {row['temperature']:g}" if row["temperature"] else ""
    return flags if row["rule"] == "coupled" else f"{flags} --rule {row['rule']}"


def _flags(row: Row) -> str:
    """Returns the flags of `spec_round.py` that made a row, without its defaults."""
    flags = f"--drafter {pathlib.PurePath(row['drafter']).name} "
    if row["draft"] not in (None, "embedded"):
        flags += f"--draft {pathlib.PurePath(row['draft']).name} "
    flags += _drafted(row) + _drawn(row)
    if row["gamma_policy"] not in (None, "fixed"):
        flags += f" --gamma-policy {row['gamma_policy']}"
    if row["batch"]:
        flags += f" --batch {row['batch']}"
    if "draft_weights" in row:
        flags += f" --draft-weights {row['draft_weights']}"
    if row["prompt_source"] != "50":
        flags += f" --prompts {row['prompt_source']}"
    return flags


def _kept(row: Row, places: Sequence[int]) -> str:
    """Returns the shares of these drafts that are kept, in rounds that kept all before
    them; a dash where none was drafted."""
    kept = row["conditional_acceptance"]
    shares = [kept[place - 1] if place <= len(kept) else None for place in places]
    return ", ".join(terminal.format_value(share, ".2f") for share in shares)


def _way_to_decode(row: Row) -> str:
    return f"{row['method']}, K = {row['gamma']}" if row["gamma"] else row["method"]


def _beside_theirs(row: Row) -> str:
    """Returns our speed as a multiple of Hugging Face's, or theirs in brackets."""
    if row["side"] == "spec_jax":
        return f"{row['vs_hf']:.1f}x"
    note = "theirs: " if row["length"] == "short" else ""
    return f"({note}{row['vs_hf']:.2f}x)"


DECODED = {
    (0, "ngram"): "plain",
    (0, "draft-model"): "plain, with a draft model that takes in the prompts",
    (4, "ngram"): "prompt lookup, gamma 4",
    (4, "draft-model"): "draft model, gamma 4",
}
"""Gamma and drafter of the lines of `batches`, in their order."""

WORDS: Mapping[str, Callable[[Row], str]] = {
    "kernels": lambda row: (
        "with `--impl xla --repeats 2`"
        if row["impl"] == "xla"
        else "native kernels, the default"
    ),
    "terciles": lambda row: ", ".join(
        f"{rate:.2f}" for rate in row["tercile_acceptance_rate"]
    ),
    # Rows of earlier versions lack it.
    "repeated": lambda row: terminal.format_value(row.get("repetition"), ".0%"),
    # None: a rule that keeps the distribution has texts of its own.
    "is_matched": lambda row: {None: "-", True: "yes", False: "no"}[row["matched"]],
    "drafted": _drafted,
    "drawn": _drawn,
    "flags": _flags,
    "kept_of_four": lambda row: "" if row.get("tree") else _kept(row, (1, 2, 3, 4)),
    "kept_of_seven": lambda row: _kept(row, (1, 2, 4, 7)),
    "data_set": lambda row: row["prompt_source"].split("/")[0],
    "policy": lambda row: (
        f"always {row['gamma']}"
        if row["gamma_policy"] == "fixed"
        else f"`--gamma-policy {row['gamma_policy']}`"
    ),
    "length_of_prompts": lambda row: (
        f"{row['prompt_tokens'][0]}{' prompt tokens' * (row['length'] == 'short')}"
    ),
    "way_to_decode": _way_to_decode,
    "beside_theirs": _beside_theirs,
    "positions": lambda row: "" if row["context"] is None else f"{row['context']:,}",
    "first_difference": curves.first_of,
    "all_equal": lambda row: "all" if is_equal(row) else "not all",
    "budget": lambda row: (
        f"tree of {row['gamma']}" if row.get("tree") else f"chain of {row['gamma']}"
    ),
    "round_here_ms": lambda row: (
        f"{row['spec_decode_tpot_ms'] * row['mean_accepted_length']:.1f}"
    ),
    "decoded": lambda row: DECODED[row["gamma"], row["drafter"]],
    "drafted_so": lambda row: row["way"].split(",")[0],
    "adversarial_flag": lambda row: ", `--adversarial`" * bool(row["adversarial"]),
}
"""Functions for the words of cells and headings on a row, besides its numbers."""


def _is_beside_hugging_face(row: Row) -> bool:
    return row["gamma"] == 5 or (row["side"], row["gamma"]) == ("spec_jax", None)


def _is_step(row: Row) -> bool:
    return row["step"] not in ("new cache", "1 active row", "read of 256 MiB")


SHOWN: Mapping[str, Callable[[Row], bool]] = {
    **dict.fromkeys(("hugging_face", "hugging_face_real"), _is_beside_hugging_face),
    **dict.fromkeys(("preset_steps", "gpu_steps", "gpu_sampling"), _is_step),
    "schedule": lambda row: bool(row["batch"]),
}
"""Conditions on the rows of its kind that a table has, if not all."""


def _certificates() -> list[Row]:
    """Returns exactness certificates: how each was made, and whether all was equal."""
    found = []
    for step in reproduction.certificates():
        row = json.loads(files.read(step.path))
        row["command"] = step.runs[0].replace("exactness", "exactness.py", 1)
        row |= {"file": step.path.name, "num_cells": len(row["cells"])}
        found.append(row | {"all_exact": "all" if row["exact"] else "not all"})
    return found


def _batches() -> list[Row]:
    """Returns rows of batches, in the order of `DECODED`."""
    rows = rows_of("throughput.jsonl", "throughput")
    return [
        row
        for place in DECODED
        for row in rows
        if row["batch"] and (row["gamma"], row["drafter"]) == place
    ]


def _gpu_heads() -> list[Row]:
    """Returns rounds of the shape of Qwen3-8B with heads at their published acceptance,
    and the time of a proposal, also as a multiple of a read of its bytes."""
    pattern, found = "gpu/h-*.jsonl", []
    passes = {
        row["draft"]: row for row in rows_of(pattern, "step") if "pass_bytes" in row
    }
    reads = {row["draft"]: row["read_gb_s"] for row in rows_of(pattern, "summary")}
    for row in rows_of(pattern, "rounds"):
        proposal = passes[row["draft"]]
        pass_ms = proposal["ms"] * proposal["drafts"]
        read_ms = proposal["pass_bytes"] / reads[row["draft"]] / 1e6
        found.append(row | {"pass_ms": pass_ms, "times_its_read": pass_ms / read_ms})
    return found


def _gpu_rows() -> list[Row]:
    """Returns how many values of kernels and rounds were compared, and differed."""
    found, total = [], lambda rows, key: sum(row[key] for row in rows)
    for name in ("0.6b", "8b"):
        file = f"gpu/a-rows-of-kernels-{name}.jsonl"
        rows, (control,) = rows_of(file, "bitwise"), rows_of(file, "control")
        kernels = ", ".join(dict.fromkeys(row["check"].split(":")[0] for row in rows))
        found.append(
            {
                "compared": f"kernels of qwen3-{name}: {kernels}",
                "cases": total(rows, "cases"),
                "elements": f"{total(rows, 'elements'):,}",
                "differing": total(rows, "differing"),
                "control": "seen" if control["seen"] else "NOT SEEN",
            }
        )
    for name, whose in (("", "pair"), ("-dspark", "pair with DSpark")):
        rows = rows_of(f"gpu/a-exactness{name}.jsonl", "prompt")
        cells = f"{len({row['cell'] for row in rows})} cells of `exactness.py`"
        found.append(
            {
                "compared": f"rounds of the embedded {whose}, {cells}",
                "cases": len(rows),
                "elements": f"{total(rows, 'tokens'):,} tokens, with logits and K/V",
                "differing": sum(len(row["differences"]) for row in rows),
                "control": "",
            }
        )
    return found


def _gpu_traces() -> list[Row]:
    """Returns own times of a plain step's kernels: from the end of the one before."""
    found = []
    for name in ("0.6b", "8b"):
        rows = rows_of(f"gpu/t-trace-{name}.jsonl", "trace")
        (steps,) = (row["calls"] for row in rows if row["event"] == "append_each")
        found += [
            row
            | {"launches": row["calls"] / steps, "us_a_step": row["own_us"] / steps}
            | {"us_each": row["own_us"] / row["calls"]}
            for row in rows
            if row["event"].startswith(("paged_", "skinny_", "rms_", "memcpy32"))
        ]
    return found


MEASURED_AS = {"peagle": "eagle3", "jetspec": "dflash", "dflash2": "dflash"}
"""Heads that were not run on a GPU, and the head with the same layers."""


def _ablation() -> list[Row]:
    """Returns heads of `compare_heads.py` with their results in chains on all prompts,
    and the speed-up that such rounds would bring an H100 with Qwen3-8B.

    There a head's round is one measured with a head of its family, less the passes that
    it does not make: EAGLE-3 makes one for each draft, the others one for all.
    """
    found, chains = [], {row["head"]: row for row in _swept() if not row.get("tree")}
    for head in rows_of("ablation.jsonl", "head"):
        row = head | chains[head["head"]]
        name, *_ = row["head"].split("-")
        file = f"gpu/h-{MEASURED_AS.get(name, name)}.jsonl"
        (step,) = (x for x in rows_of(file, "step") if x["step"] == "draft step")
        measured = rows_of(file, "rounds")[0]
        round_ms = measured["round_ms"]
        if name in ("eagle3", "peagle"):
            passes = row["gamma"] if name == "eagle3" else 1
            round_ms -= (step["drafts"] - passes) * step["ms"]
        speedup = row["mean_accepted_length"] * measured["plain_ms"] / round_ms
        found.append(row | {"on_h100": speedup})
    return found


def _swept(*, contexts: bool = False) -> list[Row]:
    """Returns rows of chains and trees of `compare_heads.py`, or of its contexts."""
    rows = rows_of("ablation.jsonl", "sweep")
    return [row for row in rows if (row["category"] != "all") == contexts]


MADE: Mapping[str, Callable[[], list[Row]]] = {
    "ablation": _ablation,
    "ablation_contexts": functools.partial(_swept, contexts=True),
    "ablation_trees": _swept,
    "certificates": _certificates,
    "batches": _batches,
    "gpu_heads": _gpu_heads,
    "gpu_rows": _gpu_rows,
    "gpu_traces": _gpu_traces,
}
"""Functions that make the rows of tables that no file holds as they are."""
