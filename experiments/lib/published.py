"""Tables of README and docs, generated from the rows of `experiments/results`.

A page has a table between `<!-- rows: NAME -->` and `<!-- end of rows -->`, which is
replaced by the table that its template in `experiments/tables.md` makes of the rows.
"""

import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from experiments.lib import files, microscope, reproduction, terminal
from spec_jax.debug import evidence
from spec_jax.drafters import tree_shapes


ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]

TEMPLATES = {
    name: (source, heading, cells)
    for name, source, heading, cells in re.findall(
        r"^## (\w+)\n\n(?:(.+)\n\n)?(\|.*)\n\|[ |-]*\n(\|.*)$",
        (ROOT / "experiments" / "tables.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}
"""Source of the rows, heading and line of a row of each table, by its name."""

_SOURCE = re.compile(r"(.+): (\w+)(?: if (.+?))?(?: by (.+))?")
_PLACE = re.compile(
    r"(<!-- rows: (?P<name>\w+) -->\n\n).*?(<!-- end of rows -->)", re.DOTALL
)

Row = Mapping[str, Any]


def rows_of(patterns: str, kind: str) -> list[Row]:
    """Returns the rows of a kind in the files of results of some patterns, in order."""
    return [
        row
        for pattern in patterns.split()
        for path in sorted(RESULTS.glob(pattern))
        for row in files.read_rows(path)
        if row.get("kind") == kind
    ]


def _evaluated(expression: str, row: Row) -> Any:
    """Returns the value of an expression of `tables.md` on a row."""
    return eval(expression, {**globals(), **row, "row": row})


def _rows_of_table(name: str, source: str) -> list[Row]:
    """Returns the rows of a table, from the sources that `tables.md` names for it."""
    if name in MADE:
        return MADE[name]()
    patterns, kind, condition, key = _SOURCE.fullmatch(source).groups()
    rows = rows_of(patterns, kind)
    rows = [row for row in rows if _evaluated(condition or "True", row)]
    return sorted(rows, key=lambda row: _evaluated(key or "0", row))


def table(name: str) -> str:
    """Returns the table of that name, Markdown; raises `ValueError` without rows."""
    source, *template = TEMPLATES[name]
    headings, cells = (line.strip("| ").split(" | ") for line in template)
    is_pivot = any("{" in heading for heading in headings)
    # Texts of rows by line and heading; under a fixed heading equal ones count once.
    found: dict[str | int, dict[str, list[str]]] = {}
    columns: list[dict[str, None]] = [{} for _ in headings]
    for number, row in enumerate(_rows_of_table(name, source)):
        filled = lambda text, row=row: _evaluated(f'f"""{text}"""', row)
        texts = [*map(filled, cells)]
        of_line = found.setdefault(texts[0] if is_pivot else number, {})
        for column, heading, text in zip(columns, headings, texts, strict=True):
            named = filled(heading)
            column[named] = None
            said = of_line.setdefault(named, [])
            if named != heading or text not in said:
                said.append(text)
    if not found:
        raise ValueError(f"there are no rows for the table {name}: {source}")
    names = [name for column in columns for name in column]
    lines = [[" ".join(of.get(name, ())) for name in names] for of in found.values()]
    rows = [
        f"| {' | '.join(line)} |\n" for line in (names, ["---"] * len(names), *lines)
    ]
    return "".join(rows).replace("|  |", "| |")


def update(text: str) -> str:
    """Returns the page, with its tables made anew from the rows."""
    return _PLACE.sub(lambda m: f"{m[1]}{table(m['name'])}\n{m[3]}", text)


def update_pages() -> list[pathlib.Path]:
    """Writes the tables of all pages; returns the pages that changed."""
    changed = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        new = update(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed


def is_equal(row: Row) -> bool:
    """Returns whether all that a cell of `constrained.py --table` compares is equal."""
    equal = {row[what] for what in evidence.WHATS}
    return not row["nonfinite"] and equal == {row["prompts"]}


def drafted(row: Row) -> str:
    """Returns the flag of what is drafted: a tree, or gamma."""
    if row.get("tree"):
        return f"--tree {tree_shapes.parse(row['tree'])}"
    return f"--gamma {row['gamma']}"


def drawn(row: Row) -> str:
    """Returns the flags by which tokens are drawn, and drafts accepted."""
    found = f" --temperature {row['temperature']:g}" if row["temperature"] else ""
    return found if row["rule"] == "coupled" else f"{found} --rule {row['rule']}"


def flags(row: Row) -> str:
    """Returns the flags of `spec_round.py` that made a row, without its defaults."""
    found = f"--drafter {pathlib.PurePath(row['drafter']).name} "
    if row["draft"] not in (None, "embedded"):
        found += f"--draft {pathlib.PurePath(row['draft']).name} "
    found += drafted(row) + drawn(row)
    if row["gamma_policy"] not in (None, "fixed"):
        found += f" --gamma-policy {row['gamma_policy']}"
    if row["batch"]:
        found += f" --batch {row['batch']}"
    if "draft_weights" in row:
        found += f" --draft-weights {row['draft_weights']}"
    if row["prompt_source"] != "50":
        found += f" --prompts {row['prompt_source']}"
    return found


def kept(row: Row, *places: int) -> str:
    """Returns the shares of these drafts of a chain that are kept, in rounds that kept
    all before them; a dash where none was drafted."""
    rates = row["conditional_acceptance"]
    shares = [rates[place - 1] if place <= len(rates) else None for place in places]
    listed = ", ".join(shown(share, ".2f") for share in shares)
    return "" if row.get("tree") else listed


def steps(target: str) -> int:
    """Returns how many plain steps of a target a GPU's trace has."""
    rows = rows_of("gpu/t-trace-*.jsonl", "trace")
    of_target = [row for row in rows if row["target"] == target]
    return next(row["calls"] for row in of_target if row["event"] == "append_each")


first_of, shown = microscope.first_of, terminal.format_value
YES = {None: "-", True: "yes", False: "no"}
"""Words of `matched`; None: a rule that keeps the distribution has texts of its own."""


def _certificates() -> list[Row]:
    """Returns exactness certificates: how each was made, and whether all was equal."""
    found = []
    shorter = {"kind": "", "short": "", "gsm8k": "gsm8k/test.jsonl"}
    for step in reproduction.steps("certificates", **shorter):
        row = json.loads(files.read(step.path))
        row["command"] = step.runs[0].replace("exactness", "exactness.py", 1)
        found.append(row | {"file": step.path.name})
    return found


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


MEASURED_AS = {"peagle": "eagle3", "jetspec": "dflash", "dflash2": "dflash"}
"""Heads that were not run on a GPU, and the head with the same layers."""


def _ablation() -> list[Row]:
    """Returns heads of `compare_heads.py` with their results in chains on all prompts,
    and the speed-up that such rounds would bring an H100 with Qwen3-8B.

    There a head's round is one measured with a head of its family, less the passes that
    it does not make: EAGLE-3 makes one for each draft, the others one for all.
    """
    found, swept = [], rows_of("ablation.jsonl", "sweep")
    swept = [row for row in swept if row["category"] == "all" and not row.get("tree")]
    chains = {row["head"]: row for row in swept}
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


MADE: Mapping[str, Callable[[], list[Row]]] = {
    "ablation": _ablation,
    "certificates": _certificates,
    "gpu_heads": _gpu_heads,
    "gpu_rows": _gpu_rows,
}
"""Functions that make the rows of tables that no file holds as they are."""
