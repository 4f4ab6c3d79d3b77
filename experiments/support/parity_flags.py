"""The flags of `experiments/parity.py`, and which of them go together."""

import argparse
from collections.abc import Sequence

from experiments.lib import cli, flags
from experiments.support import parity_inputs, parity_scenes
from spec_jax.debug.microscope import faults, record as record_lib
from spec_jax.model import config as config_lib
from spec_jax.typing import IMPLS


GAMMA = 4

# What a mismatch line or a bundle says, and so no flag may.
_OF_TEXT = (
    *("prompt", "prompts", "index", "cache_length"),
    *("draft_tokens", "gamma", "wrong_draft"),
)
_OF_RUNS = (
    *("prefill", "reference_path", "impl", "dtype", "slab", "page_size"),
    *("verify_path", "verify_impl", "verify_dtype", "verify_slab", "verify_page_size"),
    *("history", "inject", "layers"),
)


def parse(argv: Sequence[str] | None, *, description: str) -> argparse.Namespace:
    """The flags; `argparse` itself exits with status 1 on unknown ones."""
    parser = cli.Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target",
        type=cli.source,
        metavar="DIR",
        help="Hugging Face Qwen3 folder (default: the embedded target)",
    )
    _add_text_flags(parser.add_argument_group("the window"))
    _add_run_flags(parser.add_argument_group("the two runs"))
    _add_output_flags(parser.add_argument_group("results"))
    args = parser.parse_args(argv)
    _check_together(parser, args)
    return args


def _add_text_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt", metavar="TEXT", help="a prompt")
    group.add_argument(
        "--prompts",
        type=cli.text_source,
        metavar="N|FILE[:N]",
        help="prompts, as of spec_round.py, of which --index chooses one (default: "
        "the bundled ones)",
    )
    group.add_argument(
        "--index",
        type=_natural,
        metavar="I",
        help="which of the prompts, from 0 (default: 0)",
    )
    group.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )
    group.add_argument(
        "--cache-length",
        type=_natural,
        metavar="TOKENS",
        help="positions before the window: the prompt is cut, or continued by plain "
        "decoding (default: all of the prompt but its last token)",
    )
    group.add_argument(
        "--draft-tokens",
        type=_tokens,
        metavar="T,T,...",
        help="the drafted tokens of the window",
    )
    group.add_argument(
        "--gamma",
        type=_natural,
        metavar="TOKENS",
        help=f"or how many of plain decoding's own to draft (default: {GAMMA})",
    )
    group.add_argument(
        "--wrong-draft",
        type=cli.positive,
        metavar="I",
        help="make the I-th draft, from 1, another token",
    )
    group.add_argument(
        "--mismatch",
        type=cli.text_source,
        metavar="FILE[:LINE]",
        help="a window that spec_round.py --dump-verify-mismatches wrote, and how it "
        "was run; lines count from 1",
    )
    group.add_argument(
        "--bundle",
        type=cli.source,
        metavar="FILE",
        help="run a saved bundle again, and say whether the outcome is the same",
    )


def _natural(text: str) -> int:
    """The type of a flag that may be 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} must be at least 0")
    return value


def _tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of tokens, such as 1,2,3"
        ) from None


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    sides = (
        ("reference-path", "", "the first run", "decode"),
        ("verify-path", "verify-", "the second run", "paged-decode, or the mismatch's"),
    )
    for path, prefix, what, default in sides:
        same = "that of the first run" if prefix else "as in spec_round.py"
        group.add_argument(
            f"--{path}",
            choices=record_lib.PATHS,
            help=f"how {what} goes over the window (default: {default})",
        )
        group.add_argument(
            f"--{prefix}impl",
            choices=IMPLS,
            help=f"kernels of {what} (default: {same})",
        )
        group.add_argument(
            f"--{prefix}dtype",
            choices=config_lib.DTYPES,
            help=f"dtype of {what} (default: {same})",
        )
        group.add_argument(
            f"--{prefix}slab",
            type=cli.positive,
            metavar="ROWS",
            help=f"slab height of {what} (default: {same})",
        )
        group.add_argument(
            f"--{prefix}page-size",
            type=cli.positive,
            metavar="TOKENS",
            help=f"positions per page of {what} (default: {same})",
        )
    group.add_argument(
        "--prefill",
        choices=parity_inputs.PREFILLS,
        help="how the prompt enters the caches that both runs start from (default: the "
        "mismatch's, or the faster, as in spec_round.py)",
    )
    group.add_argument(
        "--history",
        choices=parity_scenes.HISTORIES,
        help="who wrote the K/V between the prompt and the window of the second run: "
        "plain decoding, as that of the first, or windows of its own path, as in the "
        "rounds (default: own for a mismatch of a path that is not by rows, where "
        "verification decided tokens; otherwise decode)",
    )
    group.add_argument(
        "--inject",
        metavar="LAYER:OPERATION[:KIND]",
        help="plant a fault in the second run, which must be named; kinds: "
        f"{', '.join(faults.KINDS)} (default: ulp)",
    )
    group.add_argument(
        "--layers", metavar="L,L-L,...", help="layers to look at (default: all)"
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    flags.add_out(group, rows="one, what was seen")
    group.add_argument(
        "--heatmap",
        type=cli.figure,
        metavar="FILE",
        help=f"layers by operations, as a {' or '.join(cli.FIGURES)} file",
    )
    group.add_argument(
        "--save-bundle",
        type=cli.output,
        metavar="FILE",
        help="a .npz file with all but the weights, for --bundle elsewhere",
    )


def _check_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error where flags contradict each other."""
    fixed = {"mismatch": _OF_TEXT, "bundle": (*_OF_TEXT, *_OF_RUNS, "mismatch")}
    for source, names in fixed.items():
        given = [name for name in names if getattr(args, name) is not None]
        if getattr(args, source) is not None and given:
            flag = given[0].replace("_", "-")
            parser.error(f"--{source} says already what --{flag} would")
    for one, other in (("prompt", "prompts"), ("draft_tokens", "gamma")):
        if None not in (getattr(args, one), getattr(args, other)):
            flag = one.replace("_", "-")
            parser.error(f"--{flag} and --{other} exclude each other")
    if args.prompt is not None:
        try:
            args.prompt.encode()
        except UnicodeEncodeError as error:
            parser.error(
                f"--prompt: character {error.start} is half of a surrogate pair, or a "
                "byte that is not UTF-8; write the character itself"
            )
