"""Which drafter and which gamma pay, evaluated without running the target?

A lossless round keeps the drafts that autoregressive decoding would have written, so
its text decides which. `--record` writes that text down once; every drafter is then
evaluated on these traces, in the very loop that runs live. Heads read the target while
it runs: `sweep.py` evaluates them.

    python experiments/replay.py --record traces.jsonl --prompts 50
    python experiments/replay.py traces.jsonl --drafter ngram,suffix --gamma 2,4

Exit status: 0 recorded, or evaluated; 2 a text to be recorded is of logits that are not
finite; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich import console as rich_console

from experiments.lib import (
    files,
    flags,
    models,
    records,
    runs,
    step_costs,
    tables,
    terminal,
)
from spec_jax import algorithms, loading
from spec_jax.analysis import metrics, trace as trace_lib
from spec_jax.drafters import oracle, registry
from spec_jax.engine import checks, scheduler as scheduler_lib
from spec_jax.gamma import theory
from spec_jax.model import fingerprint, tokenizer
from spec_jax.paging import index
from spec_jax.rules import sampling


DONE = 0
FORMAT = 3
"""Version of the file of traces; files of another are refused."""

SAMPLING = ("temperature", *flags.NOISE, "seed")
RECORDING = ("target", "dtype", "impl", "prompts", "gen_tokens", "page_size", "raw")
RECORDING += ("chat_option", *SAMPLING)
EVALUATING = ("draft", "drafter", "costs", "out")
"""Flags that are of one of the two alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What decides the tokens of the traces: the first line of their file."""

    target: str  # the folder, or "embedded"
    weights_sha256: str
    vocabulary: str  # fingerprint of the tokenizer
    vocab_size: int
    dtype: str
    impl: str  # a resolved implementation
    slab: int  # rows of every call, which bounds the gammas of rounds
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    seed: int
    stop_ids: tuple[int, ...]  # at which rounds end; the traces go on after them
    gen_tokens: int  # of every trace
    page_size: int
    prompt_source: str  # what `--prompts` said
    num_prompts: int  # lines that follow

    @property
    def settings(self) -> sampling.SamplingSettings | None:
        """How the target drew; None is greedy."""
        made = {name: getattr(self, name) for name in SAMPLING}
        return sampling.make_settings(**made) if self.temperature else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """One prompt, and what decoding wrote after it, past stop tokens."""

    id: str
    prompt_ids: list[int]
    generated_ids: list[int]

    @property
    def text(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_ids, *self.generated_ids]

    def until_stop(self, stop_ids: Sequence[int]) -> list[int]:
        """The output up to its first stop token, which is kept: that of decoding."""
        ends = [n for n, token in enumerate(self.generated_ids, 1) if token in stop_ids]
        return self.generated_ids[: ends[0] if ends else None]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "traces",
        nargs="?",
        type=cli.source,
        metavar="FILE",
        help="traces to evaluate drafters on, written by --record",
    )
    flags.add_models(parser.add_argument_group("models"), has_mesh=False)
    group = parser.add_argument_group("recording")
    cli.add(group, "--record FILE  decode the prompts, once, and write their traces")
    flags.add_prompts(group, default="10")
    flags.add_gen_tokens(group, default=64)
    flags.add_page_size(group)
    flags.add_raw(group)
    flags.add_sampling(parser.add_argument_group("sampling of what is recorded"))
    group = parser.add_argument_group("evaluation")
    replayed = [n for n in registry.names() if n not in registry.NEED_TARGET]
    flags.add_drafters(group, default=",".join(replayed))
    cli.add(
        group,
        """
        --gamma TOKENS,...=1,2,4,7  tokens drafted per round: a row for each; none may
            be above the largest of the recording
        --costs FILE  step costs to expect speeds from: rows of latency.py --out, or a
            JSON object with plain_s, verify_s by rows, and draft_s
        """,
        FILE=cli.source,
    )
    flags.add_out(group, rows="one per drafter and gamma, as the table shows them")
    args = parser.parse_args(argv)
    if (args.traces is None) == (args.record is None):
        parser.error("name one file: FILE to evaluate drafters on, or --record FILE")
    names, why = EVALUATING, "is of evaluation: leave it out of --record"
    if args.record is None:
        names, why = RECORDING, "is what the traces say: record again, or leave it out"
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"{cli.flag_of(name)} {why}")
    flags.check_isa(parser, args)
    flags.check_sampling(parser, args)
    return args


#
# Traces
#


def record(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Decodes the prompts and writes their traces; returns the exit status."""
    drawn = flags.sampling_settings(args)
    lm = models.load(args, drafter="ngram", gamma_max=max(args.gamma))
    # Rounds verify drafts after a stop token, too, before it cuts.
    subject = models.prepare(args, lm, args.prompts, sampling=drawn, stop_ids=())
    header = Header(
        target=str(args.target or "embedded"),
        weights_sha256=fingerprint.of_params(lm.params),
        vocabulary=lm.tokenizer.fingerprint,
        vocab_size=lm.target.config.vocab_size,
        dtype=lm.target.config.dtype,
        impl=lm.target.impl,
        slab=lm.target.slab,
        stop_ids=tuple(lm.stop_ids),
        prompt_source=args.prompts,
        num_prompts=len(subject.prompts),
        **{name: getattr(args, name) for name in SAMPLING},
        **{name: getattr(args, name) for name in ("gen_tokens", "page_size")},
    )
    with records.open_rows(args.record, allow_dirty=args.allow_dirty) as out:
        about = {"kind": "traces", "format": FORMAT, **dataclasses.asdict(header)}
        about |= {"raw": args.raw, "chat_option": args.chat_option}
        out.write(about | records.provenance())
        pairs = zip(subject.prompts, subject.ids, strict=True)
        with terminal.counted("prompts", total=len(subject.prompts)) as advance:
            for prompt, ids in pairs:
                new = runs.write(lm, subject.settings, ids)
                one = Trace(id=prompt.id, prompt_ids=ids, generated_ids=new)
                out.write({"kind": "trace", **dataclasses.asdict(one)})
                advance()
    console.print(
        f"{header.num_prompts} prompts x {header.gen_tokens} tokens of decoding, "
        f"{header.dtype}, impl {header.impl}: {args.record}",
        soft_wrap=True,
    )
    return DONE


