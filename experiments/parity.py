"""Which operation is the first to differ between decoding and another way to verify?

Decodes prompts, and verifies the text again, window by window, by a path: the rows of
the engine, or a superseded design. A path that is not batch-invariant chooses other
tokens than decoding. The first window in which it does, or else the very first one, is
run once more by both, with every operation recorded and compared as integers. Each
window starts from the K/V that decoding wrote, so that what differs is the doing of the
operation that is named.
Exit status: 0 no value differs, 2 one does, 1 the input was unusable. With `--inject`:
0 if the first difference is where the fault was planted.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import console as rich_console

from experiments.lib import (
    flags,
    microscope,
    prompt_files,
    prompts as prompts_lib,
    records,
    tables,
    terminal,
)
from spec_jax import algorithms, loading
from spec_jax.model import (
    config as config_lib,
    fingerprint,
    load,
    observe,
    params as params_lib,
    row_model,
    tokenizer as tokenizer_lib,
)
from spec_jax.ops import dispatch, skinny_gemm
from spec_jax.paging import cache
from spec_jax.typing import IMPLS


AS_EXPECTED, NOT_AS_EXPECTED = 0, 2
PAGE_SIZE = 16

Row = Mapping[str, Any]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    text = "--target DIR  Hugging Face Qwen3 folder (default: the embedded target)"
    cli.add(parser, text)
    group = parser.add_argument_group("texts")
    flags.add_prompts(group, default="1")
    flags.add_gen_tokens(group, default=64)
    cli.add(group, "--gamma TOKENS=4  drafts of a window, which are decoding's own")
    flags.add_raw(group)
    group = parser.add_argument_group("the two runs")
    cli.add(
        group,
        """
        --impl IMPL=auto  kernels of decoding
        --dtype TYPE  dtype of decoding (default: the model's)
        --slab ROWS  slab height of decoding (default: as in spec_round.py)
        --verify-path PATH=paged-decode  how windows are verified
        --verify-impl IMPL  kernels of the path (default: those of decoding)
        --verify-dtype TYPE  dtype of the path (default: that of decoding)
        --verify-slab ROWS  slab height of the path (default: that of decoding)
        --inject LAYER:OPERATION  make one element of an operation of the path a unit in
            the last place larger: it must be named
        """,
        **{"PATH": microscope.PATHS, "IMPL": IMPLS, "TYPE": config_lib.DTYPES},
        **{"LAYER:OPERATION": str},
    )
    flags.add_out(parser, rows="one, what was seen")
    args = parser.parse_args(argv)
    if args.gen_tokens <= args.gamma:
        parser.error(
            f"--gen-tokens {args.gen_tokens} holds no window of --gamma {args.gamma}: "
            f"give {args.gamma + 1} or more"
        )
    return args


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt that was decoded: the tokens, and the K/V of all but the last."""

    name: str
    num_prompt: int
    tokens: list[int]
    kv: cache.PagedKV

    def windows(self, width: int) -> list[int]:
        """Returns where whole windows begin, from the prompt's last token on."""
        return [*range(self.num_prompt - 1, len(self.tokens) - width, width)]


def paths_of(
    args: argparse.Namespace, config: config_lib.ModelConfig
) -> tuple[microscope.Path, microscope.Path]:
    """Returns decoding, and the path that is compared with it."""

    def path(name, impl, dtype, slab):
        of_path = dataclasses.replace(config, dtype=dtype)
        model = row_model.RowModel(config=of_path, impl=impl, slab=slab)
        return microscope.Path(name=name, model=model)

    rows = max(args.gamma + 1, skinny_gemm.MIN_ROWS)
    impl = dispatch.resolve(args.impl)
    slab = args.slab or row_model.slab_for(impl, rows)
    verify_impl = dispatch.resolve(args.verify_impl or impl)
    verify_slab = args.verify_slab or row_model.slab_for(verify_impl, slab)
    verify_dtype = args.verify_dtype or config.dtype
    return (
        path(microscope.DECODE, impl, config.dtype, slab),
        path(args.verify_path, verify_impl, verify_dtype, verify_slab),
    )


def decode(
    args: argparse.Namespace,
    model: row_model.RowModel,
    params: params_lib.Params,
    words: tokenizer_lib.Tokenizer,
) -> list[Text]:
    """Decodes every prompt, greedily, past stop tokens."""
    named = prompt_files.parse(args.prompts, default_file=prompt_files.BUNDLED)
    lm = loading.LanguageModel(
        **{"target": model, "params": params, "tokenizer": words},
        **{"drafter": None, "drafter_params": None},
    )
    sizes = {"gen_tokens": args.gen_tokens, "page_size": PAGE_SIZE}
    prepared = prompts_lib.prepare(lm, named, raw=args.raw, **sizes)
    algo, texts = algorithms.autoregressive(model), []
    sizes = {"capacity": prepared.capacity, "page_size": PAGE_SIZE}
    for prompt, ids in zip(prepared.prompts, prepared.ids, strict=True):
        state = algo.init(params, [ids], max_tokens=args.gen_tokens, **sizes)
        state = algo.run(params, state)
        (new,), (sequence,) = algo.generated(state), state.sequences
        tokens, kv = [*ids, *new], sequence.cache
        text = Text(name=prompt.id, num_prompt=len(ids), tokens=tokens, kv=kv)
        texts.append(text)
    return texts


def kv_of(text: Text, path: microscope.Path) -> cache.PagedKV:
    """Returns a text's K/V in the dtype of a path."""
    cast = lambda pools: tuple(pool.astype(path.model.config.dtype) for pool in pools)
    return text.kv.replace(k=cast(text.kv.k), v=cast(text.kv.v))


def differing(
    path: microscope.Path, params: params_lib.Params, text: Text, width: int
) -> list[int]:
    """Returns the positions after which a path chooses another token than decoding."""
    kv, found = kv_of(text, path), []
    for start in text.windows(width):
        window = tuple(text.tokens[start : start + width])
        _, logits = microscope.logits_of(path, params, kv, window, start)
        decoded = text.tokens[start + 1 : start + width + 1]
        found += (start + np.flatnonzero(logits.argmax(axis=-1) != decoded)).tolist()
    return found


def look(args: argparse.Namespace) -> tuple[dict[str, Any], tokenizer_lib.Tokenizer]:
    """Runs both paths, and returns what is seen as a row, without its provenance."""
    folder, width = args.target or loading.EMBEDDED_TARGET, args.gamma + 1
    fault = None if args.inject is None else microscope.parse(args.inject)
    config, loaded = load.load(folder, dtype=args.dtype)
    paths = paths_of(args, config)
    if fault is not None:
        microscope.check(fault, paths[1])
    params = [path.weights(loaded) for path in paths]
    words = prompts_lib.with_options(args, tokenizer_lib.load(folder))
    texts = decode(args, paths[0].model, params[0], words)
    others = [differing(paths[1], params[1], text, width) for text in texts]
    number = next((n for n, found in enumerate(others) if found), 0)
    text, starts = texts[number], texts[number].windows(width)
    position = others[number][0] if others[number] else starts[0]
    start = max(start for start in starts if start <= position)
    window = tuple(text.tokens[start : start + width])
    one, other = (
        microscope.record(path, own, kv_of(text, path), window, start, planted)
        for path, own, planted in zip(paths, params, (None, fault), strict=True)
    )
    return {
        "kind": "parity",
        "id": text.name,
        "target": str(args.target or "embedded"),
        "weights_sha256": fingerprint.of_params(loaded),
        "native_isa": dispatch.instruction_set(paths[0].model.impl),
        "gamma": args.gamma,
        "gen_tokens": args.gen_tokens,
        "prompt_source": args.prompts,
        "reference": paths[0].to_row(),
        "verify": paths[1].to_row(),
        "fault": None if fault is None else vars(fault),
        "prompts": len(texts),
        "matched_prompts": sum(not found for found in others),
        "choices": sum(len(each.windows(width)) for each in texts) * width,
        "mismatches": sum(map(len, others)),
        "start": start,
        "window": window,
        "moved_by_recording": [one.moved, other.moved],
        **_differences(microscope.compare(one, other), start),
        "rows": [
            {"position": start + n, "token": window[n]}
            | _choices(paths, [each.values["logits"][n] for each in (one, other)])
            for n in range(width)
        ],
    }, words


def _differences(found: microscope.Comparison, start: int) -> dict[str, Any]:
    """Returns a comparison by layers and operations, as `plot.py` draws it."""
    names = dict.fromkeys(key.rpartition(":")[2] for key in found.cells)
    operations = [name for name in names if name not in observe.OUTSIDE]
    layers = range(len(found.cells) // max(len(operations), 1))
    first = found.first and {
        **{name: found.first[name] for name in ("layer", "operation")},
        "position": start + found.first["row"],
        **{name: found.first[name] for name in list(found.cells.values())[0]},
    }
    residuals = [found.cells[observe.key(n, "mlp_residual")] for n in layers]
    return {
        "equal": first is None,
        "first": first,
        "num_values": sum(cell["elements"] for cell in found.cells.values()),
        "operations": operations,
        "layers": list(layers),
        "cells": [
            [found.cells[observe.key(n, name)] for name in operations] for n in layers
        ],
        "outside": {n: found.cells[n] for n in observe.OUTSIDE if n in found.cells},
        "growth": [{"layer": n} | cell for n, cell in enumerate(residuals)],
    }


def _choices(paths: Sequence[microscope.Path], logits: Sequence[np.ndarray]) -> Row:
    row = {}
    for side, path, each in zip(("reference", "verify"), paths, logits, strict=True):
        top, margin = microscope.choice_of(each, path.model.config.dtype)
        row |= {f"{side}_top": top, f"{side}_margin_ulp": margin}
    return row


def names_the_fault(row: Row) -> bool:
    """Returns whether the first difference is where the fault was planted."""
    first, fault = row["first"], row["fault"]
    names = ("layer", "operation")
    return first is not None and all(first[name] == fault[name] for name in names)


GROWTH: Mapping[str, tables.Column] = {
    "layer": "d",
    "differing": ",d",
    "elements": ",d",
    "at most ulp": ("max_ulp", ",d"),
    "relative": ".1e",
}


def print_row(
    row: Row, words: tokenizer_lib.Tokenizer, console: rich_console.Console
) -> None:
    """Prints what is compared, the first difference, its growth, and the choices."""
    for side in ("reference", "verify"):
        told = ", ".join(f"{name} {value}" for name, value in row[side].items())
        console.print(f"{side}: {told}", highlight=False)
    for moved in filter(None, row["moved_by_recording"]):
        console.print(
            f"recording moved {moved:,d} elements of logits and K/V: this is another "
            "program than the one that runs",
            style="bold red",
        )
    first, lines = row["first"], [
        f"{row['mismatches']:,d} of {row['choices']:,d} choices are not decoding's, in "
        f"{row['prompts'] - row['matched_prompts']} of {row['prompts']} prompts",
        f"looked at: {row['id']}, the window at position {row['start']}",
        f"no difference in {row['num_values']:,d} values",
    ]  # fmt: skip
    if first is not None:
        layer = "" if first["layer"] is None else f"layer {first['layer']}, "
        lines[-1] = (
            f"first: {layer}{first['operation']}, position {first['position']}: "
            f"{first['differing']:,d} of {first['elements']:,d} elements, at most "
            f"{first['max_ulp']:,d} ulp"
        )
    for line in lines:
        console.print(line, style="bold", highlight=False)
    if first is not None:
        title = "growth: the residual that leaves a layer"
        tables.print_rows(row["growth"], GROWTH, console, title=title)

    def top(one: Row, side: str) -> tables.Cell:
        shown = [
            f"{token} {json.dumps(words.decode([token]), ensure_ascii=False)}: "
            + ("not finite" if logit is None else f"{logit:.4g}")
            for token, logit in one[f"{side}_top"]
        ]
        chosen = [one[f"{each}_top"][0][0] for each in ("reference", "verify")]
        return tables.wrong("\n".join(shown), chosen[0] != chosen[1])

    columns: dict[str, tables.Column] = {
        "position": "d",
        "reference": lambda one: top(one, "reference"),
        "margin": ("reference_margin_ulp", ".3g"),
        "verify": lambda one: top(one, "verify"),
        "verify's margin": ("verify_margin_ulp", ".3g"),
    }
    title = "highest logits (token, its text: logit), margin in ulp"
    tables.print_rows(row["rows"], columns, console, title=title)


def run(args: argparse.Namespace) -> int:
    """Runs everything and shows it; returns the exit status."""
    console = terminal.console()
    with records.open_out(args) as out:
        row, words = look(args)
        row |= records.provenance()
        out.write(row)
    print_row(row, words, console)
    expected = row["equal"] if row["fault"] is None else names_the_fault(row)
    return AS_EXPECTED if expected else NOT_AS_EXPECTED


main = cli.script("parity.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
