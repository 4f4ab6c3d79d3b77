"""Writes the trained pair as Hugging Face folders, with a model card."""

import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments.lib import cli, samples
from experiments.pair import corpus, families, quality
from spec_jax.model import config as config_lib, load, params as params_lib
from spec_jax.training import loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One trained model, and what its card says."""

    name: str
    config: config_lib.Qwen3Config
    params: params_lib.Params
    held_out_loss: float  # nats per token on held-out text, in float32
    stages: Mapping[str, int]  # training tokens seen by each stage

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def write(
    assets: pathlib.Path, tokenizer: pathlib.Path, models: Sequence[Model]
) -> None:
    """Writes `assets/<name>/` for each model, in bfloat16.

    The tokenizer is copied to the first model's folder; the others refer to it there.
    """
    for model in models:
        folder = assets / model.name
        config = dataclasses.replace(model.config, dtype="bfloat16")
        load.save(folder, config, params_lib.cast(model.params, "bfloat16"))
        generation = {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
        (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": corpus.END_OF_TEXT,
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        }
        if model is models[0]:
            shutil.copy(tokenizer, folder / "tokenizer.json")
        else:
            settings["tokenizer_file"] = f"../{models[0].name}/tokenizer.json"
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2) + "\n"
        )


def card(
    models: Sequence[Model],
    description: Mapping[str, int | str],
    texts: Mapping[str, Mapping[str, quality.Quality]],
    losses: Mapping[str, float | None],
    notes: Sequence[str] = (),
) -> str:
    """Returns the model card, Markdown.

    Args:
      texts: of each pair, by the name of its row: `quality.measure`.
      losses: of each pair's target, as stored, on held-out text, nats per token; None
        of one with another tokenizer, whose tokens are others.
      notes: what else the card should say, a sentence each.
    """
    rows = [
        f"| {model.name} | {model.num_params:,} | {model.config.num_layers} x "
        f"{model.config.hidden_size} | "
        + " + ".join(f"{tokens:,} ({stage})" for stage, tokens in model.stages.items())
        + f" | {model.held_out_loss:.4f} |"
        for model in models
    ]
    text_rows = [
        f"| {name}, {how} | {one.repetition:.3f} | {one.parses:.0%} |"
        for name, measured in texts.items()
        for how, one in measured.items()
    ]
    loss_rows = [
        f"| {name} | {'-' if loss is None else f'{loss:.4f}'} |"
        for name, loss in losses.items()
    ]
    return _CARD.format(
        rows="\n".join(rows),
        losses="\n".join(loss_rows),
        texts="\n".join(text_rows),
        num_tokens=quality.NUM_TOKENS,
        settings=samples.describe(**samples.SETTINGS, seed=quality.SEED),
        notes="".join(f"- {note}\n" for note in notes).rstrip(),
        **description,
    )


def _flags_path(args: argparse.Namespace) -> pathlib.Path:
    return args.work / "flags.json"


def keep_flags(args: argparse.Namespace) -> None:
    """Writes the flags of a drafter's training beside its checkpoints.

    Raises:
      ValueError: there are checkpoints of other flags; more `--steps` go on from them.
    """
    names = families.deciding(args.family)
    flags = {"family": args.family} | {name: getattr(args, name) for name in names}
    flags = json.loads(json.dumps(flags, default=str))
    path = _flags_path(args)
    if path.exists() and loop.num_steps(args.work):
        held = json.loads(path.read_text(encoding="utf-8"))
        _check_same(path, held, {n: x for n, x in flags.items() if n != "steps"})
    whole = path.with_name(f"{path.name}.part")
    whole.write_text(json.dumps(flags, indent=2) + "\n", encoding="utf-8")
    whole.replace(path)  # Which is never half a file.


def as_trained(args: argparse.Namespace) -> dict[str, Any]:
    """Sets the flags of a drafter as they were in its training, and returns them.

    Raises:
      ValueError: no training, or flags that are given (`args.given`) and are others.
    """
    path = _flags_path(args)
    if not path.exists():
        raise ValueError(f"{path}: no such file; run the stage train first")
    held = json.loads(path.read_text(encoding="utf-8"))
    given = {"family": args.family} | {name: getattr(args, name) for name in args.given}
    given.pop("dialect", None)  # The export's own.
    _check_same(path, held, json.loads(json.dumps(given, default=str)))
    vars(args).update(held)
    args.taps = held["taps"] and tuple(held["taps"])
    args.base = held["base"] and pathlib.Path(held["base"])
    return held


def _check_same(path: pathlib.Path, held: dict, asked: dict[str, Any]) -> None:
    """Raises `ValueError` where flags are not those of a training."""
    for name, value in asked.items():
        if held.get(name) != value:
            was, now = (f"{cli.flag_of(name)} {x}" for x in (held.get(name), value))
            raise ValueError(
                f"{path}: of a training with {was}, and this command has {now}: give "
                "the same, or another --work"
            )


def text_of(flags: Mapping[str, Any]) -> str:
    """Returns the flags of a training as on a command line, without what is a place."""
    texts = {
        cli.flag_of(name): ",".join(map(str, x)) if isinstance(x, list) else x
        for name, x in flags.items()
        if x is not None and x is not False and name not in ("family", "base")
    }
    return " ".join(n if x is True else f"{n} {x}" for n, x in texts.items())


def warn(config: Any, dialect: str) -> None:
    """Says of a head that is written as Llama's if other programs refuse it."""
    width, heads = config.hidden_size, config.layer.num_heads
    is_llama = dialect != "deepspec" and not getattr(config, "has_head_norms", True)
    if is_llama and width % heads:
        print(
            f"warning: a head of width {width} with {heads} attention heads is written "
            "as model_type llama, and transformers 5.24 opens no such config unless "
            "the width is a multiple of the heads; nor do programs that read it so",
            file=sys.stderr,
        )


