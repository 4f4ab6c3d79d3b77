"""How well does a target predict texts in eight bits or four, beside its dense weights?

Cuts the texts into windows, and scores the second half of each, given the first: what
llama.cpp's llama-perplexity does. Exit status: 0 measured, 1 the input was unusable.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from experiments.lib import flags, prompt_files, records, terminal
from spec_jax import generation, loading
from spec_jax.ops import dispatch


FORMS = (None, "q8_0", "q4_1")


FLAGS = """
    target dtype impl isa prompts=50
    --window TOKENS=512  of a window; the second half is scored
    --windows N=8  at most
    [out] one for each form of the weights
    """
parse_args = flags.parser(__doc__, FLAGS)


def of_form(args: argparse.Namespace, text: str, form: str | None) -> dict:
    """Returns the row of the text's windows, with the `log_probs` of all scored tokens,
    and the most likely token in the place of each, `chosen`."""
    lm = loading.load(
        args.target, drafter="ngram", dtype=args.dtype, weights=form, impl=args.impl
    )
    assert lm.tokenizer is not None
    ids, size = lm.tokenizer.encode(text), args.window
    count, half = min(len(ids) // size, args.windows), size // 2 + 1
    if not count:
        raise ValueError(f"{len(ids)} tokens are no window of {size}: give more text")
    whole = [ids[start : start + size] for start in range(0, count * size, size)]
    found = generation.score(
        lm,
        [window[:half] for window in whole],
        [window[half:] for window in whole],
        top_logprobs=1,
    )
    log_probs = np.concatenate([one.log_probs for one in found]).astype(np.float64)
    return {
        "kind": "perplexity",
        "target": str(args.target or "embedded"),
        "dtype": lm.target.config.dtype,
        "weights": lm.target.config.weights,
        "impl": lm.target.impl,
        "native_isa": dispatch.instruction_set(lm.target.impl),
        "tokens": log_probs.size,
        "perplexity": float(np.exp(-log_probs.mean())),
        "log_probs": log_probs,
        "chosen": np.concatenate([one.top_tokens[:, 0] for one in found]),
    }


def rows(args: argparse.Namespace, text: str) -> Iterator[dict]:
    """Yields the row of each form, compared with the first."""
    dense = None
    for form in FORMS:
        row = of_form(args, text, form)
        own = row.pop("log_probs"), row.pop("chosen")
        dense = dense or own
        less = dense[0] - own[0]
        row["ratio"] = float(np.exp(less.mean()))
        # The standard error that independent tokens would have.
        row["ratio_error"] = float(less.std() / np.sqrt(less.size))
        row["same_choice"] = float(np.mean(dense[1] == own[1]))
        yield row


def run(args: argparse.Namespace, out: records.JsonLines) -> None:
    """Measures, writes and prints."""
    read = prompt_files.parse(args.prompts)
    text = "\n\n".join(str(prompt.text) for prompt in read)
    out.common = {"prompt_source": args.prompts, **records.provenance()}
    for row in rows(args, text):
        out.write(row)
        ratio = f"{row['ratio']:.4f} x dense +- {row['ratio_error']:.4f}"
        terminal.show(f"{row['weights']}: {row['perplexity']:.4f}, {ratio}")


main = records.script("perplexity.py", parse_args, run)
