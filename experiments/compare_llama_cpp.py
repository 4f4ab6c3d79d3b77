"""How fast is decoding compared with llama.cpp's, on the same weights and prompts?

Runs llama-bench, llama-completion and llama-speculative-simple of a build of llama.cpp
in turns with ours, on GGUF files of the target; compares what either side drafts and
keeps, and the texts, which need not be equal: the sides round differently. Exit status:
0 measured, 2 our drafted text is not that of our decoding, 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

from rich import console as rich_console

from experiments.lib import (
    beside_llama as beside,
    flags,
    llama_cpp,
    models,
    processes,
    prompts as prompts_lib,
    records,
    results,
    subjects,
    terminal,
)
from spec_jax import loading
from spec_jax.drafters import registry
from spec_jax.model import gguf_header


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    group = parser.add_argument_group("models")
    flags.add(group, "models drafters", drafters="ngram")
    build = parser.add_argument_group("llama.cpp")
    cli.add(
        build,
        """
        --llama-bin DIR  of a build: the folder of llama-bench, llama-completion and
            llama-speculative-simple (docs/measurements.md says how to build them);
            heads are converted by the script in the sources that it is of
        --gguf FILE,...  the target as llama.cpp is to read it; of the second and later
            ones, quantised otherwise, it decodes plainly, too
        --threads N  of llama.cpp (default: as many as there are cores)
        --limit-s SECONDS=600  the longest that one of its programs may take
        """,
        **{"SECONDS": float, "FILE,...": cli.names(cli.source)},
    )
    runs = parser.add_argument_group("runs")
    names = "gammas page-size prompts gen-tokens repeats raw"
    flags.add(runs, names, gammas=4, prompts=50, repeats=3)
    cli.add(runs, "--no-steps  leave llama-bench and our steps out")
    flags.add(parser, "out", out="one per prompt as it finishes, then figures")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    if args.llama_bin is None or args.gguf is None:
        parser.error(
            "--llama-bin and --gguf are needed: the folder `bin` of a build of "
            "llama.cpp, and files that its llama-quantize wrote; "
            "docs/measurements.md says how to make both"
        )
    known = ", ".join(llama_cpp.SPEC_TYPES)
    for name in args.drafter:
        if name not in llama_cpp.SPEC_TYPES:
            parser.error(f"--drafter {name}: llama.cpp is compared on {known}")
    return args


def load(args: argparse.Namespace) -> models.Drafters:
    """Our side with each drafter, and the slab that it has by default."""
    first, *others = args.drafter
    lm = loading.load(
        args.target,
        draft=args.draft,
        drafter=first,
        gamma_max=max(args.gamma),
        dtype=args.dtype,
        weights=args.weights,
        draft_weights=args.draft_weights,
        impl=args.impl,
    )
    words = prompts_lib.with_options(args, lm.tokenizer)
    lm = dataclasses.replace(lm, tokenizer=words)
    return {first: lm} | {name: models.with_drafter(args, lm, name) for name in others}


def convert(
    args: argparse.Namespace,
    lm: loading.LanguageModel,
    build: llama_cpp.Build,
    folder: pathlib.Path,
) -> dict[str, pathlib.Path]:
    """Each head as a file of llama.cpp's, by its own converter."""
    heads = [name for name in args.drafter if name not in registry.NEED_NOTHING]
    if heads:  # The converter reads folders.
        lm.save(folder / "target")
    shipped = loading.heads_for(args.target)
    for name in heads:
        llama_cpp.convert(
            build,
            args.draft or registry.shipped_head(name, shipped),
            folder / "target",
            folder / f"{name}.gguf",
            pre_tokenizer=gguf_header.read(args.gguf[0]).fields["tokenizer.ggml.pre"],
            dtype=lm.target.config.dtype,
        )
    return {name: folder / f"{name}.gguf" for name in heads}


def run_all(
    args: argparse.Namespace,
    folder: pathlib.Path,
    out: records.JsonLines,
    console: rich_console.Console,
) -> bool:
    """Loads, measures, writes, prints; returns whether our texts are the same."""
    for path in args.gguf:
        if not path.is_file():
            raise ValueError(f"--gguf {path}: no such file; llama-quantize writes one")
    threads = args.threads or processes.usable_cores()
    build = llama_cpp.find(args.llama_bin, threads=threads, limit_s=args.limit_s)
    subjects.check_device("cpu")
    lms, found = load(args), []
    lm = lms[args.drafter[0]]
    drafts = convert(args, lm, build, folder)
    out.common = {
        **models.describe(args, lm),
        "drafter": args.drafter,
        "gamma": args.gamma,
        "prompt_source": args.prompts,
        "llama_cpp": {"threads": threads},
        **records.provenance(),
    }
    if not args.no_steps:
        with terminal.counted("turns of steps", total=args.repeats + 1) as advance:
            found, described = beside.measure_steps(
                lm,
                build,
                target=args.gguf[0],
                page_size=args.page_size,
                repeats=args.repeats,
                after_turn=advance,
            )
        out.common |= {"llama_cpp": described | {"threads": threads}}
        out.write_all(found)
    subject = models.prepare(args, lm, args.prompts, stop_ids=lm.stop_ids)
    sides = beside.Sides(
        lms=lms,
        settings=subject.settings,
        gammas=args.gamma,
        build=build,
        target=args.gguf[0],
        drafts=drafts,
        others={path.stem: path for path in args.gguf[1:]},
    )
    results.warm_up(sides.designs(), subject.ids)
    done = []
    with terminal.counted("prompts", total=len(subject.prompts)) as advance:
        for prompt, ids in zip(subject.prompts, subject.ids, strict=True):
            done.append(beside.run_prompt(sides, prompt, ids, repeats=args.repeats))
            out.write(done[-1].row())
            advance()
    of_prompts = beside.rows(done)
    out.write_all(of_prompts)
    beside.print_all(console, [*of_prompts, *found])
    compared = [row for row in of_prompts if "prompts" in row]
    return all(row["same_ours"] == row["prompts"] for row in compared)


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.open_out(args) as out, tempfile.TemporaryDirectory() as folder:
        same = run_all(args, pathlib.Path(folder), out, terminal.console())
    return MATCHED if same else NOT_MATCHED


main = cli.script("compare_llama_cpp.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