def drafter_card(
    family: str,
    described: Mapping[str, int | str],
    held_out: Mapping[str, float],
    flags: str,
    notes: Sequence[str] = (),
) -> str:
    """Returns the card of a trained drafter, Markdown.

    Args:
      described: facts in the order in which they are stated.
      held_out: the last measurement of the log.
      flags: those of the commands that decide a bit.
      notes: what else the card should say, a sentence each.
    """
    numbers = {
        name.removeprefix("held_out_").replace("_", " "): f"{value:.4f}"
        for name, value in held_out.items()
        if name.startswith("held_out_")
    }
    rows = {
        name: f"{x:,}" if isinstance(x, int) else x for name, x in described.items()
    }
    lines = [
        f"# A drafter of the family {family}",
        "",
        "It reads the hidden states of one target, and is of no use with another. Like",
        "the target that taught it, it is data of that target's licence.",
        "",
        *_table("", rows),
        "",
        "On held-out texts of the target (an agreement is the share of drafts that are",
        "the target's most likely token, after the text's own tokens; the accepted",
        "length is tokens a round of greedy decoding):",
        "",
        *_table("held out", numbers),
        "",
        f"- Made by `python experiments/train_drafter.py --family {family}`, stages",
        f"  `rollouts`, `train` and `export`, with `{flags}`.",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    return [
        f"| {title} | |",
        "| --- | --- |",
        *(f"| {name} | {x} |" for name, x in rows.items()),
    ]


def tokens_seen(path: pathlib.Path, model: str) -> dict[str, int]:
    """Reads from a card the training tokens that `model` saw, by stage.

    Raises:
      ValueError: not a card that `card` made.
    """
    rows = [line.split(" | ") for line in path.read_text(encoding="utf-8").split("\n")]
    for row in rows:
        if row[0] == f"| {model}" and len(row) == _COLUMNS:
            found = re.findall(r"([\d,]+) \((\w+)\)", row[3])
            return {stage: int(tokens.replace(",", "")) for tokens, stage in found}
    raise ValueError(f"{path}: has no row of the tokens that the {model} saw")


_COLUMNS = 5  # of the table of models

_CARD = """# The embedded pair

A small Qwen3-architecture target and a draft, really trained on real text, so that
speculative decoding can be shown, tested and measured without a download. They write
Python that looks like the standard library's and means little.

| model | parameters | layers x width | tokens seen | held-out loss, nats/token |
| --- | --- | --- | --- | --- |
{rows}

| target, as stored | held-out loss, nats/token |
| --- | --- |
{losses}

Texts of the target: {num_tokens} tokens after each of the 50 bundled prompts, decoded
greedily or drawn ({settings}).

| texts | repeated 4-grams | pass `ast.parse`, as far as whole lines go |
| --- | --- | --- |
{texts}

- Corpus: {corpus}, the library's own source ({train_files} files,
  {train_bytes:,} bytes, {train_tokens:,} tokens; no data tables), sha256
  `{corpus_sha256}`. Under the Python Software Foundation licence:
  [LICENSE-PSF.txt](LICENSE-PSF.txt).
- Held out: {held_out_files} files chosen by a hash of their path;
  {held_out_tokens:,} of their tokens are scored.
- Tokenizer: byte-level BPE of 4096 entries trained on the training files;
  `<|endoftext|>` is id 0, separates files, and is the stop token.
- Training: windows of 512 tokens, 16 a step, products in bfloat16, weights in
  float32; Muon for the matrices of the layers, Adam for the rest; rates that stay and
  then fall linearly. The draft was trained on text, then distilled from the target
  on the same text (forward KL divergence), and then on continuations by the target
  itself, half of them greedy, half drawn at temperature 1.
- Made by `python experiments/train_pair.py --stage target`, then `draft`, `distill`,
  `rollouts`, `align` and `export`. Weights are stored in bfloat16; the losses are
  those of the float32 weights.
{notes}
"""
