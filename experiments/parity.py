"""In which operation do decoding and another way to verify differ first?

Decodes prompts, and verifies the text again, window by window, by a path: the rows of
the engine, or a superseded design. A path that is not batch-invariant chooses other
tokens than decoding. The first window in which it does, or else the very first one, is
run once more by both, with every operation recorded and compared as integers. Each
window starts from the K/V that decoding wrote, so that what differs is the doing of the
operation that is named.
Exit status: 0 no value differs, 2 one does, 1 the input was unusable.
"""

import argparse
import dataclasses
from typing import Any

import numpy as np

from experiments.lib import (
    cli,
    flags,
    microscope,
    prompt_files,
    prompts as prompts_lib,
    records,
    terminal,
)
from spec_jax import algorithms, loading
from spec_jax.model import (
    fingerprint,
    load,
    params as params_lib,
    row_model,
    tokenizer as tokenizer_lib,
)
from spec_jax.ops import dispatch, projection
from spec_jax.paging import cache


PAGE_SIZE = 16

Row = dict[str, Any]


FLAGS = """
    [texts] prompts=1 gen-tokens raw
        --gamma TOKENS=4  drafts of a window, which are decoding's own
    [the two runs] impl
        --target DIR  Hugging Face Qwen3 folder (default: the embedded target)
        --dtype TYPE  of both runs (default: the model's)
        --verify-path PATH=paged-decode  how windows are verified
    [out] one, what was seen
    """


def check(parser: cli.Parser, args: argparse.Namespace) -> None:
    """Refuses texts that are shorter than a window."""
    if args.gen_tokens <= args.gamma:
        parser.error(
            f"--gen-tokens {args.gen_tokens} holds no window of --gamma {args.gamma}: "
            f"give {args.gamma + 1} or more"
        )


KINDS = {"PATH": microscope.PATHS}
parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS, check=check)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A decoded prompt: all of its tokens, and the K/V of all but the last."""

    name: str
    num_prompt: int
    tokens: list[int]
    kv: cache.PagedKV

    def windows(self, width: int) -> list[tuple[int, tuple[int, ...]]]:
        """Returns windows of `width` tokens, each with the position of its first: they
        follow each other from the prompt's last token on."""
        starts = range(self.num_prompt - 1, len(self.tokens) - width, width)
        return [(start, tuple(self.tokens[start : start + width])) for start in starts]


def decode(
    args: argparse.Namespace,
    model: row_model.RowModel,
    params: params_lib.Params,
    words: tokenizer_lib.Tokenizer,
) -> list[Text]:
    """Decodes every prompt greedily, and does not end at stop tokens."""
    named = prompt_files.parse(args.prompts)
    lm = loading.LanguageModel(
        **{"target": model, "params": params, "tokenizer": words},
        **{"drafter": None, "drafter_params": None},
    )
    sizes = {"gen_tokens": args.gen_tokens, "page_size": PAGE_SIZE}
    prompts = prompts_lib.prepare(lm, named, raw=args.raw, **sizes)
    algo, texts = algorithms.autoregressive(model), []
    capacity = prompts_lib.capacity_for(lm, prompts, **sizes)
    sizes = {"capacity": capacity, "page_size": PAGE_SIZE}
    for prompt in prompts:
        state = algo.init(params, [prompt.ids], max_tokens=args.gen_tokens, **sizes)
        state = algo.run(params, state)
        (new,), (sequence,) = algo.generated(state), state.sequences
        about = {"name": prompt.id, "num_prompt": len(prompt.ids)}
        texts.append(Text(**about, tokens=[*prompt.ids, *new], kv=sequence.cache))
    return texts


def differing(
    path: microscope.Path, params: params_lib.Params, text: Text, width: int
) -> list[int]:
    """Returns the positions after which a path chooses another token than decoding."""
    found = []
    for start, window in text.windows(width):
        _, logits, _ = microscope.run(path, params, text.kv, window, start)
        decoded = text.tokens[start + 1 : start + width + 1]
        found += (start + np.flatnonzero(logits.argmax(axis=-1) != decoded)).tolist()
    return found


def look(args: argparse.Namespace) -> Row:
    """Runs both paths, and returns the row of what differs, without its provenance."""
    folder, width = args.target or loading.EMBEDDED_TARGET, args.gamma + 1
    config, loaded = load.load(folder, dtype=args.dtype)
    impl = dispatch.resolve(args.impl)
    slab = row_model.slab_for(impl, max(width, projection.MIN_ROWS))
    model = row_model.RowModel(config=config, impl=impl, slab=slab)
    paths = [
        microscope.Path(name=name, model=model)
        for name in (microscope.DECODE, args.verify_path)
    ]
    params = [path.weights(loaded) for path in paths]
    words = prompts_lib.with_options(args, tokenizer_lib.load(folder))
    texts = decode(args, model, params[0], words)
    others = [differing(paths[1], params[1], text, width) for text in texts]
    number = next((n for n, found in enumerate(others) if found), 0)
    text, windows = texts[number], texts[number].windows(width)
    position = others[number][0] if others[number] else windows[0][0]
    start, window = max(each for each in windows if each[0] <= position)
    records_ = [
        microscope.record(path, own, text.kv, window, start)
        for path, own in zip(paths, params, strict=True)
    ]
    about = {"impl": impl, "dtype": config.dtype, "slab": slab}
    return {
        "kind": "parity",
        "id": text.name,
        "target": str(args.target or "embedded"),
        "weights_sha256": fingerprint.of_params(loaded),
        "native_isa": dispatch.instruction_set(impl),
        "gamma": args.gamma,
        "gen_tokens": args.gen_tokens,
        "prompt_source": args.prompts,
        "reference": {"path": paths[0].name, **about},
        "verify": {"path": paths[1].name, **about},
        "prompts": len(texts),
        "matched_prompts": sum(not found for found in others),
        "choices": sum(len(each.windows(width)) for each in texts) * width,
        "mismatches": sum(map(len, others)),
        "start": start,
        "window": window,
        "moved_by_recording": [each.moved for each in records_],
        **microscope.compare(*records_, start),
    }


def print_row(row: Row) -> None:
    """Prints what is compared, how many choices differ, and the first difference."""
    for side in ("reference", "verify"):
        told = ", ".join(f"{name} {value}" for name, value in row[side].items())
        terminal.show(f"{side}: {told}")
    for moved in filter(None, row["moved_by_recording"]):
        terminal.show(
            f"recording moved {moved:,d} elements of logits and K/V: this is another "
            "program than the one that runs",
            style="bold red",
        )
    first, found = row["first"], f"no difference in {row['num_values']:,d} values"
    if first is not None:
        found = (
            f"first: {microscope.first_of(row)}: {first['differing']:,d} of "
            f"{first['elements']:,d} elements, at most {first['max_ulp']:,d} ulp"
        )
    for line in (
        f"{row['mismatches']:,d} of {row['choices']:,d} choices are not decoding's, in "
        f"{row['prompts'] - row['matched_prompts']} of {row['prompts']} prompts",
        f"looked at: {row['id']}, the window at position {row['start']}",
        found,
    ):
        terminal.show(line, style="bold")


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Runs both paths, writes and prints the row; returns whether all is well."""
    row = look(args) | records.provenance()
    out.write(row)
    print_row(row)
    return row["equal"]


main = records.script("parity.py", parse_args, run)