def read(path: pathlib.Path) -> tuple[Header, list[Trace]]:
    """Reads and checks a file of traces.

    Raises:
      ValueError: a file that cannot be read, is damaged, unfinished, of another format
        or of something else.
    """
    again = "write traces with replay.py --record"
    found = files.read_rows(path, hint=f"; {again}")
    if not found:
        raise ValueError(f"{path}: is empty; {again}")
    (_, first), *others = found.items()
    if (first.get("kind"), first.get("format")) != ("traces", FORMAT):
        raise ValueError(f"{path}: has no header of traces of format {FORMAT}; {again}")
    header = files.checked(first, Header, f"{path}, line 1")
    traces = [files.checked(row, Trace, f"{path}, line {n}") for n, row in others]
    lengths = {len(one.generated_ids) for one in traces}
    if len(traces) != header.num_prompts or lengths != {header.gen_tokens}:
        raise ValueError(
            f"{path}: has {len(traces)} traces of {sorted(lengths)} tokens, and its "
            f"header says {header.num_prompts} of {header.gen_tokens}; {again}"
        )
    return header, traces


#
# Evaluation
#


def replay(
    header: Header, built: registry.Built, trace: Trace, *, gamma: int, capacity: int
) -> tuple[metrics.Counters, np.ndarray]:
    """Replays one prompt by a drafter with its parameters.

    Args:
      capacity: positions of all caches, whole pages.

    Returns:
      The counters, and verifications by their active rows `[slab + 1]`: what the target
      would have computed.
    """
    (drafter, params), size = built, capacity + 1
    target = trace_lib.TraceTarget(max_rows=header.slab, size=size)
    text = trace_lib.make_trace(trace.text, size=size)
    trace_lib.check_request(text, trace.prompt_ids, header.gen_tokens)
    algo, known = algorithms.speculative(target, drafter), None
    if isinstance(drafter, oracle.Oracle):
        # What a live oracle is told: the text of decoding, to its stop token.
        decoded = trace.until_stop(header.stop_ids)
        known = oracle.make_trace([*trace.prompt_ids, *decoded])
    request = scheduler_lib.Request(
        prompt=trace.prompt_ids,
        max_tokens=header.gen_tokens,
        gamma=gamma,
        sampling=header.settings,
        target_params=text,
        draft_params=known,
    )
    sizes = {"capacity": capacity, "page_size": header.page_size}
    state = algo.scheduler(
        (None, params), num_slots=1, stop_ids=header.stop_ids, **sizes
    ).begin(request)
    state = algo.run((None, params), state)
    checks.check_pages(state.slots.status, state.slots.length, state.cache)
    slot = scheduler_lib.slot_of(jax.device_get(state.slots), 0)
    num_tokens = int(slot.length) - len(trace.prompt_ids)
    counters = metrics.of_slot(slot, num_tokens=num_tokens)
    return counters, np.asarray(state.cache.num_forwards)


