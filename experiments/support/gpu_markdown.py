"""The tables of the GPU report, made from its rows; measures nothing.

Every section file of the folder becomes a part of `report.md`, with the device and
the commit of its own rows, so that sections may be run one by one.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.support import gpu_workers


NAME = "report.md"

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes `report.md` from the section files beside it; returns its path."""
    parts = ["# Measured on a device", ""]
    for path in sorted(folder.glob("[0-9a-z]-*.jsonl")):
        rows = gpu_workers.read_rows(path)
        if rows:
            parts += section(path.stem, rows)
    out = folder / NAME
    out.write_text("\n".join(parts).rstrip() + "\n")
    return out


def section(name: str, rows: Sequence[Row]) -> list[str]:
    """Lines of one section: where it ran, what failed, its tables."""
    lines = [f"## ({name[0]}) {name[2:]}", ""]
    lines += [*_where(rows), *_status(rows), ""]
    for kind, make in TABLES.items():
        chosen = [row for row in rows if row["kind"] == kind]
        if chosen:
            lines += [*make(chosen), ""]
    return lines


def _where(rows: Sequence[Row]) -> list[str]:
    """Device, driver, versions and commit."""
    for row in rows:
        if "jax_version" not in row:
            continue
        dirty = " with changes" if row.get("git_dirty") else ""
        driver = f" (name, driver, memory, clock: {row['driver']})"
        plugin = row.get("cuda_plugin_version")
        return [
            f"{row['device_kind']}{driver if row.get('driver') else ''}, "
            f"impl {row['impl']}, {row['dtype']}, jax {row['jax_version']}, jaxlib "
            f"{row['jaxlib_version']}{f', {plugin}' if plugin else ''}, Python "
            f"{row['python_version']}, commit {(row['git_commit'] or 'none')[:12]}"
            f"{dirty}."
        ]
    return ["No row says where it was measured."]


