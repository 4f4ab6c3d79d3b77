"""Flags that several scripts share: models, sampling, prompts, outputs."""

import argparse
import json
import math
from typing import Any

from experiments.lib import cli
from spec_jax import loading
from spec_jax.drafters import registry, tree_shapes
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.parallel import shard
from spec_jax.rules import rule, sampling
from spec_jax.typing import IMPLS


NO_TREE = "none"
"""In a list of trees: chains."""

NOISE = ("top_k", "top_p", "min_p")
"""Flags that change nothing at temperature 0."""


def add_models(group: argparse._ActionsContainer, *, has_mesh: bool = True) -> None:
    """`--target`, `--draft`, `--dtype`, `--impl`, `--isa`, for `check_models`.

    Args:
      has_mesh: `--devices` and `--segments` too, of a script that uses `models.load`.
    """
    add_folders(group)
    add_dtype(group)
    cli.add(group, "--impl IMPL=auto  kernels", IMPL=IMPLS)
    add_isa(group)
    if not has_mesh:
        return
    cli.add(
        group,
        f"""
        --devices N  share the target out over the first N devices; on a CPU so many
            are made (default: one device has all of it)
        --segments N={shard.SEGMENTS}  of each sum over devices: its order, and with it
            every bit, is the same on any N devices that divide it
        """,
    )


def add_folders(group: argparse._ActionsContainer) -> None:
    """`--target` and `--draft`."""
    cli.add(
        group,
        """
        --target DIR  Hugging Face folder of the target (default: the embedded
            pair)
        --draft DIR  Hugging Face folder of the draft model, where one is drafted with
        """,
    )


def add_isa(group: argparse._ActionsContainer) -> None:
    """`--isa`, which `check_isa` looks at."""
    cli.add(
        group,
        f"""
        --isa ISA  instruction set of native kernels, which decides bits (default:
            ${build.ISA_VARIABLE}, or the widest of this machine)
        """,
        ISA=tuple(build.ISA_FLAGS),
    )


def add_dtype(group: argparse._ActionsContainer) -> None:
    """`--dtype`."""
    text = "--dtype TYPE  dtype of all models (default: that of each config)"
    cli.add(group, text, TYPE=config_lib.DTYPES)


def check_models(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    *,
    needs_draft: bool = True,
) -> None:
    """Exits with a usage error where a drafter lacks its draft, or a draft its target.

    Of a list of drafters by default, those that lack a draft are left out. Then
    `check_isa` is called.

    Args:
      needs_draft: of a script without `--drafter`, which drafts with a draft model.
    """
    chosen = getattr(args, "drafter", "draft-model" if needs_draft else ())
    if chosen == "auto":
        chosen = args.drafter = _default_drafter(parser, args)
    names = (chosen,) if isinstance(chosen, str) else chosen or ()
    if args.target is None and args.draft is not None:
        # A head may be one for the embedded target.
        reads = any(registry.reads_target(name, args.draft) for name in names)
        if not (reads or registry.is_head(args.draft)):
            parser.error(f"--draft {args.draft} needs a --target: give both, or none")
    elif args.draft is None and args.target is not None:
        lacking = [n for n in names if loading.lacks_draft(n, args.target, args.draft)]
        others = tuple(name for name in names if name not in lacking)
        if lacking and others and chosen == parser.get_default("drafter"):
            args.drafter = others
        elif lacking:
            without = ", or --drafter " + ", ".join(registry.NEED_NOTHING[:2])
            parser.error(
                f"{lacking[0]} of --target {args.target} needs a draft: name the "
                f"folder of one with --draft{without * hasattr(args, 'drafter')}"
            )
    check_isa(parser, args)
    devices = getattr(args, "devices", None)
    if devices is not None:
        shard.make_cpu_devices(devices)
    elif hasattr(args, "segments") and args.segments != parser.get_default("segments"):
        parser.error("--segments is of --devices: give both, or neither")


