"""Kernel costs: variants of a kernel by number of rows, and plain memory traffic.

Knows clocks, bytes and ratios; what is called stands in `kernels`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
from rich import console as rich_console, table as rich_table

from experiments.lib import (
    kernel_plans,
    kernels,
    processes,
    programs,
    records,
    terminal,
    timing,
)


LEGEND = (
    "GB/s: bytes that a call must read, by its time; median, quartiles. read: share of "
    "the plain read's. time: over that of the fewest rows. xla: XLA's product alone, "
    "of at least two rows; for attention XLA's form of the whole operation."
)


class Variant(NamedTuple):
    """What is timed of a subject: `READ` and `COPY` have no rows.

    The kernel's own plan is None.
    """

    impl: str
    rows: int | None
    plan: Any = None


READ = Variant("read", None)
COPY = Variant("copy", None)
"""As many bytes as the copies have, half of them written; on a GPU only."""


def variants(
    subject: kernels.Subject, impls: Sequence[str], rows: Sequence[int], most_plans: int
) -> list[Variant]:
    """Every variant, the kernels' own plans first; other plans at the fewest rows."""
    impls = [impl for impl in impls if not subject.only or impl in subject.only]
    own = [Variant(impl, num_rows) for impl in impls for num_rows in rows]
    others = [
        Variant(impl, min(rows), plan)
        for impl in impls
        for plan in subject.plans(impl, most_plans)[1:]
    ]
    return own + others


class Bench:
    """The arrays of a subject, and what runs its variants on them."""

    def __init__(self, subject: kernels.Subject, *, as_shapes: bool = False):
        """Allocates nothing yet.

        Args:
          as_shapes: shapes in the place of arrays, to be lowered and not run.
        """
        self._subject, self._as_shapes = subject, as_shapes
        self._made: dict[kernels.Subject, Any] = {}

    def arguments(self, variant: Variant) -> tuple[tuple, Any, Any, Any]:
        """Static arguments of `kernels.repeat`, and a box of pages, fixed, inputs."""
        own, impl, plan = self._subject.for_impl(variant.impl), *variant[::2]
        make = jax.eval_shape if self._as_shapes else lambda call, *args: call(*args)
        if own not in self._made:
            fixed, pages = make(own.allocate)
            self._made[own] = [pages], fixed
        pages, fixed = self._made[own]
        slab = kernels.slab_of(impl, variant.rows)
        inputs = make(lambda: own.inputs(impl, plan, slab, variant.rows))
        if isinstance(own, kernels.Attention):
            with_jobs = functools.partial(own.with_jobs, impl, plan)
            inputs = make(with_jobs, fixed, inputs)
        platform = "cpu" if impl in ("native", "interpret") else jax.default_backend()
        passes = timing.passes_for(own.copies * own.num_bytes, platform)
        is_serial = platform == "cpu" or impl == "xla"
        static = own, impl, plan, 1 if impl == "interpret" else passes, is_serial
        return static, pages, fixed, inputs

    def loops(
        self, tried: Sequence[Variant]
    ) -> tuple[dict[Variant, timing.Loop], list[dict[str, Any]]]:
        """The calls of each variant that can be compiled and run, and rows of others.

        Compiled in threads: XLA lets go of Python's lock.
        """
        made, failed, pending = {}, [], {}
        with futures.ThreadPoolExecutor(processes.usable_cores()) as pool:
            for variant in tried:
                try:
                    static, pages, *rest = self.arguments(variant)
                    lowered = kernels.repeat.lower(*static, pages[0], *rest)
                    compiled = pool.submit(lowered.compile)
                    pending[variant] = compiled, static, pages, rest
                except Exception as error:
                    failed.append(self._failed(variant, error))
            for variant, (compiled, static, pages, rest) in pending.items():
                try:
                    loop = _loop(compiled.result(), static, pages, rest)
                    jax.block_until_ready(loop.run())
                    made[variant] = loop
                except Exception as error:
                    failed.append(self._failed(variant, error))
        return made, failed

    def _failed(self, variant: Variant, error: Exception) -> dict[str, Any]:
        plan = kernel_plans.describe(variant.plan) or "its own plan"
        item = f"{self._subject.name}, {variant.impl}, {variant.rows} rows, {plan}"
        return records.error_row(item, error)

    def lowered(self, variant: Variant) -> dict[str, Any]:
        """What tracing and lowering the variant for a GPU takes."""
        static, pages, fixed, inputs = self.arguments(variant)
        arguments = (pages[0], fixed, inputs)
        return programs.lower(
            lambda: kernels.repeat.trace(*static, *programs.abstract(arguments))
        )


def _loop(compiled: Any, static: tuple, pages: list, rest: list) -> timing.Loop:
    """What runs the executable, its pages handed on from call to call."""

    def run() -> Any:
        x, pages[0] = compiled(pages[0], *rest)
        return x, pages[0]

    own, _, _, passes, _ = static
    return timing.Loop(run=run, calls=passes * own.copies, num_bytes=own.num_bytes)