def _status(rows: Sequence[Row]) -> list[str]:
    """How it ended, what failed and what was left out."""
    lines = []
    for row in rows:
        if row["kind"] == "section":
            lines.append(f"Status: {row['status']} after {row['seconds']:.0f} s.")
            stderr = (row.get("stderr") or "").strip().splitlines()
            if row["status"] in ("died", "ended") and stderr:
                lines += ["", f"Its last words: `{stderr[-1][:300]}`"]
        if row["kind"] == "error":
            lines += ["", f"**Failed**: {row['item']}: `{row['error']}`"]
        if row["kind"] == "left out":
            names = ", ".join(row["items"])
            lines += ["", f"Left out: {names}: {row['reason']}."]
    return lines


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """A Markdown table; what a row lacks is a dash."""
    lines = [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
    ]
    for row in rows:
        cells = []
        for _, cell in columns:
            try:
                cells.append(cell(row))
            except (KeyError, TypeError):
                cells.append("-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def field(name: str, form: str = "") -> Column:
    """A column of one value."""
    return name, lambda row: _text(row[name], form)


def spread(title: str, name: str, form: str) -> Column:
    """A column of a median and its quartiles."""

    def cell(row: Row) -> str:
        q1, q3 = row[f"{name}_q1"], row[f"{name}_q3"]
        return f"{row[name]:{form}} ({q1:{form}}-{q3:{form}})"

    return title, cell


def _text(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return format(value, form) if form else str(value)


def _probe(rows: Sequence[Row]) -> list[str]:
    columns = [field("item"), field("first_s", ".2f"), field("again_s", ".5f")]
    columns += [field("equal"), field("path"), field("version")]
    return table(columns, rows)


def _bitwise(rows: Sequence[Row]) -> list[str]:
    equal = sum(row["equal"] for row in rows)
    columns = [field(n) for n in ("check", "cases", "elements", "differing")]
    title = f"{equal} of {len(rows)} checks: every bit equal."
    return [title, "", *table(columns, rows)]


def _processes(rows: Sequence[Row]) -> list[str]:
    return [
        f"Two processes: {row['compared']} hashes compared, "
        f"{len(row['differing'])} differ"
        + (f" ({', '.join(row['differing'])})" if row["differing"] else "")
        + f"; {len(row['in_one_only'])} in one of them only."
        for row in rows
    ]


def _seen(rows: Sequence[Row]) -> list[str]:
    return [f"{row['check']}: {row['differing']} elements differ." for row in rows]


_BANDWIDTH: list[Column] = [
    spread("us", "us", ".1f"),
    spread("GB/s", "gb_s", ".0f"),
    spread("of the copy", "copy_share", ".1%"),
]


def _kernels(rows: Sequence[Row]) -> list[str]:
    """What runs, and then every candidate, the fastest first."""
    own = [row for row in rows if row["is_own_plan"]]
    columns = [field("kernel"), field("shape"), field("impl"), *_BANDWIDTH]
    lines = ["Plans that the kernels choose themselves:", "", *table(columns, own)]
    candidates = [row for row in rows if row.get("plan")]
    if not candidates:
        return lines
    lines += ["", "All candidates, by time; * is the kernel's own:", ""]
    columns = [field("kernel"), field("impl"), ("plan", _plan), *_BANDWIDTH]
    order = list(dict.fromkeys(row["kernel"] for row in candidates))
    candidates.sort(key=lambda row: (order.index(row["kernel"]), row["us"]))
    return [*lines, *table(columns, candidates)]


def _plan(row: Row) -> str:
    return f"{row['plan']}{' *' if row['is_own_plan'] else ''}"


def _attention(rows: Sequence[Row]) -> list[str]:
    ordered = sorted(
        rows, key=lambda row: (row["context"], row["live_rows"], row["us"])
    )
    columns = [field("context"), field("live_rows"), ("config", _plan), *_BANDWIDTH]
    title = "Attention of a layer (rotate, write, splits, combine); * is the own one:"
    return [title, "", *table(columns, ordered)]


def _steps(rows: Sequence[Row]) -> list[str]:
    columns = [
        *(field(name) for name in ("model", "step", "context")),
        spread("ms", "ms", ".3f"),
        spread("beside plain", "to_plain", ".3f"),
        spread("beside its weights at copy speed", "to_weights", ".3f"),
        field("gb_s", ".0f"),
    ]
    return table(columns, rows)


def _rounds(rows: Sequence[Row]) -> list[str]:
    columns = [
        field("gamma"),
        field("forced_rate"),
        field("acceptance_rate", ".3f"),
        field("tokens_per_target_step", ".2f"),
        spread("plain ms/token", "plain_ms", ".3f"),
        spread("spec ms/token", "spec_ms", ".3f"),
        spread("round ms", "round_ms", ".3f"),
        spread("speed-up", "speedup", ".2f"),
        field("matched"),
    ]
    title = (
        "**Acceptance is forced**: the real draft runs and is paid for, its tokens "
        f"are overwritten. Batch 1, context {rows[0]['context']}, {rows[0]['tokens']} "
        f"tokens, greedy; {sum(r['matched'] for r in rows)} of {len(rows)} runs match "
        "plain decoding."
    )
    return [title, "", *table(columns, rows)]


def _transformers(rows: Sequence[Row]) -> list[str]:
    columns = [
        *(field(name) for name in ("run", "gamma", "context", "tokens_returned")),
        spread("ms/token", "ms", ".3f"),
        spread("times plain's", "to_plain", ".2f"),
        field("prefill"),
    ]
    first = rows[0]
    title = (
        f"torch {first['torch_version']}, transformers "
        f"{first['transformers_version']}; drafts are the random draft's own, and "
        "hardly any is accepted."
    )
    return [title, "", *table(columns, rows)]


def _compile(rows: Sequence[Row]) -> list[str]:
    times = ("trace_s", "lower_s", "compile_s", "total_s")
    columns = [field("program"), *(field(name, ".1f") for name in times)]
    columns += [field("launches"), field("temp_bytes", ",")]
    title = "Launches: kernels and copies of the program, bodies of loops once."
    return [title, "", *table(columns, rows)]


TABLES: Mapping[str, Callable[[Sequence[Row]], list[str]]] = {
    "probe": _probe,
    "bitwise": _bitwise,
    "processes": _processes,
    "control": lambda rows: ["Negative controls that must differ:", "", *_seen(rows)],
    "seen": _seen,
    "kernel": _kernels,
    "attention": _attention,
    "step": _steps,
    "rounds": _rounds,
    "transformers": _transformers,
    "compile": _compile,
}
"""How the rows of each kind are shown, in this order."""
