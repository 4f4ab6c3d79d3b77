"""How fast is decoding compared with llama.cpp's, on the same weights and prompts?

Runs llama-bench, llama-completion and llama-speculative-simple of a build of llama.cpp
in turns with ours, on GGUF files of the target; compares what either side drafts and
keeps, and the texts, which need not be equal: the sides round differently. llama.cpp's
clock is its own, without loading, warming up and printing. Exit status: 0 measured, 2
our drafted text is not that of our decoding, 1 the input was unusable.
"""

import argparse
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lib import (
    bench,
    cli,
    compare,
    flags,
    llama_cpp,
    models,
    processes,
    records,
    runs as runs_lib,
    steps,
    subjects,
    tables,
    terminal,
)
from spec_jax import loading
from spec_jax.analysis import metrics
from spec_jax.drafters import registry
from spec_jax.model import eagle3_files, gguf_file, head_dialects


PLAIN, THEIRS = compare.PLAIN, "llama.cpp"
BOTH = ("ours", "theirs")
CONTEXT = 32
"""The context of our steps: the mean of `TOKENS` steps from an empty cache."""
TOKENS = 64
ROWS, PREFILLS = (5, 8), (64, 512)
BENCH_REPEATS = 3
"""Repetitions of each test in one turn of llama-bench, which is one process."""

TESTS = {
    "plain step": (steps.PLAIN, f"tg{TOKENS}"),
    **{f"{n} rows": (f"{n} active rows", f"pp{n}") for n in ROWS},
    **{f"prompt of {n}": (f"prefill of {n}", f"pp{n}") for n in PREFILLS},
}
"""Our name of a step, and llama-bench's, by its name in the table."""


FLAGS = """
    [models] models drafters=ngram
    [llama.cpp]
        --llama-bin DIR  of a build: the folder of llama-bench, llama-completion and
            llama-speculative-simple (docs/measurements.md says how to build them);
            heads are converted by the script in the sources that it is of
        --gguf FILE,...  the target as llama.cpp is to read it; of the second and later
            ones, quantised otherwise, it decodes plainly, too
    [runs] gammas=4 page-size prompts=50 gen-tokens repeats=3 raw
        --no-steps  leave llama-bench and our steps out
    [out] one per prompt as it finishes, then figures
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses a lack of programs and files, and drafters that they do not have."""
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


KINDS = {"FILE,...": cli.names(pathlib.Path)}
parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS, check=check)


def generate(
    args: argparse.Namespace,
    settings: runs_lib.Settings,
    drafts: Mapping[str, pathlib.Path],
    run: compare.Run,
    prompt: list[int],
) -> compare.Generated:
    """Generates once on their side; raises as `llama_cpp.generate`.

    Args:
      drafts: GGUF files of heads, by the names of the drafters.
    """
    first, *others = args.gguf
    return llama_cpp.generate(
        args.llama_bin,
        {path.stem: path for path in others}.get(run.method, first),
        compare.bytes_of(settings.lm, prompt),
        num_prompt=len(prompt),
        max_tokens=settings.gen_tokens,
        capacity=settings.capacity,
        gamma=run.gamma,
        drafter=run.method,
        draft=drafts.get(run.method),
    )


def convert(
    args: argparse.Namespace, lm: loading.LanguageModel, folder: pathlib.Path
) -> dict[str, pathlib.Path]:
    """Writes heads as GGUF by llama.cpp's converter; returns the files by drafter."""
    heads = [name for name in args.drafter if name not in registry.NEED_NOTHING]
    made = {name: folder / f"{name}.gguf" for name in heads}
    if heads:  # The converter reads the target from a folder.
        lm.save(folder / "target")
    for name, path in made.items():
        shipped = registry.shipped_head(name, loading.heads_for(args.target))
        llama_cpp.convert(
            args.llama_bin,
            _whole(args.draft or shipped, name, lm, folder / name),
            folder / "target",
            path,
            pre_tokenizer=gguf_file.header(args.gguf[0]).fields["tokenizer.ggml.pre"],
            dtype=lm.target.config.dtype,
        )
    return made