def build(args: argparse.Namespace, header: Header) -> dict[str, registry.Built]:
    """Returns the drafters by name, as a live run has them; reads no target.

    Raises:
      ValueError: a drafter that reads its target, a draft of another vocabulary, or a
        gamma that is not drafted.
    """

    def load_draft():
        folder = args.draft or loading.EMBEDDED_DRAFT
        how = {"gamma_max": max(args.gamma), "dtype": header.dtype}
        words = tokenizer.load(folder)
        drafter, params = loading.load_draft(folder, words, impl=header.impl, **how)
        ours = words.fingerprint, drafter.vocab_size
        if ours != (header.vocabulary, header.vocab_size):
            raise ValueError(
                f"{folder}: a draft of another vocabulary than that of the traces; "
                f"give the --draft that goes with {header.target}"
            )
        return drafter, params

    parts = registry.Parts(
        gamma_max=max(args.gamma),
        vocab_size=header.vocab_size,
        load_draft=load_draft,
        draft=args.draft,
        dtype=header.dtype,
    )
    built = {}
    for name in args.drafter:
        if registry.reads_target(name, args.draft):
            raise ValueError(
                f"--drafter {name} reads its target, which a trace does not have: "
                "evaluate it by sweep.py"
            )
        built[name] = registry.build(name, parts)
        models.check_gamma(name, built[name][0], max(args.gamma))
    return built


def evaluate(args: argparse.Namespace, console: rich_console.Console) -> int:
    """Evaluates the drafters, and shows it; returns the exit status."""
    header, traces = read(args.traces)
    if max(args.gamma) + 1 > header.slab:
        raise ValueError(
            f"{args.traces}: recorded for windows of at most {header.slab} rows, which "
            f"is gamma {header.slab - 1}, and --gamma has {max(args.gamma)}; record "
            "again with it"
        )
    curves = {} if args.costs is None else step_costs.read(args.costs, args.drafter)
    for curve in curves.values():
        curve.round_s(max(args.gamma))  # Raises where its table is too short.
    pages = index.pages_for(max(len(t.text) for t in traces), header.page_size)
    capacity = pages * header.page_size
    built, found = build(args, header), []
    with records.open_out(args) as out:
        out.common = dataclasses.asdict(header) | {
            "draft": models.draft_of(args),
            "traces_sha256": files.sha256(args.traces),
            "costs_sha256": args.costs and files.sha256(args.costs),
            **records.provenance(),
        }
        total = len(built) * len(args.gamma) * len(traces)
        with terminal.counted("replays", total=total) as advance:
            for name, gamma in itertools.product(built, args.gamma):
                how, done = {"gamma": gamma, "capacity": capacity}, []
                for trace in traces:
                    done.append(replay(header, built[name], trace, **how))
                    advance()
                row = {"kind": "replay", "drafter": name, "gamma": gamma}
                row |= summarise(header, traces, done, curves.get(name))
                found.append(row)
                out.write(row)
    left_out = () if curves else ("expected speed-up",)
    columns = {name: c for name, c in COLUMNS.items() if name not in left_out}
    tables.print_rows(found, columns, console)
    return DONE


def summarise(
    header: Header,
    traces: Sequence[Trace],
    done: Sequence[tuple[metrics.Counters, np.ndarray]],
    curve: theory.CostCurve | None,
) -> dict[str, Any]:
    """Returns the numbers of a row, of all replays of a drafter with one gamma."""
    counted, forwards = zip(*done, strict=True)
    texts = [trace.until_stop(header.stop_ids) for trace in traces]
    total, num_forwards = metrics.total(counted), np.sum(forwards, axis=0)
    summary = metrics.summarise(
        total,
        prompts=len(traces),
        texts=list(map(metrics.text_counts, texts, counted)),
        matched=None,
        verify_decode_mismatches=None,
    )
    expected = None
    if curve is not None:
        seconds = step_costs.expected_seconds(curve, num_forwards)
        expected = total.tokens * curve.plain_s / seconds
    untold = "baseline_ spec_ speedup_ matched verify_decode_ nonfinite_logits"
    found = {k: v for k, v in summary.items() if not k.startswith((*untold.split(),))}
    return found | {"rounds_by_rows": num_forwards, "expected_speedup": expected}


COLUMNS: dict[str, tables.Column] = {
    "drafter": "",
    "gamma": "d",
    "acceptance": ("acceptance_rate", ".3f"),
    "repetition": ".3f",
    "tokens a round": ("mean_accepted_length", ".2f"),
    "rounds": ",d",
    "tokens a step": ("tokens_per_target_step", ".2f"),
    "expected speed-up": ("expected_speedup", ".2f"),
}


def run(args: argparse.Namespace) -> int:
    """Records or evaluates; returns the exit status."""
    return (evaluate if args.record is None else record)(args, terminal.console())


main = cli.script("replay.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
