"""Tables of README and docs, generated from the rows of `experiments/results`.

A page has a table between `<!-- rows: NAME -->` and `<!-- end of rows -->`, which is
replaced by the table that its template in `experiments/tables.md` makes of the rows.
"""

import pathlib
import re

from experiments.lib import table_rows


ROOT, RESULTS = table_rows.ROOT, table_rows.RESULTS
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

_PLACE = re.compile(
    r"(<!-- rows: (?P<name>\w+) -->\n\n).*?(<!-- end of rows -->)", re.DOTALL
)


def table(name: str) -> str:
    """Returns the table of that name, Markdown; raises `ValueError` without rows."""
    source, *template = TEMPLATES[name]
    headings, cells = (line.strip("| ").split(" | ") for line in template)
    is_pivot = any("{" in heading for heading in headings)
    # Texts of rows by line and heading; under a fixed heading equal ones count once.
    found: dict[str | int, dict[str, list[str]]] = {}
    columns: list[dict[str, None]] = [{} for _ in headings]
    for number, row in enumerate(table_rows.rows_of_table(name, source)):
        texts = [cell.format_map(row) for cell in cells]
        of_line = found.setdefault(texts[0] if is_pivot else number, {})
        for column, heading, text in zip(columns, headings, texts, strict=True):
            named = heading.format_map(row)
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
