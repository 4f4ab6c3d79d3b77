"""The flags of `latency.py`."""

import argparse
import pathlib
from collections.abc import Sequence

from experiments.lib import cli, flags, subjects


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_models(parser.add_argument_group("models"))
    _add_steps(parser.add_argument_group("steps"))
    _add_runs(parser.add_argument_group("runs"))
    flags.add_device(parser)
    flags.add_dry_run(parser)
    flags.add_out(
        parser,
        rows="one per step, prompt and kind of run, then one summary",
        is_committed=True,
    )
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    _check(parser, args)
    # Steps of a large model are slow, and few of them are enough.
    args.steps = args.steps or (4 if args.preset else 20)
    args.gen_tokens = args.gen_tokens or (16 if args.preset else 64)
    args.prompts = args.prompts or "5"
    args.gammas = args.gammas or (args.gamma,)
    args.gamma = max(args.gamma, *args.gammas)
    args.slab = args.slab or max((args.gamma + 1, *(args.rows or ())))
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error where flags do not go together."""
    if args.preset and (args.target or args.prompts):
        parser.error(
            "--preset brings its own weights and prompt: leave out --target, --draft "
            "and --prompts"
        )
    if args.draft_preset and not args.preset:
        parser.error("--draft-preset goes with --preset, which names the target")
    if args.forced and args.preset and not args.draft_preset:
        parser.error("--forced needs a draft: name one with --draft-preset")
    if args.dry_run and not args.preset:
        parser.error("--dry-run needs a --preset: folders bring weights")


def _add_models(models: argparse._ArgumentGroup) -> None:
    flags.add_models(models)
    for name, what in (("--preset", "target"), ("--draft-preset", "draft")):
        models.add_argument(
            name,
            choices=sorted(subjects.PRESETS),
            help=f"a {what} of random weights in the shape of a released model, in the "
            "place of a folder",
        )
    models.add_argument(
        "--slab",
        type=cli.positive,
        metavar="ROWS",
        help="rows of every call of the target (default: gamma + 1)",
    )
    models.add_argument(
        "--no-hf", action="store_true", help="leave Hugging Face's runs out"
    )


def _add_steps(steps: argparse._ArgumentGroup) -> None:
    flags.add_rounds(steps)
    steps.add_argument(
        "--contexts",
        type=cli.positive,
        nargs="+",
        default=[64, 256, 1024],
        metavar="TOKENS",
        help="context lengths of a plain step; everything else is measured at the "
        "first of them (default: 64 256 1024)",
    )
    steps.add_argument(
        "--rows",
        type=cli.positives,
        metavar="N,N,...",
        help="live rows of a window, the most of them at every context (default: 1 to "
        "gamma + 1 where there is a draft, at the first context)",
    )
    steps.add_argument(
        "--prefill",
        type=cli.positives,
        default=(),
        metavar="N,N,...",
        help="prompt lengths to be prefilled (default: none)",
    )
    steps.add_argument(
        "--steps",
        type=cli.positive,
        metavar="N",
        help="steps of one timed call (default: 20; with --preset 4)",
    )
    steps.add_argument(
        "--repeats",
        type=cli.positive,
        default=20,
        metavar="N",
        help="timed calls of each step (default: %(default)s)",
    )
    steps.add_argument(
        "--no-steps", action="store_true", help="leave the costs of steps out"
    )
    steps.add_argument(
        "--trace",
        type=pathlib.Path,
        metavar="FOLDER",
        help="a profiler's trace of a call of plain steps, and of those named by "
        "--trace-also",
    )
    steps.add_argument(
        "--trace-also",
        nargs="+",
        default=[],
        metavar="STEP",
        help="such as 'round, gamma 4' (default: none)",
    )
    flags.add_sampling(steps)


def _add_runs(runs: argparse._ArgumentGroup) -> None:
    runs.add_argument(
        "--prompts",
        type=cli.text_source,
        metavar="N|FILE[:N]",
        help="prompts of the whole runs: the first N bundled ones, or a file "
        "(default: 5)",
    )
    runs.add_argument(
        "--gen-tokens",
        type=cli.positive,
        metavar="TOKENS",
        help="tokens to generate per prompt (default: 64; with --preset 16)",
    )
    runs.add_argument(
        "--run-repeats",
        type=cli.positive,
        default=5,
        metavar="N",
        help="timed whole runs of each prompt (default: %(default)s)",
    )
    runs.add_argument(
        "--no-runs", action="store_true", help="leave whole runs of prompts out"
    )
    runs.add_argument(
        "--forced",
        type=_rates,
        default=(),
        metavar="RATE,RATE,...",
        help="generate after the first context with so many of the proposed tokens "
        "accepted, whatever the draft proposes (default: not)",
    )
    runs.add_argument(
        "--gammas",
        type=cli.positives,
        metavar="K,K,...",
        help="tokens drafted a round at forced acceptance (default: that of --gamma)",
    )


def _rates(text: str) -> tuple[float, ...]:
    """The type of `--forced`."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of rates between 0 and 1, such as 0.4,0.6"
        )
    return rates
