"""How fast is each kernel, compared with XLA's dot and a plain read of the same bytes?

A decoding step reads weights and computes little, so a kernel is measured in bytes per
second, and by what more rows cost than one. All numbers of a shape are taken in turns,
in one process, many calls to an executable. With --check the kernels are not
timed, but their bits compared: a row's result may depend on no other row.
Exit status: 0 measured, 2 a kernel failed or a bit differs, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments.lib import (
    bench,
    flags,
    kernel_checks,
    kernels,
    records,
    subjects,
    tables,
    terminal,
)
from spec_jax.native import build
from spec_jax.ops import dispatch
from spec_jax.typing import REMOVED_IMPLS


MEASURED, FAILED = 0, 2
READ = "read", None
"""A plain read of a subject's bytes; kernels are `(implementation, rows)`."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_device(parser)
    flags.add_dtype(parser)
    flags.add_isa(parser)
    cli.add(
        parser,
        f"""
        --impls NAME,NAME,...  implementations (default: native,xla; on a GPU
            triton,xla)
        --shapes NAME|DIR={subjects.EMBEDDED}  the model whose shapes are measured:
            {subjects.EMBEDDED} (the target of the embedded pair),
            {", ".join(sorted(subjects.PRESETS))}, or a folder with a config.json
        --rows N,N,...=1,2,4,5,8,16  numbers of rows
        --contexts N,N,...  positions that attention reads (default: 256,1024,4096; on a
            GPU 128,1024,4096,16384,32768)
        --only PATTERN  kernels in whose names this regular expression is found, such as
            'head|context 1024' (default: all)
        --repeats N=20  timings of each number
        --check  no times: compare each row's bits among others, alone, at other places
        """,
        **{"NAME,NAME,...": str, "NAME|DIR": cli.text_source},
    )
    flags.add_out(parser, rows="one per shape, implementation and number of rows")
    args = parser.parse_args(argv)
    flags.check_isa(parser, args)
    return args


def make_subjects(
    args: argparse.Namespace, platform: str
) -> tuple[list[kernels.Subject], tuple[str, ...]]:
    """Returns the kernels that are asked for, and the implementations."""
    known = kernels.IMPLS[platform]
    impls = tuple(args.impls.split(",")) if args.impls else known
    for impl in set(impls) & set(REMOVED_IMPLS):
        raise ValueError(REMOVED_IMPLS[impl])
    if not set(impls) <= {*known, *(("interpret",) if platform == "cpu" else ())}:
        raise ValueError(f"--impls {args.impls} are not all of {','.join(known)}")
    contexts = args.contexts or kernels.CONTEXTS[platform]
    if max(args.rows) > min(contexts):
        raise ValueError(
            f"--rows: {max(args.rows)} rows do not fit a context of {min(contexts)}"
        )
    for impl in impls:
        dispatch.resolve(impl)
    config = subjects.read_config(args.shapes, dtype=args.dtype)
    if set(impls) & set(dispatch.PALLAS):
        platform = "gpu"
    made = kernels.all_subjects(config, contexts=contexts, platform=platform)
    chosen = [s for s in made if args.only is None or args.only.search(s.name)]
    if not chosen:
        names = ", ".join(subject.name for subject in made)
        raise ValueError(f"--only {args.only.pattern} is found in none of {names}")
    # Twice: what the kernels read, and as many bytes that are read plainly.
    needed = max(2 * s.copies * s.num_bytes + s.num_bytes for s in chosen)
    subjects.check_fits("the largest weights", needed)
    return chosen, impls


def jobs(
    args: argparse.Namespace, chosen: Sequence[kernels.Subject], impls: Sequence[str]
) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """Yields what is asked for, by name: each returns rows."""
    if not args.check:
        for subject in chosen:
            yield (
                subject.name,
                lambda s=subject: measure(s, impls, args.rows, repeats=args.repeats),
            )
        return
    if set(impls) & set(dispatch.PALLAS):
        yield "control", lambda: [kernel_checks.control(impls[0])]
    for subject in chosen:
        for impl in impls:
            if impl != "xla" and subject.has(impl):
                yield (
                    f"{subject.name}, {impl}",
                    lambda s=subject, impl=impl: [
                        row | {"impl": impl}
                        for row in kernel_checks.check(kernel_checks.case_of(s, impl))
                    ],
                )


def measure(
    subject: kernels.Subject,
    impls: Sequence[str],
    rows: Sequence[int],
    *,
    repeats: int,
) -> list[dict[str, Any]]:
    """Times a kernel of each implementation at each number of rows, and a plain read of
    its bytes, all in turns; returns a row of each."""
    total, shared, loops, failed = subject.copies * subject.num_bytes, {}, {}, []
    impls = [impl for impl in impls if subject.has(impl)]

    def case(name: tuple[str, int | None]) -> bench.Thunk:
        if name == READ:
            is_gpu = jax.default_backend() == "gpu"
            loop = (bench.device_read if is_gpu else bench.host_read)(total)
            # In bytes of one copy, as the kernels are.
            calls, own = loop.calls * subject.copies, loop.num_bytes // subject.copies
            loop = dataclasses.replace(loop, calls=calls, num_bytes=own)
        else:
            loop = _loop(subject, *name, shared)
        loops[name] = loop
        return bench.loop_thunk(loop)

    names = [READ, *((impl, n) for impl in impls for n in rows)]

    def fail(name: Hashable, error: Exception) -> None:
        failed.append(records.error_row(f"{subject.name}, {name}", error))

    with terminal.counted(subject.name, total=repeats + 1) as advance:
        cases = {name: functools.partial(case, name) for name in names}
        timings = bench.run(cases, repeats=repeats, after_turn=advance, failed=fail)
    made = [_row(subject, name, loops, timings) for name in timings.seconds]
    return [*made, *failed]