def _default_drafter(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Returns what `--drafter auto` stands for, or exits with a usage error."""
    try:
        is_tree = getattr(args, "tree", None) is not None
        return loading.default_drafter(args.target, args.draft, is_tree=is_tree)
    except ValueError as error:
        parser.error(str(error))


def check_isa(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Chooses what `--isa` names, or exits with a usage error."""
    if args.isa is not None:
        try:
            build.choose(args.isa)
        except ValueError as error:
            parser.error(f"--isa {args.isa}: {error}")


def drafter(text: str) -> str:
    """The type of a flag that names a drafter: ours, one of another package, or the
    folder of a head."""
    if text == "auto" or registry.is_folder(text):
        return text
    return cli.one_of(registry.names(), can_import=True)(text)


def add_drafter(group: argparse._ActionsContainer) -> None:
    """`--drafter`, one name."""
    cli.add(
        group,
        """
        --drafter NAME=auto  what proposes tokens: a draft model (draft-model); prompt
            lookup (ngram); what mostly followed in the text (suffix); that where its
            score is high, otherwise the draft model (hybrid); a head that reads the
            target's features (eagle3, dflash, dspark), whose folder is --draft, or the
            one that is shipped for the target; or that folder; the text of
            autoregressive decoding, for a ceiling (oracle); one that a package
            registers, or package.module:Name; auto: what --draft is, else a shipped
            head, else ngram
        """,
        NAME=drafter,
    )


def add_drafters(group: argparse._ActionsContainer, *, default: str) -> None:
    """`--drafter`, a list of names."""
    cli.add(
        group,
        f"""
        --drafter NAME,...={default}  what proposes tokens: of
            {", ".join(registry.names())}, or package.module:Name; of the default,
            those that need no draft where --target has none
        """,
        **{"NAME,...": cli.names(drafter)},
    )


def add_rule(group: argparse._ActionsContainer) -> None:
    """`--rule`."""
    cli.add(
        group,
        """
        --rule RULE=coupled  how drafts are accepted: equal to what the target draws
            itself (coupled), or by rejection sampling, draft by draft or as a block,
            which keep the distribution and, above temperature 0, not the stream
        """,
        RULE=tuple(rule.RULES),
    )


def add_raw(group: argparse._ActionsContainer) -> None:
    """`--raw`, and `--chat-option` for `prompts.with_options`."""
    cli.add(
        group,
        """
        --raw  do not apply the model's chat template
        --chat-option NAMES  options of the chat template as NAME=VALUE,... with values
            as in JSON, such as enable_thinking=true; or as a JSON object
        """,
        NAMES=chat_options,
    )


def chat_options(text: str) -> dict[str, Any]:
    """The type of a flag with options of a chat template."""
    try:
        if text.startswith("{"):
            return json.loads(text)
        pairs = [part.partition("=") for part in text.split(",")]
        if not all(name and equals for name, equals, _ in pairs):
            raise ValueError
        return {name.strip(): json.loads(value) for name, _, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of options, such as enable_thinking=true, with "
            "values as in JSON"
        ) from None


def add_text(group: argparse._ActionsContainer) -> None:
    """`--ignore-stop` and `--raw`."""
    cli.add(
        group,
        """
        --ignore-stop  do not end at stop tokens: every prompt yields --gen-tokens
        """,
    )
    add_raw(group)


def add_rounds(group: argparse._ActionsContainer, *, gammas: str | None = None) -> None:
    """`--gamma` and `--page-size`.

    Args:
      gammas: the default of a `--gamma` that is a list; None: it is one number.
    """
    value = f"TOKENS,...={gammas}" if gammas else "TOKENS=4"
    cli.add(group, f"--gamma {value}  tokens drafted per round, at most")
    add_page_size(group)


def tree(text: str) -> tree_shapes.AnyTree:
    """The type of a flag that describes a tree."""
    try:
        return tree_shapes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_tree(group: argparse._ActionsContainer) -> None:
    """`--tree`, for `models.load`."""
    cli.add(
        group,
        """
        --tree KxD:W  draft trees in place of chains: K children of a node, D drafts on
            a path, W in all, as in 4x12:15; 4x12:15@0.3 scores with tau 0.3. Or of a
            fixed shape: children by depth, 4-2-1, or a JSON list of paths, or its file
        """,
        **{"KxD:W": tree},
    )


def temperatures(text: str) -> tuple[float, ...]:
    """The type of a flag that lists temperatures: in order, each of them once."""
    try:
        values = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        values = ()
    if not values or not all(math.isfinite(value) for value in values):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of finite numbers, such as 0,0.7"
        )
    return values


def tree_or_none(text: str) -> str:
    """The type of a tree in a list of them, or `NO_TREE`."""
    return text if text == NO_TREE else tree_text(text)


