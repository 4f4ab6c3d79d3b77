"""Flags that several scripts share, and the checks that go with them."""

import argparse
import json
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.lib import cli, fan_out, policies, processing
from spec_jax import loading
from spec_jax.drafters import registry, tree_shapes
from spec_jax.model import config as config_lib
from spec_jax.native import build
from spec_jax.parallel import shard
from spec_jax.rules import rule, settings as settings_lib
from spec_jax.typing import IMPLS


NO_TREE = "none"
"""The entry of a list of trees that stands for chains."""

NOISE = ("top_k", "top_p", "min_p")
"""Flags that change nothing at temperature 0."""

DRAWS = ("temperature", *NOISE, "seed")
"""Flags that say how tokens are drawn."""

FLAGS: Mapping[str, str] = {
    "target": """
        --target DIR  Hugging Face folder of the target (default: the embedded pair)
        """,
    "draft": """
        --draft DIR  Hugging Face folder of the draft model, where one is drafted with
        """,
    "dtype": "--dtype TYPE  dtype of all models (default: that of each config)",
    "weights": """
        --weights FORM  of the target: q8_0 is eight bits, q4_1 four (default: as its
            folder)
        """,
    "draft-weights": "--draft-weights FORM  of the drafter, likewise",
    "impl": "--impl IMPL=auto  kernels",
    "isa": """
        --isa ISA  instruction set of native kernels, which decides bits (default:
            ${variable}, or the widest of this machine)
        """,
    "devices": """
        --devices N  share the target out over the first N devices; on a CPU so many
            are made (default: one device has all of it)
        """,
    "segments": """
        --segments N={segments}  of each sum over devices: its order, and with it every
            bit, is the same on any N devices that divide it
        """,
    "drafter": """
        --drafter NAME=auto  what proposes tokens: a draft model (draft-model); prompt
            lookup (ngram); what mostly followed in the text (suffix); that where its
            match is long, otherwise the draft model (hybrid), or whichever of the two
            this text keeps most of for its time (choice); a head that reads the
            target's features (eagle3, dflash, dspark), whose folder is --draft, or the
            one that is shipped for the target; or that folder; the text of
            autoregressive decoding, for a ceiling (oracle); one that a package
            registers, or package.module:Name; auto: what --draft is, else a shipped
            head, else ngram
        """,
    "drafters": """
        --drafter NAME,...={drafters}  what proposes tokens: of {names}, or
            package.module:Name; of the default, lookups alone where --target has no
            draft
        """,
    "gamma": "--gamma TOKENS=4  tokens drafted per round, at most",
    "gammas": "--gamma TOKENS,...={gammas}  tokens drafted per round, at most",
    "page-size": "--page-size TOKENS=16  positions per page of the cache",
    "rule": """
        --rule RULE=coupled  how drafts are accepted: equal to what the target draws
            itself (coupled), or by rejection sampling, draft by draft or as a block,
            which keep the distribution and, above temperature 0, not the stream
        """,
    "tree": """
        --tree KxD:W  draft trees in place of chains: K children of a node, D drafts on
            a path, W in all, as in 4x12:15; 4x12:15@0.3 scores with tau 0.3. Or of a
            fixed shape: children by depth, 4-2-1, or a JSON list of paths, or its file
        """,
    "trees": """
        --tree A,B,..  trees that are drafted in place of chains, with all their nodes:
            children x depth : nodes, as in 4x6:15 or 4x6:15@0.3; children by depth, as
            in 4-2-1; files of paths, NAME.json; none for chains
        """,
    "gamma-policy": """
        --gamma-policy POLICY=fixed  what chooses each round's gamma, up to --gamma:
            nothing (fixed), the share of drafts that were kept (threshold), or expected
            tokens per second by step costs that are measured before (goodput), with a
            bound on what trying may cost (budget), or by the texts before, too
            (leader); of a tree the last three choose the number of nodes
        """,
    "schedule": """
        --schedule PROFILE  of what is drafted, verify those tokens of the whole batch
            that pay, by the chance that each is kept and the step times of this file of
            profile_steps.py, and draft while that pays; its rows of --calibrate make
            confidences chances
        """,
    "prompts": """
        --prompts N|FILE[:N]={prompts}  the first N bundled prompts, or a file: JSON
            lines with prompt, question, text, turns or messages, or plain text, one
            prompt a line; N@SEED takes a sample of N, by category; see docs/prompts.md
        """,
    "gen-tokens": """
        --gen-tokens TOKENS={gen_tokens}  tokens to generate per prompt, at most
        """,
    "repeats": "--repeats N={repeats}  timed repetitions of every prompt",
    "ignore-stop": """
        --ignore-stop  do not end at stop tokens: every prompt yields --gen-tokens
        """,
    "raw": """
        --raw  do not apply the model's chat template
        --chat-option OPTIONS  options of the chat template as NAME=VALUE,... with
            values as in JSON, such as enable_thinking=true; or as a JSON object
        """,
    "temperature": "--temperature T={temperature}  divides the logits; 0 is greedy",
    "noise": """
        --top-k N  draw from the N first tokens only (default: all)
        --top-p P=1.0  draw from the first tokens that together have this probability
        --min-p P=0.0  draw from tokens at least this many times as likely as the first
        --seed SEED=0  of all noise, which is keyed by it and by position: the same
            tokens with speculation on or off
        """,
    "processor": """
        --processor KIND:VALUE*  what logits go through before a token is chosen; given
            again, in order: regex:PATTERN, json:FILE (a schema), bad-words:A B,C (token
            ids), penalties:REPETITION,PRESENCE,FREQUENCY, bias:TOKEN=VALUE,.. or
            min-tokens:N
        """,
    "cluster": """
        --ray ADDRESS  share the work out over the Ray cluster at auto or HOST:PORT,
            which `ray start --head` makes; the results are those of one process
        --ray-cpus N=1  cores of a machine that a task of --ray has; all of them, for
            times that no other task disturbs
        """,
    "device": "--device DEVICE=auto  where to run; auto is where jax runs",
}
"""Texts of `cli.add`, by name; words in braces are defaults, see `parser`."""

