"""Tables of kernels: one a subject, a line for each number of rows.

Knows names and formats; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import console as rich_console, table as rich_table


LEGEND = (
    "GB/s: bytes that a call must read, by its time; median, quartiles. read: share of "
    "the plain read's, on a GPU of a plain copy's. time: beside the fewest rows. xla: "
    "XLA's product alone, of at least two rows; for attention XLA's form of the whole "
    "operation."
)


def print_subject(
    rows: Sequence[Mapping[str, Any]], console: rich_console.Console
) -> None:
    """Prints the rows of one subject, as `kernel_costs.rows` makes them.

    One group of columns for each implementation, in the order of the rows.
    """
    (read,) = [row for row in rows if row["rows"] is None]
    cells = {(r["impl"], r["rows"]): r for r in rows if r["rows"] is not None}
    impls = list(dict.fromkeys(impl for impl, _ in cells))
    console.print(_title(read), highlight=False)
    # Narrow enough for two implementations on a terminal of 80 columns.
    table = rich_table.Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    table.add_column("rows", justify="right")
    for impl in impls:
        for name in (f"{impl} us", "GB/s", "(q1-q3)", "read", "time"):
            table.add_column(name, justify="right", no_wrap=True)
    for num_rows in dict.fromkeys(num_rows for _, num_rows in cells):
        groups = [_cells(cells[impl, num_rows]) for impl in impls]
        table.add_row(str(num_rows), *(cell for group in groups for cell in group))
    console.print(table)
    console.print()


def _title(read: Mapping[str, Any]) -> str:
    """What is read, and how fast it is read plainly."""
    shape = " x ".join(str(size) for size in read["shape"])
    return (
        f"{read['subject']} ({read['kernel']}): {shape}, {read['copies']} copies of "
        f"{read['bytes'] / 1e6:.2f} MB\n"
        f"plain read {_number(read['gb_s'])} GB/s {_quartiles(read)}"
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _number(row["us"]),
        _number(row["gb_s"]),
        _quartiles(row),
        f"{row['read_share']:.2f}",
        f"{row['time_ratio']:.2f}",
    )


def _quartiles(row: Mapping[str, Any]) -> str:
    return f"({_number(row['gb_s_q1'])}-{_number(row['gb_s_q3'])})"


def _number(value: float) -> str:
    """Three digits, or all of those before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
