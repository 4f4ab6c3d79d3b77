"""Tables of README and docs, generated from the rows of `experiments/results`.

A page has a table between `<!-- rows: NAME -->` and `<!-- end of rows -->`; what stands
there is replaced by what the entry of `published_tables` makes of the rows.
"""

import pathlib
import re

from experiments.lib import published_tables, table_rows


ROOT, RESULTS = table_rows.ROOT, table_rows.RESULTS
PAGES = (
    *("README.md", "docs/measurements.md", "docs/batch_invariance.md"),
    *("docs/trees.md", "docs/processors.md"),
)
"""Pages with such tables, below `ROOT`."""

TABLES = published_tables.TABLES

_PLACE = re.compile(
    r"(<!-- rows: (?P<name>\w+) -->\n\n).*?(<!-- end of rows -->)", re.DOTALL
)


def table(name: str) -> str:
    """The table of that name, Markdown; one sentence where no rows are published."""
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in TABLES[name]())
    if not lines:
        script = "gpu_report" if name.startswith("gpu_") else "reproduce"
        return f"No rows are published yet; `experiments/{script}.py` makes them.\n"
    rule = "|" + " --- |" * (heading.count(" | ") + 1)
    return "\n".join([heading, rule, *lines]).replace("|  |", "| |") + "\n"


def update(text: str) -> str:
    """The page with its tables made of the rows."""
    return _PLACE.sub(lambda m: f"{m[1]}{table(m['name'])}\n{m[3]}", text)


def update_pages() -> list[pathlib.Path]:
    """Writes the tables of all pages; returns the pages that changed."""
    changed = []
    for path in (ROOT / name for name in PAGES):
        text = path.read_text(encoding="utf-8")
        new = update(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
