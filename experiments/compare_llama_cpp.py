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
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console

from experiments.lib import (
    beside_llama as beside,
    flags,
    gguf_files,
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
from spec_jax.model import hub


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    group = parser.add_argument_group("models")
    flags.add_models(group, has_mesh=False)
    subjects.add_presets(group)
    flags.add_drafters(group, default="draft-model")
    build = parser.add_argument_group("llama.cpp")
    cli.add(
        build,
        """
        --llama-bin DIR  of a build: the folder of llama-bench, llama-completion and
            llama-speculative-simple (docs/measurements.md says how to build them);
            heads are converted by the script in the sources that it is of
        --gguf FILE,...  the target as llama.cpp is to read it, in the place of a file
            that is written here; of the second and later ones, quantised otherwise, it
            decodes plainly, too
        --threads N  of llama.cpp (default: as many as there are cores)
        --limit-s SECONDS=600  the longest that one of its programs may take
        """,
        **{"SECONDS": float, "FILE,...": cli.names(cli.source)},
    )
    runs = parser.add_argument_group("runs")
    flags.add_rounds(runs, gammas="4")
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
    known = ", ".join(llama_cpp.SPEC_TYPES)
    for name in args.drafter:
        if name not in llama_cpp.SPEC_TYPES:
            parser.error(f"--drafter {name}: llama.cpp is compared on {known}")
    args.gguf = args.gguf or ()
    if args.gguf and args.preset:
        parser.error("--gguf is of a --target: a preset has random weights")
    if args.preset and (args.no_steps or args.drafter != ("draft-model",)):
        parser.error("--preset has steps alone, of models")
    return args


def load(args: argparse.Namespace) -> models.Drafters:
    """Our side, with the slab that it has by default."""
    sizes = {"gamma_max": max(args.gamma), "dtype": args.dtype, "impl": args.impl}
    first, *others = args.drafter
    if args.preset:
        slab = max(loading.TARGET_SLAB, sizes["gamma_max"] + 1)
        names = args.preset, args.draft_preset
        return {first: subjects.preset_lm(*names, slab=slab, **sizes)}
    lm = loading.load(args.target, draft=args.draft, drafter=first, **sizes)
    words = prompts_lib.with_options(args, lm.tokenizer)
    lm = dataclasses.replace(lm, tokenizer=words)
    return {first: lm} | {name: models.with_drafter(args, lm, name) for name in others}


def write_gguf(
    args: argparse.Namespace,
    lms: models.Drafters,
    build: llama_cpp.Build,
    folder: pathlib.Path,
) -> tuple[pathlib.Path, dict[str, pathlib.Path]]:
    """The target, and each drafter, for the other side: heads by its own converter."""
    lm, drafts = next(iter(lms.values())), {}
    target = args.gguf[0] if args.gguf else folder / "target.gguf"
    if not args.gguf:
        gguf_files.write(target, lm.target.config, lm.params, lm.tokenizer)
    for name, one in lms.items():
        path = folder / f"{name}.gguf"
        if name in registry.NEED_NOTHING:
            continue
        if name not in registry.NEED_TARGET:
            if one.drafter is None:  # Of a preset alone.
                continue
            config = one.drafter.model.config
            gguf_files.write(path, config, one.drafter_params, lm.tokenizer)
        else:
            heads = loading.heads_for(args.target)
            model = hub.locate(args.target or loading.EMBEDDED_TARGET)
            if not model.is_dir():  # Its converter reads folders.
                model = folder / "target"
                lm.save(model)
            llama_cpp.convert(
                build,
                args.draft or registry.shipped_head(name, heads),
                model,
                path,
                pre_tokenizer=gguf_files.pre_tokenizer_of(lm.tokenizer),
                dtype=lm.target.config.dtype,
            )
        drafts[name] = path
    return target, drafts


def run_prompts(
    args: argparse.Namespace, sides: beside.Sides, subject: models.Subject, out: Any
) -> list[dict[str, Any]]:
    """The figures of all prompts; a row of each is written when it is known."""
    results.warm_up(sides.designs(), subject.ids)
    done = []
    with terminal.counted("prompts", total=len(subject.prompts)) as advance:
        for prompt, ids in zip(subject.prompts, subject.ids, strict=True):
            done.append(beside.run_prompt(sides, prompt, ids, repeats=args.repeats))
            out.write(done[-1].row())
            advance()
    return beside.rows(done)


def run_steps(
    args: argparse.Namespace, lms: models.Drafters, **files: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The figures of steps, and what llama.cpp's build says of itself."""
    lm = lms.get("draft-model") or next(iter(lms.values()))
    with terminal.counted("turns of steps", total=args.repeats + 1) as advance:
        return beside.measure_steps(
            lm,
            page_size=args.page_size,
            repeats=args.repeats,
            after_turn=advance,
            **files,
        )


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
    gguf_files.check_installed()
    lms = load(args)
    target, drafts = write_gguf(args, lms, build, folder)
    lm, found = next(iter(lms.values())), []
    out.common = describe(args, lm, threads)
    if not args.no_steps:
        draft = drafts.get("draft-model")
        found, described = run_steps(args, lms, build=build, target=target, draft=draft)
        out.common |= {"llama_cpp": described | {"threads": threads}}
        out.write_all(found)
    if not args.preset:
        subject = models.prepare(args, lm, args.prompts, stop_ids=lm.stop_ids)
        sides = beside.Sides(
            lms=lms,
            settings=subject.settings,
            gammas=args.gamma,
            build=build,
            target=target,
            drafts=drafts,
            others={path.stem: path for path in args.gguf[1:]},
        )
        of_prompts = run_prompts(args, sides, subject, out)
        out.write_all(of_prompts)
        found = [*of_prompts, *found]
    beside.print_all(console, found)
    return all(row["same_ours"] == row["prompts"] for row in found if "prompts" in row)


def describe(
    args: argparse.Namespace, lm: loading.LanguageModel, threads: int
) -> dict[str, Any]:
    """What is measured and where, for every row."""
    return {
        **models.describe(args, lm),
        **subjects.names(args),
        "drafter": args.drafter,
        "gamma": args.gamma,
        "prompt_source": None if args.preset else args.prompts,
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