OUT = """
    --out FILE  JSON lines: {rows}
    --allow-dirty  write to experiments/results from changed code too; rows say so
    """

SETS = {
    "models": "target draft dtype weights draft-weights impl isa",
    "mesh": "devices segments",
    "policy": "gamma-policy schedule",
}
"""Flags that belong together, by the name of the set."""

_GROUP = re.compile(r"(?:\[(.+?)\])?((?:(?!--).)*)(.*)", re.DOTALL)

DEFAULTS = {
    "variable": build.ISA_VARIABLE,
    "segments": shard.SEGMENTS,
    "names": ", ".join(registry.names()),
    "drafters": "draft-model,ngram,suffix,hybrid",
    "gen_tokens": 64,
    "repeats": 1,
    "temperature": 0.0,
}


def parser(
    doc: str,
    text: str,
    *,
    kinds: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    check: Callable[[cli.Parser, argparse.Namespace], None] | None = None,
) -> cli.Parse:
    """Returns the `parse_args` of a script, which also does `check_models`, where there
    are a target and a draft, and `check_sampling`, where there is noise.

    Args:
      doc: the script's docstring, which --help prints.
      text: groups of flags: `[title] key key`, then flags as in `cli.add`, indented; or
        one without a title. Keys are of `FLAGS` and `SETS`, or `key=default` where the
        default is in braces there. Behind `[out]` stand the rows that `--out` gets.
      kinds: as in `cli.add`, in addition to `KINDS`.
      defaults: in place of those in the texts, by the name of the attribute.
      check: called last: exits with a usage error, raises `ValueError`, or fills flags.
    """
    groups = re.split(r"\n(?=\[)", textwrap.dedent(text).strip())

    def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
        made = cli.Parser(doc)
        for title, keys, others in (_GROUP.fullmatch(one).groups() for one in groups):
            if title == "out":
                cli.add(made, OUT.format(rows=keys.strip()), **KINDS)
                continue
            group = made.add_argument_group(title) if title else made
            for key, _, word in (key.partition("=") for key in keys.split()):
                words = DEFAULTS | ({key.replace("-", "_"): word} if word else {})
                for name in SETS.get(key, key).split():
                    cli.add(group, FLAGS[name].format_map(words), **KINDS)
            if others:
                lines = others.replace("\n    ", "\n") if title else others
                cli.add(group, lines, **KINDS | (kinds or {}))
        made.set_defaults(**defaults or {})
        args = made.parse_args(argv)
        if {"target", "draft"} <= vars(args).keys():
            check_models(made, args)
        if getattr(args, "isa", None) is not None:
            build.choose(args.isa)
        if hasattr(args, "top_k"):
            check_sampling(made, args)
        if check is not None:
            check(made, args)
        return args

    return parse_args