def _whole(
    head: pathlib.Path, name: str, lm: loading.LanguageModel, folder: pathlib.Path
) -> pathlib.Path:
    """Returns the folder of a head that has all its weights: a copy in `folder`, if
    its output projection is the target's."""
    if name != "eagle3":
        return head
    target = lm.target.config
    config, params = eagle3_files.load(head, target, lm.params)
    if not config.shares_head:
        return head
    config = dataclasses.replace(config, shares_head=False)
    origin = head_dialects.Origin(target=target, target_name=str(head))
    eagle3_files.save(folder, config, params, dialect="midlayer", origin=origin)
    return folder


def measure_steps(
    args: argparse.Namespace, lm: loading.LanguageModel
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Times steps of both sides in turns; returns rows, and facts of the build."""
    alone = dataclasses.replace(lm, drafter=None)
    how = {"contexts": (CONTEXT,), "rows": ROWS, "prefills": PREFILLS, "steps": 20}
    (group,) = steps.all_costs(alone, **how, page_size=args.page_size)
    costs = {cost.name: cost.case for cost in group}
    turns: list[tuple[dict[str, float], dict[str, str]]] = []

    def of_theirs() -> float:
        sizes = {"prompts": (*ROWS, *PREFILLS), "tokens": TOKENS}
        how = {"repeats": BENCH_REPEATS, **sizes}
        turns.append(llama_cpp.bench(args.llama_bin, args.gguf[0], **how))
        return 0.0

    cases = {name: costs[cost] for name, (cost, _) in TESTS.items()}
    ours = bench.run(cases | {THEIRS: lambda: of_theirs}, repeats=args.repeats)
    # The first turn of theirs was a warm-up; `bench.run` leaves out that of ours.
    (_, described), *timed = turns
    return [
        compared(name, "ms", ours.seconds[name], [found[test] for found, _ in timed])
        for name, (_, test) in TESTS.items()
    ], described


def compared(
    name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], **more: Any
) -> dict[str, Any]:
    """Returns a figure's row: both sides in `unit`, and how many times faster ours is.

    Args:
      ours, theirs: seconds of each turn.
    """
    return {
        "kind": "comparison",
        "figure": name,
        "unit": unit,
        **bench.spread_fields("ours", [1e3 * s for s in ours]),
        **bench.spread_fields("theirs", [1e3 * s for s in theirs]),
        **bench.spread_fields("ratio", bench.ratios(theirs, ours)),
        "n": len(ours),
        **more,
    }


def rows(prompts: Sequence[compare.PromptRuns]) -> list[dict[str, Any]]:
    """Returns rows of plain and of speculative decoding, over all prompts of a turn.

    A row "decode" has a token's time after the prompt; a row "end to end", all the time
    over all tokens. The last row has our fastest speculative run and their fastest run.
    """
    made, every = [], list(prompts[0].every)
    e2e = {run: compare.per_token(prompts, run) for run in every}
    for theirs in (run for run in every if run.side == THEIRS):
        # A file that llama.cpp alone reads is compared with our plain decoding.
        ours = dataclasses.replace(theirs, side=compare.OURS)
        ours = ours if ours in every else compare.OUR_PLAIN
        kind, both = theirs.method, (ours, theirs)
        if theirs.gamma is not None:
            kind += f", {theirs.gamma} drafted"
        elif theirs.method != PLAIN:
            kind = f"{PLAIN}, {kind} there"
        same = [sum(p.first_difference(run) is None for p in prompts) for run in both]
        more: dict[str, Any] = {"prompts": len(prompts)}
        more |= {"same_ours": same[0], "same_theirs": same[1]}
        if ours.gamma:
            more["drafts"] = {}
            for name, run in zip(BOTH, both, strict=True):
                total = compare.counted(prompts, run)
                a_round = metrics.ratio(total.accepted, total.rounds)
                kept = compare.drafts(total) | {"accepted_per_round": a_round}
                more["drafts"][name] = kept
        decode = [compare.per_token(prompts, run, whole=False) for run in both]
        made += [
            compared(f"{kind}: decode", "ms/token", *decode),
            compared(f"{kind}: end to end", "ms/token", e2e[ours], e2e[theirs], **more),
        ]
    theirs = [each for run, each in e2e.items() if run.side == THEIRS]
    drafted = [each for run, each in e2e.items() if run.side != THEIRS and run.gamma]
    fastest = min(drafted, key=sum), min(theirs, key=sum)
    name = "the fastest that drafts, and the fastest of theirs: end to end"
    return [*made, compared(name, "ms/token", *fastest)]


def _shown(row: tables.Row) -> str:
    """Returns a cell: how many texts are equal, and how many drafts a round keeps."""
    if "prompts" not in row:
        return ""
    words = "{same_ours}, {same_theirs} of {prompts}".format_map(row)
    if "drafts" in row:
        kept = [row["drafts"][side]["accepted_per_round"] for side in BOTH]
        words += f"; {terminal.format_value(kept, '.3f')} kept"
    return words


COLUMNS = {
    "figure": "",
    "unit": "",
    "llama.cpp": ("theirs", ".3f"),
    "ours": ".3f",
    "times faster": ("ratio", ".2f"),
    "p10": ("ratio_p10", ".2f"),
    "p90": ("ratio_p90", ".2f"),
    "texts": _shown,
}
"""The columns of the table, for `tables.print_rows`."""

NOTE = (
    "texts: how many of ours, and of llama.cpp's, are those of our plain decoding, and "
    "the drafts kept a round; ours must be, and those of llama.cpp, which keeps K/V in "
    "float16 and adds in another order, need not"
)


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Loads models, measures, writes and prints rows; returns whether all is well."""
    programs = [args.llama_bin / name for name in llama_cpp.PROGRAMS]
    for path in (*args.gguf, *programs):
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; name the folder `bin` of a build of llama.cpp, "
                "and files of its llama-quantize, see docs/measurements.md"
            )
    subjects.check_device("cpu")
    # None: the model's default slab.
    how = {"gamma_max": max(args.gamma), "slab": None}
    lms, found = models.load_drafters(args, args.drafter, **how), []
    lm, theirs = lms[args.drafter[0]], {"threads": processes.usable_cores()}
    out.common = models.common(args, lm, "drafter", "gamma") | {"llama_cpp": theirs}
    subject = models.prepare(args, lm, args.prompts, stop_ids=lm.stop_ids)
    ours = {"lms": lms, "settings": subject.settings}
    with tempfile.TemporaryDirectory() as folder:
        drafts = convert(args, lm, pathlib.Path(folder))
        by_theirs = functools.partial(generate, args, subject.settings, drafts)
        sides = compare.Sides(**ours, program=THEIRS, theirs=by_theirs)
        # Plain runs of the other files, by their names.
        others = [compare.Run(side=THEIRS, method=x.stem) for x in args.gguf[1:]]
        if not args.no_steps:
            found, described = measure_steps(args, lm)
            out.common |= {"llama_cpp": described | theirs}
            out.write_all(found)
        how = {"reference": compare.OUR_PLAIN, "repeats": args.repeats}
        ways = sides.ways(args.gamma) + others
        done = compare.run_prompts(sides, ways, subject, out, **how)
    of_prompts = rows(done)
    out.write_all(of_prompts)
    tables.print_rows([*of_prompts, *found], COLUMNS)
    tables.print_note(NOTE)
    return all(one.matched for one in done)


main = records.script("compare_llama_cpp.py", parse_args, run)