def tree_text(text: str) -> str:
    """The type of a tree in a list of them: its text, which has no file."""
    if "[" in text or "]" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a part of a tree's paths, which have commas as the list has: "
            "write the paths to a file and give its name, NAME.json"
        )
    return str(tree(text))


def add_trees(group: argparse._ActionsContainer, *, default: str | None) -> None:
    """`--tree`, a list of texts, and `NO_TREE`."""
    shown = "" if default is None else f"={default}"
    cli.add(
        group,
        f"""
        --tree A,B,..{shown}  trees that are drafted in place of chains, with all their
            nodes: children x depth : nodes, as in 4x6:15 or 4x6:15@0.3; children by
            depth, as in 4-2-1; files of paths, NAME.json; none for chains
        """,
        **{"A,B,..": cli.names(tree_or_none)},
    )


def check_tree(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str
) -> None:
    """Exits with a usage error where a flag of `names`, of chains, goes with trees."""
    trees = args.tree if isinstance(args.tree, tuple) else (args.tree,)
    if not set(trees) - {None, NO_TREE}:
        return
    for name in names:
        value, default = getattr(args, name), parser.get_default(name)
        if value != default:
            parser.error(
                f"--tree does not go together with {cli.flag_of(name)}, which is of "
                "chains: leave one out, or run them apart"
            )


def add_page_size(group: argparse._ActionsContainer) -> None:
    """`--page-size`."""
    cli.add(group, "--page-size TOKENS=16  positions per page of the cache")


def add_prompts(group: argparse._ActionsContainer, *, default: str) -> None:
    """`--prompts`, for `prompt_files.parse`."""
    cli.add(
        group,
        f"""
        --prompts N|FILE[:N]={default}  the first N bundled prompts, or a file: JSON
            lines with prompt, question, text, turns or messages, or plain text, one
            prompt a line; N@SEED takes a sample of N, by category; see docs/prompts.md
        """,
        **{"N|FILE[:N]": cli.text_source},
    )


def add_gen_tokens(group: argparse._ActionsContainer, *, default: int) -> None:
    """`--gen-tokens`."""
    text = f"--gen-tokens TOKENS={default}  tokens to generate per prompt, at most"
    cli.add(group, text)


def add_repeats(group: argparse._ActionsContainer, *, default: int = 1) -> None:
    """`--repeats`."""
    cli.add(group, f"--repeats N={default}  timed repetitions of every prompt")


def add_sampling(group: argparse._ActionsContainer) -> None:
    """`--temperature`, and the flags of `add_noise`."""
    cli.add(group, "--temperature T=0.0  divides the logits; 0 is greedy")
    add_noise(group)


def add_noise(group: argparse._ActionsContainer) -> None:
    """`--top-k`, `--top-p`, `--min-p`, `--seed`."""
    cli.add(
        group,
        """
        --top-k N  draw from the N first tokens only (default: all)
        --top-p P=1.0  draw from the first tokens that together have this probability
        --min-p P=0.0  draw from tokens at least this many times as likely as the first
        --seed SEED=0  of all noise, which is keyed by it and by position: the same
            tokens with speculation on or off
        """,
        SEED=int,
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
    """
    values = {name: getattr(args, name) for name in (*NOISE, "seed")}
    values["temperature"] = args.temperature if temperature is None else temperature
    if not values["temperature"]:
        sampling_settings(args, 1.0)
        return None
    return sampling.make_settings(**values)


def add_out(parser: argparse._ActionsContainer, *, rows: str) -> None:
    """`--out`, and `--allow-dirty` for `records.open_rows`.

    Args:
      rows: what the file will hold, for the help.
    """
    cli.add(
        parser,
        f"""
        --out FILE  JSON lines: {rows}
        --allow-dirty  write to experiments/results from changed code too; rows say so
        """,
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    """`--device`, for `subjects.check_device`."""
    text = "--device DEVICE=auto  where to run; auto is where jax runs"
    cli.add(parser, text, DEVICE=("auto", "cpu", "gpu"))


def add_dry_run(parser: argparse._ActionsContainer) -> None:
    """`--dry-run`."""
    cli.add(
        parser,
        """
        --dry-run  run nothing: trace and lower every program, for a GPU with --device
            gpu wherever this is, and compile it where there is one
        """,
    )
