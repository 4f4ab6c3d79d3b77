"""Flags that several scripts share: models, sampling, prompts, outputs."""

import argparse
from collections.abc import Callable, Collection, Iterable

from experiments.lib import cli
from spec_jax.drafters import registry
from spec_jax.engine import verification
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.rules import sampling
from spec_jax.typing import IMPLS


NOISE = ("top_k", "top_p", "min_p")
"""Flags that change nothing at temperature 0."""


def add_models(group: argparse._ArgumentGroup) -> None:
    """`--target` and `--draft`, which `check_models` looks at, `--dtype`, `--impl`."""
    group.add_argument(
        "--target",
        type=cli.source,
        metavar="DIR",
        help="Hugging Face Qwen3 folder of the target (default: the embedded pair)",
    )
    group.add_argument(
        "--draft",
        type=cli.source,
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


def add_drafter(group: argparse._ActionsContainer) -> None:
    """`--drafter`, one name."""
    group.add_argument(
        "--drafter",
        type=drafter,
        default="draft-model",
        metavar="NAME",
        help="what proposes tokens: a draft model (draft-model); prompt lookup "
        "(ngram); what mostly followed in the text (suffix); that where its score is "
        "high, otherwise the draft model (hybrid); plain decoding's own text, for a "
        "ceiling (oracle); one that a package registers, or package.module:Name "
        "(default: %(default)s)",
    )


def add_drafters(group: argparse._ActionsContainer, *, default: str) -> None:
    """`--drafter`, a list of names."""
    group.add_argument(
        "--drafter",
        type=names(drafter),
        default=default,
        metavar="NAME,...",
        help=f"what proposes tokens: of {', '.join(registry.names())}, or "
        "package.module:Name (default: %(default)s)",
    )


def drafter(text: str) -> str:
    """The type of a flag that names a drafter: ours, or one of another package."""
    known = registry.names()
    if text not in known and ":" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(known)}, nor written as "
            "package.module:Name"
        )
    return text


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """The type of a part of a flag that lists names, see `names`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(choices)}"
            )
        return text

    return parse


def names(kind: Callable[[str], str]) -> Callable[[str], tuple[str, ...]]:
    """The type of a flag that lists names: in the order given, each of them once."""
    return lambda text: tuple(
        dict.fromkeys(kind(part.strip()) for part in text.split(","))
    )


def add_rule(group: argparse._ActionsContainer) -> None:
    """`--rule`."""
    group.add_argument(
        "--rule",
        choices=verification.RULES,
        default="coupled",
        help="how drafts are accepted: equal to what the target draws itself "
        "(coupled), or by rejection sampling, draft by draft or as a block, which keep "
        "the distribution and, above temperature 0, not the stream "
        "(default: %(default)s)",
    )


def add_cost_repeats(group: argparse._ActionsContainer) -> None:
    """`--cost-repeats`."""
    group.add_argument(
        "--cost-repeats",
        type=cli.positive,
        default=10,
        metavar="N",
        help="timed calls of each part of a round (default: %(default)s)",
    )


def add_text(group: argparse._ActionsContainer) -> None:
    """`--ignore-stop` and `--raw`."""
    group.add_argument(
        "--ignore-stop",
        action="store_true",
        help="do not end at stop tokens: every prompt yields --gen-tokens",
    )
    group.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )


def add_rounds(group: argparse._ActionsContainer, *, gammas: str | None = None) -> None:
    """`--gamma` and `--page-size`.

    Args:
      gammas: the default of a `--gamma` that is a list; None: it is one number.
    """
    group.add_argument(
        "--gamma",
        type=cli.positives if gammas else cli.positive,
        default=gammas or 4,
        metavar="TOKENS,..." if gammas else "TOKENS",
        help="tokens drafted per round, at most (default: %(default)s)",
    )
    group.add_argument(
        "--page-size",
        type=cli.positive,
        default=16,
        metavar="TOKENS",
        help="positions per page of the cache (default: %(default)s)",
    )


def add_prompts(group: argparse._ActionsContainer, *, default: str) -> None:
    """`--prompts`, for `prompt_files.parse`."""
    group.add_argument(
        "--prompts",
        type=cli.text_source,
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
        type=cli.positive,
        default=default,
        metavar="TOKENS",
        help="tokens to generate per prompt, at most (default: %(default)s)",
    )


def add_repeats(group: argparse._ActionsContainer, *, default: int = 1) -> None:
    """`--repeats`."""
    group.add_argument(
        "--repeats",
        type=cli.positive,
        default=default,
        metavar="N",
        help="timed repetitions of every prompt (default: %(default)s)",
    )


def add_sampling(group: argparse._ActionsContainer) -> None:
    """`--temperature`, and the flags of `add_noise`."""
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="divides the logits; 0 is greedy (default: 0)",
    )
    add_noise(group)


def add_noise(group: argparse._ActionsContainer) -> None:
    """`--top-k`, `--top-p`, `--min-p`, `--seed`."""
    group.add_argument(
        "--top-k",
        type=cli.positive,
        metavar="K",
        help="draw from the K first tokens only (default: all)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the first tokens that together have this probability "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens at least this many times as likely as the first "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of all noise, which is keyed by it and by position: the same tokens with "
        "speculation on or off (default: %(default)s)",
    )


def check_sampling(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error where a flag of `add_noise` would change nothing."""
    temperatures = args.temperature
    if not isinstance(temperatures, tuple):
        temperatures = (temperatures,)
    if any(temperatures):
        return
    for name in NOISE:
        if getattr(args, name) != parser.get_default(name):
            parser.error(
                f"{cli.flag_of(name)} is of sampling, and --temperature 0 "
                "decodes greedily: give a temperature, or leave it out"
            )


def sampling_settings(
    args: argparse.Namespace, temperature: float | None = None
) -> sampling.SamplingSettings | None:
    """What `add_sampling`'s flags say; None is greedy.

    Filters of a greedy run are checked, and left out: `check_sampling` has refused
    them where all runs are greedy.

    Args:
      temperature: in the place of that of the flag.

    Raises:
      ValueError: a value outside its range.
    """
    values = {name: getattr(args, name) for name in (*NOISE, "seed")}
    values["temperature"] = args.temperature if temperature is None else temperature
    if not values["temperature"]:
        sampling_settings(args, 1.0)
        return None
    try:
        return sampling.make_settings(**values)
    except ValueError as error:
        raise ValueError(_with_flags(str(error), values)) from None


def _with_flags(message: str, names: Iterable[str]) -> str:
    """The message, with `--top-p 2` where it says `top_p=2`."""
    for name in names:
        message = message.replace(f"{name}=", f"{cli.flag_of(name)} ")
    return message


def add_out(
    parser: argparse._ActionsContainer, *, rows: str, is_committed: bool = False
) -> None:
    """`--out`, and `--allow-dirty` for `records.open_rows`.

    Args:
      rows: what the file will hold, for the help.
      is_committed: whether the script takes `--allow-dirty`.
    """
    parser.add_argument(
        "--out", type=cli.output, metavar="FILE", help=f"JSON lines: {rows}"
    )
    if is_committed:
        parser.add_argument(
            "--allow-dirty",
            action="store_true",
            help="write to experiments/results from changed code too; rows say so",
        )


def add_device(parser: argparse._ActionsContainer) -> None:
    """`--device`, for `subjects.check_device`."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where to run; auto is where jax runs (default: %(default)s)",
    )


def add_dry_run(parser: argparse._ActionsContainer) -> None:
    """`--dry-run`."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run nothing: trace and lower every program, for a GPU with --device gpu "
        "wherever this is, and compile it where there is one",
    )