def measure(
    subject: kernels.Subject,
    tried: Sequence[Variant],
    *,
    repeats: int,
    after_turn: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Times the variants and a plain read, all of them in turns; returns rows."""
    bench, total = Bench(subject), subject.copies * subject.num_bytes
    if jax.default_backend() == "gpu":
        loops = {READ: timing.device_read(total), COPY: timing.device_copy(total)}
    else:
        loops = {READ: timing.host_read(total)}
    # In bytes of one copy, as the kernels are.
    loops = {
        variant: timing.Loop(
            run=loop.run,
            calls=loop.calls * subject.copies,
            num_bytes=loop.num_bytes // subject.copies,
        )
        for variant, loop in loops.items()
    }
    runnable, failed = bench.loops(tried)
    loops |= runnable
    timings = timing.interleave(
        {variant: timing.loop_thunk(loop) for variant, loop in loops.items()},
        repeats=repeats,
        after_turn=after_turn,
    )
    return [*rows(subject, loops, timings), *failed]


def rows(
    subject: kernels.Subject,
    loops: Mapping[Variant, timing.Loop],
    timings: timing.Timings,
) -> list[dict[str, Any]]:
    """A JSON row of each variant; every ratio is a median over the turns.

    `read_share` is the bandwidth relative to the plain read's and `copy_share` to the
    copy's, `time_ratio` the time relative to that of the fewest rows.
    """
    made = []
    for variant, seconds in timings.seconds.items():
        loop = loops[variant]
        rates = [loop.num_bytes / s / 1e9 for s in seconds]
        shares = {}
        for base, name in ((READ, "read_share"), (COPY, "copy_share")):
            if base in loops:
                bases = [loops[base].num_bytes / s / 1e9 for s in timings.seconds[base]]
                shares |= timing.quartile_fields(name, timing.ratios(rates, bases))
        copies = subject.for_impl(variant.impl).copies
        made.append(
            {
                "kind": "kernel",
                "kernel": subject.kernel,
                "subject": subject.name,
                "shape": subject.shape,
                "context": subject.context,
                "impl": variant.impl,
                "rows": variant.rows,
                "plan": kernel_plans.describe(variant.plan),
                "bytes": subject.num_bytes,
                "copies": copies,
                "calls_per_dispatch": loop.calls,
                "n": len(seconds),
                "warm_up_s": timings.warm_up[variant],
                **timing.quartile_fields("us", [1e6 * s for s in seconds]),
                **timing.quartile_fields("gb_s", rates),
                **shares,
                **_time_ratio(variant, timings),
            }
        )
    return made


def _time_ratio(variant: Variant, timings: timing.Timings) -> dict[str, Any]:
    """The time over that of the same implementation's fewest rows and own plan."""
    fewest = min(v.rows for v in timings.seconds if v.impl == variant.impl)
    base = Variant(variant.impl, fewest)
    if variant in (READ, COPY) or base not in timings.seconds:
        names = ("time_ratio", "time_ratio_q1", "time_ratio_q3", "ratio_to_rows")
        return dict.fromkeys(names)
    found = timing.ratios(timings.seconds[variant], timings.seconds[base])
    return timing.quartile_fields("time_ratio", found) | {"ratio_to_rows": fewest}


def print_subject(
    rows: Sequence[Mapping[str, Any]], console: rich_console.Console
) -> None:
    """Prints the rows of one subject: a group of columns for each implementation.

    Other plans than the kernel's own have lines of their own, the fastest first.
    """
    for row in rows:
        if row["kind"] == "error":
            console.print(records.line(row), highlight=False, soft_wrap=True)
    rows = [row for row in rows if row["kind"] == "kernel"]
    read, cells = rows[0], {}
    for row in rows:
        if row["rows"] is not None and row["plan"] is None:
            cells[row["impl"], row["rows"]] = row
    impls = list(dict.fromkeys(impl for impl, _ in cells))
    shape = " x ".join(str(size) for size in read["shape"])
    console.print(
        f"{read['subject']} ({read['kernel']}): {shape}, {read['copies']} copies of "
        f"{read['bytes'] / 1e6:.2f} MB",
        *(
            f"plain {row['impl']} {_number(row['gb_s'])} GB/s {_quartiles(row)}"
            for row in rows
            if row["rows"] is None
        ),
        sep="\n",
        highlight=False,
    )
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
    for row in sorted((r for r in rows if r["plan"]), key=lambda row: row["us"]):
        line = "  ".join(_cells(row))
        console.print(f"  {row['impl']} {row['plan']}: {line}", highlight=False)
    console.print()


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _number(row["us"]),
        _number(row["gb_s"]),
        _quartiles(row),
        f"{row['read_share']:.2f}",
        terminal.format_value(row["time_ratio"], ".2f"),
    )


def _quartiles(row: Mapping[str, Any]) -> str:
    return f"({_number(row['gb_s_q1'])}-{_number(row['gb_s_q3'])})"


def _number(value: float) -> str:
    """Three digits, or all of those before the point."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