def check_models(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses a drafter that lacks its draft, and a draft that lacks its target.

    A default list of drafters loses the drafters that lack a draft. CPU devices are
    made where flags ask for them.
    """
    chosen = getattr(args, "drafter", ())
    if chosen == "auto":
        chosen = args.drafter = loading.default_drafter(args.target, args.draft)
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
            raise ValueError(
                f"{lacking[0]} of --target {args.target} needs a draft: name the "
                "folder of one with --draft, or another drafter"
            )
    devices = getattr(args, "devices", None)
    if devices is not None:
        shard.make_cpu_devices(devices)
    elif hasattr(args, "segments") and args.segments != parser.get_default("segments"):
        parser.error("--segments is of --devices: give both, or neither")


def drafter(text: str) -> str:
    """Parses a flag that names a drafter: ours, one of another package, or the folder
    of a head."""
    if text == "auto" or registry.is_folder(text):
        return text
    return cli.one_of(registry.names(), can_import=True)(text)


def chat_options(text: str) -> dict[str, Any]:
    """Parses a flag with options of a chat template."""
    try:
        if text.startswith("{"):
            return json.loads(text)
        pairs = (part.split("=", 1) for part in text.split(","))
        return {name.strip(): json.loads(value) for name, value in pairs}
    except ValueError:
        raise ValueError(
            f"{text!r} is no list of options, such as enable_thinking=true, with "
            "values as in JSON"
        ) from None


def tree_or_none(text: str) -> str:
    """Parses an entry of a list of trees to its text, which names no file."""
    if text == NO_TREE:
        return text
    if "[" in text or "]" in text:
        raise ValueError(
            f"{text!r} is a part of a tree's paths, which have commas as the list has: "
            "write the paths to a file and give its name, NAME.json"
        )
    return str(tree_shapes.parse(text))


def given(
    parser: argparse.ArgumentParser, args: argparse.Namespace, names: Iterable[str]
) -> list[str]:
    """Returns those of some flags that have another value than by default."""
    return [name for name in names if getattr(args, name) != parser.get_default(name)]


def check_tree(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str
) -> None:
    """Exits with a usage error where a flag of `names`, for chains, goes with trees."""
    trees = args.tree if isinstance(args.tree, tuple) else (args.tree,)
    if not set(trees) - {None, NO_TREE}:
        return
    for name in given(parser, args, names):
        parser.error(
            f"--tree does not go together with {cli.flag_of(name)}, which is of "
            "chains: leave one out, or run them apart"
        )


def check_sampling(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a usage error where a flag of `NOISE` would change nothing."""
    temperatures = args.temperature
    if not isinstance(temperatures, tuple):
        temperatures = (temperatures,)
    if any(temperatures):
        return
    for name in given(parser, args, NOISE):
        parser.error(
            f"{cli.flag_of(name)} is of sampling, and --temperature 0 decodes "
            "greedily: give a temperature, or leave it out"
        )


def drawn(args: argparse.Namespace, **changes: Any) -> settings_lib.Sampling:
    """Returns how flags let tokens be drawn, with other values for some of them."""
    return settings_lib.Sampling(**{n: getattr(args, n) for n in DRAWS} | changes)


def sampling_settings(
    args: argparse.Namespace, temperature: float | None = None
) -> settings_lib.SamplingSettings | None:
    """Returns the settings by which flags let tokens be drawn; None is greedy.

    Filters of a greedy run are checked, and left out: `check_sampling` has refused
    them where all runs are greedy.

    Args:
      temperature: replaces that of the flag.
    """
    temperature = args.temperature if temperature is None else temperature
    made = drawn(args, temperature=temperature or 1.0).settings()
    return made if temperature else None


KINDS: Mapping[str, Any] = {
    "TYPE": config_lib.DTYPES,
    "FORM": config_lib.WEIGHTS,
    "IMPL": IMPLS,
    "ISA": tuple(build.ISA_FLAGS),
    "NAME": drafter,
    "NAME,...": cli.names(drafter),
    "RULE": tuple(rule.RULES),
    "KxD:W": tree_shapes.parse,
    "A,B,..": cli.names(tree_or_none),
    "POLICY": policies.MEASURED,
    "PROFILE": pathlib.Path,
    "N|FILE[:N]": str,
    "OPTIONS": chat_options,
    "KIND:VALUE": processing.named,
    "ADDRESS": fan_out.address,
    "SEED": int,
    "DEVICE": ("auto", "cpu", "gpu"),
}
"""Types of the values, or their choices, by their names in the texts."""
