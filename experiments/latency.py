"""How long does a step take: of decoding, of a window, of the draft, of a round?

Steps are timed inside compiled calls, in turns, in one process, on the same weights;
with --forced whole generations too, at an acceptance that is stated. (compare_hf.py
compares whole runs with Hugging Face's.) Exit status: 0 measured, 2 something failed or
tokens differ at forced acceptance, 1 the input was unusable.
"""

import argparse
import collections
import contextlib
import functools
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from experiments.lib import (
    bench,
    cli,
    flags,
    forced_rounds,
    models as models_lib,
    records,
    steps,
    subjects,
    tables,
    works as works_lib,
)
from spec_jax import loading


GPU = "NVIDIA H200"
"""The GPU for which Pallas lowers on a machine without one."""

MOST_NAMES = 40
"""How many kernels of a profiler's trace are listed, the longest first."""


FLAGS = """
    [models] models
        --preset PRESET  a target of random weights in that shape, mostly a released
            model's
        --draft-preset PRESET  a draft, likewise
        --head HEAD  a head of random weights drafts for --preset, in the shape of
            published ones, as many tokens as those do
        --head-tree ROWS  it drafts trees of so many rows: of seven first children, and
            of their siblings
    [steps] gamma page-size repeats=20 gen-tokens temperature noise device
        --contexts TOKENS+=64,256,1024  context lengths of a plain step; everything else
            is measured at the first of them
        --rows N,N,...  active rows of a window, the most of them at every context
            (default: 1 to gamma + 1 where there is a draft, at the first context; none
            with --head)
        --prefill N,N,...  prompt lengths to be prefilled (default: none)
        --steps N  steps of one timed call (default: 20; with --preset 4)
        --no-steps  leave the costs of steps out
        --trace FOLDER  a profiler's trace of a call of plain steps and, where there is
            a draft, of rounds
        --forced RATE,RATE,...  generate after the first context with so many of the
            proposed tokens accepted, whatever the draft proposes; of a --head also
            mt-bench and gsm8k, for what is published of it (default: not)
        --gammas K,K,...  tokens drafted a round at forced acceptance (default: that of
            --gamma)
        --dry-run  run nothing: trace and lower every program, for a GPU with --device
            gpu wherever this is, and compile it where there is one
    [out] one per step, then one summary
    """
