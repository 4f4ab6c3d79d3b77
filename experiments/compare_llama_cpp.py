"""How fast is decoding compared with llama.cpp's, on the same weights and prompts?

Writes both models as GGUF files, and runs llama-bench, llama-completion and
llama-speculative-simple of a build of llama.cpp in turns with ours; compares what
either side drafts and keeps, and the texts, which need not be equal: the sides round
differently. Exit status: 0 measured, 2 our drafted text is not that of our decoding,
1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    beside_llama as beside,
    flags,
    gguf_files,
    llama_cpp,
    models,
    records,
    results,
    subjects,
    terminal,
    timing,
)
from spec_jax import loading
from spec_jax.ops import dispatch


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    group = parser.add_argument_group("models")
    flags.add_models(group, has_mesh=False)
    subjects.add_presets(group)
    flags.add_drafter(group)
    build = parser.add_argument_group("llama.cpp")
    cli.add(
        build,
        """
        --llama-bin DIR  of a build: the folder of llama-bench, llama-completion and
            llama-speculative-simple (docs/measurements.md says how to build them)
        --draft-gguf FILE  the drafter as its own converter writes it, for a --drafter
            that reads the target
        --threads N  of llama.cpp (default: as many as there are cores)
        --limit-s SECONDS=600  the longest that one of its programs may take
        """,
        FILE=cli.source,
        SECONDS=float,
    )
    runs = parser.add_argument_group("runs")
    flags.add_rounds(runs)
    flags.add_prompts(runs, default="50")
    flags.add_gen_tokens(runs, default=64)
    flags.add_repeats(runs, default=3)
    flags.add_raw(runs)
    cli.add(runs, "--no-steps  leave llama-bench and our steps out")
    flags.add_out(parser, rows="one per prompt as it finishes, then figures")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    subjects.check_presets(parser, args)
    if args.llama_bin is None:
        parser.error(
            "--llama-bin is missing: name the folder `bin` of a build of llama.cpp; "
            "docs/measurements.md says how to make one"
        )
    if args.drafter not in llama_cpp.SPEC_TYPES:
        known = ", ".join(llama_cpp.SPEC_TYPES)
        parser.error(f"--drafter {args.drafter}: llama.cpp is compared on {known}")
    if (args.drafter != "draft-model") != (args.draft_gguf is not None):
        parser.error("--draft-gguf goes with a --drafter that reads the target")
    if args.preset and (args.no_steps or args.drafter != "draft-model"):
        parser.error("--preset has steps alone, of models")
    return args


def load(args: argparse.Namespace) -> loading.LanguageModel:
    """Our side, with the slab that it has by default."""
    if args.preset:
        sizes = {"gamma_max": args.gamma, "dtype": args.dtype, "impl": args.impl}
        slab = max(loading.TARGET_SLAB, args.gamma + 1)
        return subjects.preset_lm(args.preset, args.draft_preset, slab=slab, **sizes)
    return loading.load(
        args.target,
        draft=args.draft,
        drafter=args.drafter,
        gamma_max=args.gamma,
        dtype=args.dtype,
        impl=args.impl,
    )


def run_prompts(
    args: argparse.Namespace, sides: beside.Sides, subject: models.Subject, out: Any
) -> list[beside.PromptRuns]:
    """All prompts, each row written when it is known."""
    design = results.Design(lm=subject.lm, settings=subject.settings)
    results.warm_up([design], subject.ids)
    done = []
    with terminal.counted("prompts", total=len(subject.prompts)) as advance:
        for prompt, ids in zip(subject.prompts, subject.ids, strict=True):
            done.append(beside.run_prompt(sides, prompt, ids, repeats=args.repeats))
            out.write(done[-1].row())
            advance()
    return done


def run_all(
    args: argparse.Namespace,
    folder: pathlib.Path,
    out: records.JsonLines,
    console: rich_console.Console,
) -> bool:
    """Loads, measures, writes, prints; returns whether our texts are the same."""
    started = time.perf_counter()
    threads = args.threads or timing.usable_cores()
    build = llama_cpp.find(args.llama_bin, threads=threads, limit_s=args.limit_s)
    subjects.check_device("cpu")
    gguf_files.check_installed()
    lm = load(args)
    target = folder / "target.gguf"
    gguf_files.write(target, lm.target.config, lm.params, lm.tokenizer)
    draft = args.draft_gguf
    has_model = lm.drafter is not None and args.drafter == "draft-model"
    if has_model:
        draft = folder / "draft.gguf"
        config = lm.drafter.model.config
        gguf_files.write(draft, config, lm.drafter_params, lm.tokenizer)
    out.common = describe(args, lm, threads)
    found = []
    if not args.no_steps:
        with terminal.counted("turns of steps", total=args.repeats + 1) as advance:
            found, described = beside.measure_steps(
                lm,
                build,
                target=target,
                draft=draft if has_model else None,
                page_size=args.page_size,
                repeats=args.repeats,
                after_turn=advance,
            )
        out.common |= {"llama_cpp": described | {"threads": threads}}
        out.write_all(found)
    if args.preset:
        beside.print_all(console, found, None)
        return True
    subject = models.prepare(args, lm, args.prompts, stop_ids=lm.stop_ids)
    sides = beside.Sides(
        lm=lm,
        settings=subject.settings,
        drafter=args.drafter,
        build=build,
        target=target,
        draft=draft,
    )
    done = run_prompts(args, sides, subject, out)
    compared = beside.rows(done)
    out.write_all(compared)
    summary = beside.agreement(done) | {"total_s": time.perf_counter() - started}
    out.write({"kind": "summary"} | summary)
    beside.print_all(console, [*compared, *found], summary)
    return summary["matched"]


def describe(
    args: argparse.Namespace, lm: loading.LanguageModel, threads: int
) -> dict[str, Any]:
    """What is measured and where, for every row."""
    return {
        **subjects.names(args),
        "drafter": args.drafter,
        "draft_gguf": args.draft_gguf,
        "dtype": lm.target.config.dtype,
        "impl": lm.target.impl,
        "native_isa": dispatch.instruction_set(lm.target.impl),
        "slab": lm.target.slab,
        "gamma": args.gamma,
        "page_size": args.page_size,
        "prompt_source": None if args.preset else args.prompts,
        "gen_tokens": args.gen_tokens,
        "repeats": args.repeats,
        "llama_cpp": {"threads": threads},
        **records.provenance(),
    }


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    with records.open_out(args) as out, tempfile.TemporaryDirectory() as folder:
        same = run_all(args, pathlib.Path(folder), out, terminal.console())
    return MATCHED if same else NOT_MATCHED


main = cli.script("compare_llama_cpp.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
