"""How fast is each kernel, beside XLA's dot and a plain read of the same bytes?

A decoding step reads weights and computes little, so a kernel is measured in bytes per
second, and by what more rows cost beside one. All numbers of a shape are taken in
turns, in one process. On a GPU the loop around the calls is in the numbers, some
microseconds for each: `gpu_report.py` has none, and tries plans.
Exit status: 0 measured, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from rich import console as rich_console

from experiments.lib import flags, records, subjects, terminal
from experiments.support import (
    kernel_costs,
    kernel_report,
    kernel_subjects,
    model_pair,
)
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.ops import dispatch


MEASURED = 0
EMBEDDED = "embedded"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the kernels run (default: %(default)s)",
    )
    parser.add_argument(
        "--impls",
        metavar="NAME,NAME,...",
        help="implementations (default: native,xla; on cuda triton,mosaic,xla)",
    )
    presets = ", ".join(sorted(subjects.PRESETS))
    parser.add_argument(
        "--shapes",
        type=cli.text_source,
        default=EMBEDDED,
        metavar="NAME|DIR",
        help=f"the model whose shapes are measured: {EMBEDDED} (the target of the "
        f"embedded pair), {presets}, or a folder with a config.json (default: "
        "%(default)s)",
    )
    flags.add_dtype(parser)
    flags.add_isa(parser)
    parser.add_argument(
        "--rows",
        type=cli.positives,
        default=(1, 2, 4, 5, 8, 16),
        metavar="N,N,...",
        help="numbers of rows (default: 1,2,4,5,8,16)",
    )
    parser.add_argument(
        "--repeats",
        type=cli.positive,
        default=20,
        metavar="N",
        help="timings of each number (default: %(default)s)",
    )
    flags.add_out(parser, rows="one per shape, implementation and number of rows")
    args = parser.parse_args(argv)
    flags.check_isa(parser, args)
    known = kernel_subjects.IMPLS[args.device]
    args.impls = tuple(args.impls.split(",")) if args.impls else known
    if not set(args.impls) <= set(known):
        parser.error(
            f"argument --impls: {','.join(args.impls)} are not all of {','.join(known)}"
        )
    if max(args.rows) > min(kernel_subjects.CONTEXTS):
        parser.error(
            f"argument --rows: {max(args.rows)} rows do not fit a context of "
            f"{min(kernel_subjects.CONTEXTS)}"
        )
    return args


def read_config(shapes: str, *, dtype: str | None) -> config_lib.Qwen3Config:
    """The config that `--shapes` names, in its own dtype if `dtype` is None.

    Raises:
      ValueError: neither a known name nor a folder with a usable `config.json`.
    """
    if shapes in subjects.PRESETS:
        config = subjects.PRESETS[shapes]
        return dataclasses.replace(config, dtype=dtype or config.dtype)
    folder = pathlib.Path(shapes)
    if shapes == EMBEDDED:
        folder = model_pair.EMBEDDED_TARGET
    elif not folder.is_dir():
        known = ", ".join([EMBEDDED, *sorted(subjects.PRESETS)])
        raise ValueError(f"--shapes {shapes}: not one of {known}, and no folder either")
    return config_lib.read(folder / "config.json", dtype=dtype)


def check_device(device: str, impls: Sequence[str]) -> None:
    """Raises unless `impls` can run on `device` in this process.

    Raises:
      ValueError: JAX does not run on that device.
      NotImplementedError: an implementation that cannot run here, and why.
    """
    found = jax.devices()[0]
    if device == "cuda" and found.platform != "gpu":
        raise ValueError(f"--device cuda: no GPU, JAX finds {found.device_kind} only")
    if device == "cpu" and found.platform != "cpu":
        raise ValueError(
            f"--device cpu: JAX runs on {found.device_kind}; set JAX_PLATFORMS=cpu"
        )
    for impl in impls:
        dispatch.resolve(impl)


def describe(
    args: argparse.Namespace, config: config_lib.Qwen3Config
) -> dict[str, Any]:
    """What is measured and where, for every row."""
    has_native = "native" in args.impls
    return {
        "device": args.device,
        "shapes": args.shapes,
        "dtype": config.dtype,
        "repeats": args.repeats,
        "native_isa": build.load() if has_native else None,
        "last_level_cache_bytes": kernel_subjects.cache_bytes(),
        **records.provenance(),
    }


def _machine(description: dict[str, Any]) -> str:
    """What the kernels run on."""
    if description["platform"] != "cpu":
        return description["device_kind"]
    return f"{description['cpu']}, native path {description['native_isa']}"


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> None:
    """Measures shape after shape; writes and prints each when it is known."""
    config = read_config(args.shapes, dtype=args.dtype)
    check_device(args.device, args.impls)
    to_measure = kernel_subjects.all_subjects(config)
    # What does not fit is found before anything has been measured.
    kernel_costs.check_memory(to_measure)
    description = describe(args, config)
    console.print(
        f"{args.shapes} in {config.dtype} on {_machine(description)}, {args.repeats} "
        "timings of each",
        kernel_report.LEGEND,
        sep="\n",
        highlight=False,
    )
    console.print()
    for number, subject in enumerate(to_measure, 1):
        with terminal.progress() as progress:
            name = f"{subject.name} ({number} of {len(to_measure)})"
            task = progress.add_task(name, total=args.repeats + 1)
            measured = kernel_costs.measure(
                subject,
                impls=args.impls,
                rows=args.rows,
                repeats=args.repeats,
                after_turn=lambda: progress.advance(task),  # noqa: B023
            )
        rows = kernel_costs.rows(subject, measured)
        for row in rows:
            out.write(row | description)
        kernel_report.print_subject(rows, console)


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.JsonLines(args.out) as out:
        run_all(args, out, terminal.console())
    return MEASURED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    return cli.run("kernels.py", lambda: parse_args(argv), run)


if __name__ == "__main__":
    cli.end(main)
