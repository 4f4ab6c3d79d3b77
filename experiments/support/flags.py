"""What the command lines of the scripts share: exit statuses, kinds of flags, flags."""

import argparse
import pathlib
import sys
from collections.abc import Callable

from spec_jax import sampling
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.typing import IMPLS


UNUSABLE, INTERRUPTED = 1, 130


class Parser(argparse.ArgumentParser):
    """Exits with status 1 on a usage error, as on all unusable input.

    (`argparse` takes 2, which is "tokens differ" here.)
    """

    def error(self, message: str):
        self.print_usage(sys.stderr)
        self.exit(UNUSABLE, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    """The type of a flag that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def positives(text: str) -> tuple[int, ...]:
    """The type of a flag that lists counts: in order, each of them once."""
    try:
        return tuple(sorted({positive(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of whole numbers, such as 1,2,4"
        ) from None


def add_models(group: argparse._ArgumentGroup) -> None:
    """`--target` and `--draft`, which `check_models` looks at, `--dtype`, `--impl`."""
    group.add_argument(
        "--target",
        type=pathlib.Path,
        metavar="DIR",
        help="Hugging Face Qwen3 folder of the target (default: the embedded pair)",
    )
    group.add_argument(
        "--draft",
        type=pathlib.Path,
        metavar="DIR",
        help="Hugging Face Qwen3 folder of the draft model",
    )
    add_dtype(group)
    group.add_argument(
        "--impl", choices=IMPLS, default="auto", help="kernels (default: auto)"
    )
    add_isa(group)


def add_isa(group: argparse._ActionsContainer) -> None:
    """`--isa`, which `check_isa` looks at."""
    group.add_argument(
        "--isa",
        choices=tuple(build.ISA_FLAGS),
        help="instruction set of native kernels, which decides bits (default: "
        f"${build.ISA_VARIABLE}, or the widest of this machine)",
    )


def add_dtype(group: argparse._ActionsContainer) -> None:
    """`--dtype`."""
    group.add_argument(
        "--dtype",
        choices=config_lib.DTYPES,
        help="dtype of all models (default: that of each config)",
    )


def check_models(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error if one of target and draft is missing; `check_isa`."""
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together: give both, or neither")
    check_isa(parser, args)


def check_isa(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Chooses what `--isa` names, or exits with a usage error."""
    if args.isa is not None:
        try:
            build.choose(args.isa)
        except ValueError as error:
            parser.error(f"--isa {args.isa}: {error}")


def add_rounds(group: argparse._ArgumentGroup) -> None:
    """`--gamma` and `--page-size`."""
    group.add_argument(
        "--gamma",
        type=positive,
        default=4,
        metavar="TOKENS",
        help="tokens drafted per round, at most (default: %(default)s)",
    )
    group.add_argument(
        "--page-size",
        type=positive,
        default=16,
        metavar="TOKENS",
        help="positions per page of the cache (default: %(default)s)",
    )


def add_prompts(group: argparse._ActionsContainer, *, default: str) -> None:
    """`--prompts`, for `prompt_files.parse`."""
    group.add_argument(
        "--prompts",
        default=default,
        metavar="N|FILE[:N]",
        help="the first N bundled prompts, or a file, or - for standard input: JSON "
        "lines or a JSON array with prompt, question, text, turns or messages, or "
        "plain text, one prompt a line; N@SEED takes a sample of N, by category; see "
        "docs/prompts.md (default: %(default)s)",
    )


def add_gen_tokens(group: argparse._ActionsContainer, *, default: int) -> None:
    """`--gen-tokens`."""
    group.add_argument(
        "--gen-tokens",
        type=positive,
        default=default,
        metavar="TOKENS",
        help="tokens to generate per prompt, at most (default: %(default)s)",
    )


def add_repeats(group: argparse._ActionsContainer, *, default: int = 1) -> None:
    """`--repeats`."""
    group.add_argument(
        "--repeats",
        type=positive,
        default=default,
        metavar="N",
        help="timed repetitions of every prompt (default: %(default)s)",
    )


def add_sampling(group: argparse._ActionsContainer) -> None:
    """`--temperature`, `--top-k`, `--top-p`, `--min-p`, `--seed`."""
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="divides the logits; 0 is greedy (default: 0)",
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="draw from the K first tokens only"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the first tokens that together have this probability",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens at least this many times as likely as the first",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of all noise, which is keyed by it and by position: the same tokens with "
        "speculation on or off (default: %(default)s)",
    )


def sampling_settings(args: argparse.Namespace) -> sampling.SamplingSettings | None:
    """What `add_sampling`'s flags say; None is greedy.

    Raises:
      ValueError: a value outside its range.
    """
    settings = sampling.make_settings(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    return None if args.temperature == 0 else settings


def add_out(parser: argparse._ActionsContainer, *, rows: str) -> None:
    """`--out`.

    Args:
      rows: what the file will hold, for the help.
    """
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FILE", help=f"JSON lines: {rows}"
    )


def exit_status(script: str, run: Callable[[], int], *, kept: str = "") -> int:
    """What `run` returns; unusable input and an interruption become one line each.

    Args:
      script: the name of the script, for the line.
      kept: what an interruption leaves behind, to be said.
    """
    try:
        return run()
    except (
        *(ValueError, NotImplementedError, MemoryError, FloatingPointError),
    ) as error:
        print(f"{script}: error: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{script}: interrupted{'; ' if kept else ''}{kept}", file=sys.stderr)
        return INTERRUPTED