KINDS = {
    "PRESET": sorted(subjects.PRESETS),
    "HEAD": subjects.HEADS,
    "FOLDER": pathlib.Path,
    "RATE,RATE,...": cli.names(forced_rounds.rate),
}


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses flags that do not go together, and fills in what depends on others."""
    has_draft = args.draft_preset or args.draft or args.head
    is_alone = not has_draft and (args.preset or args.target)
    of_data = any(isinstance(rate, str) for rate in args.forced or ())
    rows, least, most = args.head_tree, subjects.HEAD_DRAFTS + 1, subjects.MOST_ROWS
    for is_so, words in (
        (args.preset and args.target,
         "--preset brings its own weights: leave out --target and --draft"),
        (args.draft_preset and not args.preset,
         "--draft-preset goes with --preset, which names the target"),
        (args.head and (not args.preset or args.draft_preset),
         "--head drafts for a --preset, in the place of --draft-preset"),
        (rows is not None and not (args.head and least <= rows <= most),
         f"--head-tree {rows} is of --head, and from {least} to {most} rows"),
        (args.forced and is_alone, "--forced needs a draft: name one with "
         f"{'--draft-preset' if args.preset else '--draft'}"),
        (of_data and not args.head,
         "--forced with the name of a data set is of a --head"),
        (args.head and args.gammas,
         "--gammas: a --head drafts as many tokens as its published one"),
        (args.dry_run and not args.preset,
         "--dry-run needs a --preset: folders bring weights"),
        (args.forced and args.temperature,
         "--forced decodes greedily: leave --temperature out"),
        (args.gammas and not args.forced,
         "--gammas is of --forced: add that, or leave --gammas out"),
        (args.trace and args.no_steps, "--trace is of steps: leave --no-steps out"),
    ):  # fmt: skip
        if is_so:
            parser.error(words)
    # Steps of a large model are slow, and few of them are enough.
    args.steps = args.steps or (4 if args.preset else 20)
    args.gammas, args.prefill = args.gammas or (args.gamma,), args.prefill or ()
    args.gamma = max(args.gamma, *args.gammas)
    args.slab = max((args.gamma + 1, *(args.rows or ())))


parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS, check=check)


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Loads and measures, writes and prints each row; returns whether all is well."""
    lm = subjects.load(args, gamma_max=args.gamma, slab=args.slab)
    if args.head:  # The head decides how many tokens it drafts.
        args.gamma = lm.gamma_max
        args.gammas = (args.gamma,)
    sizes = {"page_size": args.page_size, "as_shapes": args.dry_run}
    groups = []
    if not args.no_steps:  # Raises for some that cannot be run, before any of them is.
        groups = steps.all_costs(
            lm,
            contexts=args.contexts,
            steps=args.steps,
            rows=args.rows or (() if args.head else None),
            prefills=args.prefill,
            gammas=() if args.head else None,  # A head's rounds are forced.
            sampling=flags.sampling_settings(args),
            **sizes,
        )
    # Generations at forced acceptance, after the first context.
    new = {"lm": lm, "start": args.contexts[0], "num_new": args.gen_tokens}
    make_runs = functools.partial(forced_rounds.Runs, **new, **sizes)
    out.common = models_lib.common(args, lm) | subjects.names(args)
    out.common |= {"gamma_max": None if lm.drafter is None else args.gamma}
    out.common |= {"steps_per_call": args.steps}
    shown = tables.Report(out, COLUMNS)
    if args.dry_run:
        works = [cost.work for group in groups for cost in group]
        works += make_runs().programs(args.gamma) if args.forced else []
        compile_all(args, works, shown)
        return not shown.failed
    for group in groups:
        # Tracing raises `ValueError` for flags that do not fit the kernels.
        measure = lambda g=group: measure_steps(args, lm, g)
        shown.add(group[0].name, measure, raises=(ValueError,))
    traced = (steps.PLAIN, f"round, gamma {args.gamma}")
    for cost in groups[0] if args.trace and groups else ():
        if cost.name in traced:
            call = lambda c=cost: profile(args.trace, c.name, c.case())
            shown.add(cost.name, call)
    how = {"repeats": args.repeats, "head": args.head}
    for gamma in args.gammas if args.forced else ():
        measure = lambda g=gamma: forced_rounds.measure(
            make_runs(), g, args.forced, **how
        )
        shown.add(f"gamma {gamma}", measure)
    return not shown.failed


def compile_all(
    args: argparse.Namespace, works: Sequence[works_lib.Work], shown: tables.Report
) -> None:
    """Traces and lowers every program once, and compiles it where that is possible.

    On a machine without a GPU a program is lowered for a GPU, too: the kernels, their
    plans and the work of Python are those of a machine that has one.
    """
    compiles = args.device == "cpu" or jax.default_backend() == "gpu"
    for name, work in {work.program: work for work in works}.items():
        about = {"kind": "compile", "program": name}
        timed = functools.partial(lower, work.trace, compiles=compiles)
        shown.add(name, lambda of=timed, a=about: [a | of()])


