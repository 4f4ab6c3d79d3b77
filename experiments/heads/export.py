"""The export of a trained head: a folder in a published format, with a card."""

import argparse
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax

from experiments.heads import families, jobs
from experiments.lib import cli
from spec_jax import testing
from spec_jax.model import fingerprint, head_dialects
from spec_jax.training import eagle3, heads, loop


CARD = pathlib.Path(__file__).with_name("card.md")
"""The template of a head's card."""


def export(args: argparse.Namespace) -> None:
    """Writes the newest checkpoint to `--out`, in the target's dtype, with a card.

    The drafter's flags are those of its training, but `--dialect` may name another
    format that can describe it.

    Raises:
      ValueError: flags that differ from those of the training, an `--out` that is read,
        too, or a file that is not read back as it was written.
    """
    if args.base:
        families.plan(args, families.target_config(args))
    asked = args.dialect
    flags = jobs.as_trained(args)
    dialect = asked if "dialect" in args.given else args.dialect
    families.check_copies(args.no_copies, dialect)
    for flag, folder in (("--target", args.target), ("--base", args.base)):
        if folder is not None and folder.resolve() == args.out.resolve():
            raise ValueError(f"--out {args.out} would replace what {flag} reads")
    args.out.mkdir(parents=True, exist_ok=True)
    job = jobs.prepare(args)
    trained, step = loop.restore(jobs.recipe(args), jobs.init(args, job), args.work)
    trained = jobs.rescaled(trained, job.scale)
    measured = {
        name.removeprefix("held_out_").replace("_", " "): f"{value:.4f}"
        for name, value in loop.last_held_out(args.work, step).items()
        if name.startswith("held_out_")
    }
    narrow = jax.tree.map(lambda leaf: leaf.astype(job.target.dtype), trained)
    drafter = heads.complete(narrow, job.teacher)
    warn(job.config, dialect)
    job.family.files.save(
        args.out,
        job.config,
        drafter,
        dialect=dialect,
        origin=head_dialects.Origin(
            target=job.target,
            target_name=str(args.target),
            num_anchors=args.anchors,
            ttt_length=args.ttt_steps,
            step_loss_decay=eagle3.DECAY,
        ),
        metadata={"step": str(step)},
        **({"copies": False} if args.no_copies else {}),
    )
    config, again = job.family.files.load(args.out, job.target, job.params)
    if config != job.config:
        raise ValueError(f"{args.out}: is read as {config}, and was {job.config}")
    testing.assert_same_bits(again, drafter, what=f"{args.out}: ")
    size = sum(leaf.size for leaf in jax.tree.leaves(narrow))
    facts = {"parameters": f"{size:,}", "format": dialect} | _facts(args, job, step)
    card = CARD.read_text(encoding="utf-8").format(
        family=args.family,
        facts=_table(facts),
        measured=_table(measured),
        flags=_text_of(flags | {"no_copies": args.no_copies}),
        notes="".join(f"- {note}\n" for note in args.note),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


def _facts(args: argparse.Namespace, job: jobs.Job, step: int) -> dict[str, str]:
    """Returns the facts of a drafter's training, for its card."""
    texts = job.online.texts
    facts = {
        "reads hidden states": ", ".join(map(str, job.config.taps)),
        "target, SHA-256 of its weights": fingerprint.of_params(job.params),
        "texts of the target": f"{len(texts):,}",
        "tokens of a text": f"{texts.tokens.shape[1]:,}",
        "steps": f"{step:,}",
        "tokens seen": f"{loop.tokens_seen(args.work, step):,}",
    }
    if job.base is not None:
        facts["went on from, SHA-256 of its weights"] = fingerprint.of_params(job.base)
    return facts


def _text_of(flags: Mapping[str, Any]) -> str:
    """Returns flags as on a command line, without the family and the base's folder."""
    texts = {
        cli.flag_of(name): ",".join(map(str, x)) if isinstance(x, list) else x
        for name, x in flags.items()
        if x is not None and x is not False and name not in ("family", "base")
    }
    return " ".join(n if x is True else f"{n} {x}" for n, x in texts.items())


def warn(config: Any, dialect: str) -> None:
    """Warns if other programs will refuse a head, because it is written as Llama's."""
    width, num_heads = config.hidden_size, config.layer.num_heads
    is_llama = dialect != "deepspec" and not getattr(config, "has_head_norms", True)
    if is_llama and width % num_heads:
        print(
            f"warning: a head of width {width} with {num_heads} attention heads is "
            "written as model_type llama, and transformers 5.24 opens no such config "
            "unless the width is a multiple of the heads; nor do programs that read it "
            "so",
            file=sys.stderr,
        )


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(f"| {name} | {x} |" for name, x in rows.items())
