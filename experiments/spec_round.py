"""Does speculative decoding commit the target's own tokens, and how fast is it?

Runs every prompt plain and speculatively, interleaved in one process, and compares
all tokens; then replays the committed text through plain decoding and counts the
verified positions whose argmax differs. Exit status: 0 matched, 2 not matched, 1 the
input was unusable.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from rich import console as rich_console

from experiments.support import (
    flags,
    model_pair,
    paired_runs,
    prompt_files,
    records,
    report,
)
from spec_jax import metrics, session
from spec_jax.ops import dispatch
from spec_jax.paging import index


MATCHED, NOT_MATCHED = 0, 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = flags.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_models(parser.add_argument_group("models"))
    _add_run_flags(parser.add_argument_group("runs"))
    flags.add_out(parser, rows="one per prompt as it finishes, then one summary")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    return args


def _add_run_flags(runs: argparse._ArgumentGroup) -> None:
    flags.add_rounds(runs)
    runs.add_argument(
        "--drafter",
        choices=("draft-model",),
        default="draft-model",
        help="what proposes tokens (default: %(default)s)",
    )
    runs.add_argument(
        "--prompts",
        default="10",
        metavar="N|FILE[:N]",
        help="the first N bundled prompts, or a file: JSONL with prompt, question, "
        "text or turns, or plain text, one prompt a line (default: %(default)s)",
    )
    runs.add_argument(
        "--gen-tokens",
        type=flags.positive,
        default=64,
        metavar="TOKENS",
        help="tokens to generate per prompt, at most (default: %(default)s)",
    )
    runs.add_argument(
        "--prefill",
        choices=("batched", "rows"),
        help="how prompts enter the cache; rows makes even their K/V bit-identical "
        "to decoding (default: the faster, rows with native kernels, else batched)",
    )
    runs.add_argument(
        "--repeats",
        type=flags.positive,
        default=1,
        metavar="N",
        help="timed repetitions of every prompt (default: %(default)s)",
    )
    runs.add_argument(
        "--seed",
        type=int,
        default=0,
        help="recorded with the results; greedy decoding draws no random numbers",
    )
    runs.add_argument(
        "--ignore-stop",
        action="store_true",
        help="do not end at stop tokens: every prompt yields --gen-tokens",
    )
    runs.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """One prompt: what both runs produced, and `repeats` times of each."""

    prompt: prompt_files.Prompt
    prompt_ids: list[int]
    plain: list[paired_runs.Plain]
    spec: list[paired_runs.Speculative]
    mismatches: int

    @property
    def matched(self) -> bool:
        """Whether every run of either kind produced the same tokens."""
        reference = self.plain[0].tokens
        return all(run.tokens == reference for run in (*self.plain, *self.spec))

    def row(self) -> dict:
        """The JSON line."""
        counters = self.spec[0].counters
        return {
            "kind": "prompt",
            "id": self.prompt.id,
            "category": self.prompt.category,
            "prompt_tokens": len(self.prompt_ids),
            "tokens": counters.tokens,
            "matched": self.matched,
            "verify_decode_mismatches": self.mismatches,
            "rounds": counters.rounds,
            "proposed": counters.proposed,
            "accepted": counters.accepted,
            "accepted_hist": counters.accepted_hist,
            "baseline_e2e_s": [run.timing.e2e_s for run in self.plain],
            "spec_e2e_s": [run.timing.e2e_s for run in self.spec],
            "plain_ids": self.plain[0].tokens,
            "spec_ids": self.spec[0].tokens,
        }


def run_prompt(
    pair: model_pair.ModelPair,
    settings: paired_runs.Settings,
    prompt: prompt_files.Prompt,
    prompt_ids: list[int],
    *,
    repeats: int,
) -> PromptResult:
    """Plain and speculative in turn, `repeats` times, then the replay."""
    plain, spec = [], []
    for _ in range(repeats):
        plain.append(paired_runs.run_plain(pair, settings, prompt_ids))
        spec.append(paired_runs.run_speculative(pair, settings, prompt_ids))
    return PromptResult(
        prompt=prompt,
        prompt_ids=prompt_ids,
        plain=plain,
        spec=spec,
        mismatches=paired_runs.count_mismatches(
            pair, settings, prompt_ids, spec[0].tokens
        ),
    )


def encode_prompts(
    pair: model_pair.ModelPair, prompts: Sequence[prompt_files.Prompt], *, raw: bool
) -> list[list[int]]:
    """Token ids; through the chat template where the model has one."""
    tokenizer = pair.tokenizer
    use_chat = tokenizer.has_chat_template and not raw
    texts = [
        tokenizer.apply_chat(prompt.text) if use_chat else prompt.text
        for prompt in prompts
    ]
    return [tokenizer.encode(text) for text in texts]


def make_settings(
    args: argparse.Namespace,
    pair: model_pair.ModelPair,
    prompts: Sequence[prompt_files.Prompt],
    ids: Sequence[list[int]],
) -> paired_runs.Settings:
    """The settings, with a cache that fits the longest prompt.

    Raises:
      ValueError: a prompt that is empty, or too long for the model's positions.
    """
    positions = pair.target.config.max_position_embeddings
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        session.check_prompt(
            prompt_ids,
            vocab_size=pair.target.config.vocab_size,
            capacity=positions - args.gen_tokens,
            what=f"prompt {prompt.id!r} (with {args.gen_tokens} tokens to come)",
        )
    longest = max(len(prompt_ids) for prompt_ids in ids)
    pages = index.pages_for(longest + args.gen_tokens, args.page_size)
    return paired_runs.Settings(
        gamma=args.gamma,
        gen_tokens=args.gen_tokens,
        capacity=pages * args.page_size,
        page_size=args.page_size,
        stop_ids=() if args.ignore_stop else pair.tokenizer.stop_ids,
        prefill_by_rows=(
            args.prefill == "rows" if args.prefill else pair.target.prefills_by_rows
        ),
    )


def run_all(
    args: argparse.Namespace, out: records.JsonLines, console: rich_console.Console
) -> tuple[metrics.Metrics, list[PromptResult], model_pair.ModelPair]:
    """Loads, runs every prompt, writes its line, and returns the summary."""
    prompts = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    pair = model_pair.load_pair(
        args.target or model_pair.EMBEDDED_TARGET,
        args.draft or model_pair.EMBEDDED_DRAFT,
        gamma_max=args.gamma,
        slab=args.gamma + 1,
        dtype=args.dtype,
        impl=args.impl,
    )
    ids = encode_prompts(pair, prompts, raw=args.raw)
    settings = make_settings(args, pair, prompts, ids)
    console.print(
        f"{len(prompts)} prompts x {args.gen_tokens} tokens, gamma {args.gamma}, "
        f"{pair.target.config.dtype}, impl {pair.target.impl}; compiling ..."
    )
    compile_s = paired_runs.warm_up(pair, settings, ids)
    results = []
    with report.progress() as progress:
        task = progress.add_task("prompts", total=len(prompts))
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            result = run_prompt(
                pair, settings, prompt, prompt_ids, repeats=args.repeats
            )
            out.write(result.row())
            results.append(result)
            progress.advance(task)
    summary = metrics.summarise(
        metrics.total(result.spec[0].counters for result in results),
        prompts=len(results),
        baseline=_by_repeat([result.plain for result in results]),
        spec=_by_repeat([result.spec for result in results]),
        matched=all(result.matched for result in results),
        verify_decode_mismatches=sum(result.mismatches for result in results),
    )
    out.write(
        {"kind": "summary", **report.to_row(summary), "compile_s": compile_s}
        | _description(args, pair, settings)
        | records.provenance()
    )
    return summary, results, pair


def _by_repeat(runs: list[list]) -> list[list[metrics.Timing]]:
    """`[prompt][repeat]` runs as `[repeat][prompt]` timings."""
    return [[run.timing for run in repeat] for repeat in zip(*runs, strict=True)]


def _description(args, pair, settings) -> dict:
    """What was run, for the summary line."""
    return {
        "target": str(args.target or "embedded"),
        "draft": str(args.draft or "embedded"),
        "drafter": args.drafter,
        "dtype": pair.target.config.dtype,
        "impl": pair.target.impl,
        "native_isa": dispatch.instruction_set(pair.target.impl),
        "slab": pair.target.slab,
        "prompt_source": args.prompts,
        "gen_tokens": args.gen_tokens,
        "gamma": args.gamma,
        "page_size": settings.page_size,
        "capacity": settings.capacity,
        "prefill": "rows" if settings.prefill_by_rows else "batched",
        "repeats": args.repeats,
        "seed": args.seed,
        "ignore_stop": args.ignore_stop,
        "raw": args.raw,
    }


def print_sample(
    result: PromptResult, pair: model_pair.ModelPair, console: rich_console.Console
) -> None:
    """One text, its tokens told apart by where they came from."""
    run = result.spec[0]
    prompt_origins = [report.Origin.PROMPT] * len(result.prompt_ids)
    pieces = pair.tokenizer.decode_pieces([*result.prompt_ids, *run.tokens])
    report.sample_text(pieces, [*prompt_origins, *run.origins], console)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the exit status."""
    args = parse_args(argv)
    console = rich_console.Console()
    try:
        with records.JsonLines(args.out) as out:
            summary, results, pair = run_all(args, out, console)
    except (ValueError, NotImplementedError, MemoryError) as error:
        print(f"spec_round.py: error: {error}", file=sys.stderr)
        return flags.UNUSABLE
    except KeyboardInterrupt:
        kept = f"; finished prompts are in {args.out}" if args.out else ""
        print(f"spec_round.py: interrupted{kept}", file=sys.stderr)
        return flags.INTERRUPTED
    console.print()
    print_sample(results[0], pair, console)
    console.print()
    report.print_table(summary, console)
    return MATCHED if summary["matched"] else NOT_MATCHED


if __name__ == "__main__":
    sys.exit(main())