def lower(trace: Callable[[], jax.stages.Traced], *, compiles: bool) -> dict:
    """Returns seconds of each stage, kernels in the lowered text, and memory.

    Args:
      compiles: compile for the device of jax; otherwise only lower, for a GPU.
    """
    times, row = [time.perf_counter()], {"compile_s": None, "temp_bytes": None}
    clock = lambda: times.append(time.perf_counter())
    with (
        contextlib.nullcontext() if compiles else _without_gpu(),
        warnings.catch_warnings(),
    ):
        # A loop does not return all that is donated, such as its counters.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        traced = trace()
        clock()
        lowered = traced.lower(lowering_platforms=None if compiles else ("cuda",))
        clock()
    if compiles:
        memory = lowered.compile().memory_analysis()
        clock()
        row["temp_bytes"] = getattr(memory, "temp_size_in_bytes", None)
    stages = zip(("trace_s", "lower_s", "compile_s"), np.diff(times), strict=False)
    kernels = lowered.as_text().count("stablehlo.custom_call")
    return row | {name: float(s) for name, s in stages} | {"kernels": kernels}


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """Sets a mesh that names the GPU, which Pallas needs from jax 0.11 on."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = jax.sharding.AbstractDevice(
        device_kind=GPU, num_cores=None, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def profile(folder: pathlib.Path, name: str, call: Callable[[], Any]) -> list[dict]:
    """Traces one call after a first one; returns a row of each kernel, longest first.

    On a GPU times are `own_times`; on a CPU, where calls nest, they are durations.

    Args:
      folder: where the trace is kept, for a viewer.
    """
    call()
    with jax.profiler.trace(str(folder / name)):
        call()
    path = sorted((folder / name).rglob("*.xplane.pb"))[-1]
    is_gpu = jax.default_backend() == "gpu"
    took, counts = collections.Counter(), collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            if is_gpu and not ("GPU" in plane.name and "Stream" in line.name):
                continue
            events = list(line.events)
            times = [event.duration_ns for event in events]
            if is_gpu:
                times = own_times([(e.start_ns, e.duration_ns) for e in events])
            for event, time_ns in zip(events, times, strict=True):
                took[event.name] += time_ns
                counts[event.name] += 1
    total = sum(took.values())
    return [
        {
            "kind": "trace",
            "program": name,
            "event": event,
            "calls": counts[event],
            "own_us": nanoseconds / 1e3,
            "share": nanoseconds / total,
        }
        for event, nanoseconds in took.most_common(MOST_NAMES)
    ]


def own_times(events: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the time that each kernel adds to its stream, in the order given.

    It lasts from the end of the kernels before to the kernel's own end: in programmatic
    dependent launch kernels overlap, and durations count that time twice.

    Args:
      events: the start and the duration of each.
    """
    starts, durations = np.array(events).reshape(-1, 2).T
    order = np.lexsort((durations, starts))
    ended = np.maximum.accumulate((starts + durations)[order])
    own = np.empty_like(starts)
    own[order] = np.diff(ended, prepend=starts[order[:1]])
    return own.tolist()


def measure_steps(
    args: argparse.Namespace, lm: loading.LanguageModel, group: Sequence[steps.Cost]
) -> list[dict[str, Any]]:
    """Times costs in turns; for the first group, which has reads, adds a summary.

    The order is reversed: reading a lot of memory empties the caches, and the steps
    after it should not be the plain ones, with which all others are compared.
    """
    cases = {cost.name: cost.case for cost in reversed(group)}
    timings = bench.run(cases, repeats=args.repeats)
    rows, is_first = steps.rows(group, timings), steps.READ in timings.seconds
    if not is_first:  # The first row is the plain step, which others are compared with.
        return rows[1:]
    return [*rows, steps.bandwidth(lm.params, timings.seconds)]


COLUMNS = {
    "step": {
        "step": "",
        "context": ",d",
        **dict.fromkeys(("ms", "ms_p10", "ms_p90"), ".3f"),
        "ratio": ".2f",
        "ratio_to": "",
    },
    "summary": {"step_bytes": ",d", "read_gb_s": ".1f", "bandwidth_share": ".2f"},
    "rounds": {
        "gamma": "d",
        "forced_rate": "",
        "acceptance_rate": ".2f",
        "tokens_per_target_step": ".2f",
        **dict.fromkeys(("plain_ms", "spec_ms", "round_ms"), ".3f"),
        "speedup": ".2f",
        "matched": "",
        "differing_kv": ",d",
    },
    "compile": {
        "program": "",
        **dict.fromkeys(("trace_s", "lower_s", "compile_s"), ".2f"),
        **dict.fromkeys(("kernels", "temp_bytes"), ",d"),
    },
    "trace": {"event": "", "calls": ",d", "own_us": ",.1f", "share": ".3f"},
}
"""Columns of the table of each kind of rows."""


main = records.script("latency.py", parse_args, run)