def _loop(
    subject: kernels.Subject,
    impl: str,
    num_rows: int,
    shared: dict[kernels.Subject, list],
) -> bench.Loop:
    """Compiles the calls of `num_rows` rows; `shared` has what subjects allocated."""
    own = subject.for_impl(impl)
    if own not in shared:
        shared[own] = list(own.allocate())
    arrays = shared[own]
    inputs = own.inputs(impl, arrays[0], kernels.slab_of(impl, num_rows), num_rows)
    platform = "cpu" if impl in ("native", "interpret") else jax.default_backend()
    passes = bench.passes_for(own.copies * own.num_bytes, platform)
    passes = 1 if impl == "interpret" else passes
    is_serial = platform == "cpu" or impl == "xla"
    static = own, impl, passes, is_serial
    compiled = kernels.repeat.lower(*static, arrays[1], arrays[0], inputs).compile()

    def run() -> Any:
        # The pages are handed on from call to call.
        x, arrays[1] = compiled(arrays[1], arrays[0], inputs)
        return x, arrays[1]

    return bench.Loop(run=run, calls=passes * own.copies, num_bytes=own.num_bytes)


def _row(
    subject: kernels.Subject,
    name: tuple[str, int | None],
    loops: Mapping[Any, bench.Loop],
    timings: bench.Timings,
) -> dict[str, Any]:
    """Returns the JSON row of a case; every ratio is a median over the turns.

    `read_share` is the bandwidth relative to the plain read's, `time_ratio` the time
    relative to that of the fewest rows.
    """
    (impl, num_rows), seconds, all_s = name, timings.seconds[name], timings.seconds
    rates = [loops[name].num_bytes / s / 1e9 for s in seconds]
    plain = [loops[READ].num_bytes / s / 1e9 for s in all_s[READ]]
    fewest = min((n for i, n in all_s if i == impl), default=None)
    names = ("time_ratio", "time_ratio_q1", "time_ratio_q3")
    ratio: dict[str, Any] = dict.fromkeys(names)
    if fewest is not None:
        found = bench.ratios(seconds, all_s[impl, fewest])
        ratio = bench.quartile_fields("time_ratio", found)
    return {
        "kind": "kernel",
        "kernel": subject.kernel,
        "subject": subject.name,
        "shape": subject.shape,
        "context": subject.context,
        "impl": impl,
        "rows": num_rows,
        "bytes": subject.num_bytes,
        "copies": subject.for_impl(impl).copies,
        "calls_per_dispatch": loops[name].calls,
        "n": len(seconds),
        "warm_up_s": timings.warm_up[name],
        **bench.quartile_fields("us", [1e6 * s for s in seconds]),
        **bench.quartile_fields("gb_s", rates),
        **bench.quartile_fields("read_share", bench.ratios(rates, plain)),
        **ratio,
        "ratio_to_rows": fewest,
    }


def run(args: argparse.Namespace) -> int:
    """Measures shape after shape; writes and prints each when it is known."""
    console, platform = terminal.console(), subjects.check_device(args.device)
    failed = False
    with records.open_out(args) as out:
        chosen, impls = make_subjects(args, platform)
        out.common = {
            "device": platform,
            "shapes": args.shapes,
            "dtype": subjects.read_config(args.shapes, dtype=args.dtype).dtype,
            "repeats": args.repeats,
            "native_isa": build.load() if "native" in impls else None,
            "last_level_cache_bytes": bench.cache_bytes(),
            **records.provenance(),
        }
        for name, work in jobs(args, chosen, impls):
            rows = records.guarded(name, work)
            out.write_all(rows)
            failed |= any(map(records.is_failure, rows))
            timed = [row for row in rows if row["kind"] == "kernel"]
            if timed:
                about = f"{name}: {' x '.join(map(str, timed[0]['shape']))}"
                tables.print_rows(timed, COLUMNS, console, title=about)
            for row in rows:
                if row not in timed:
                    line = records.line(row)
                    console.print(line, highlight=False, soft_wrap=True)
        if not args.check:
            tables.print_note(NOTE, console)
    return FAILED if failed else MEASURED


COLUMNS = {
    "impl": "",
    "rows": "d",
    "us": ".2f",
    "GB/s": ("gb_s", ".1f"),
    "q1": ("gb_s_q1", ".1f"),
    "q3": ("gb_s_q3", ".1f"),
    "read": ("read_share", ".2f"),
    "time": ("time_ratio", ".2f"),
}
NOTE = (
    "GB/s: bytes that a call must read, by its time; median, quartiles. read: share of "
    "the plain read's. time: over that of the fewest rows. xla: XLA's product alone, "
    "of at least two rows; for attention XLA's form of the whole operation."
)

main = cli.script("kernels.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
