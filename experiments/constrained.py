"""Do answers hold to a JSON schema, what do processors cost, and are they exact?

Draws answers to one prompt under a schema, speculatively, and parses them. Then times
steps of decoding, and rounds, without a processor, with the schema's mask and with
penalties, in turn in one process. The timed processors forbid nothing and take nothing
off: they do all of their work, and text and drafts are the same with and without them.

--table compares, in place of that: tokens, log-probabilities, logits and K/V of rounds
with those of decoding, as integers, under each processor, in chains, in trees and in
batches, greedily and drawn.

Exit status: 0 all answers parse, or all is equal; 2 some do not, or something is not; 1
the input was unusable.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import stats

import spec_jax as sj
from experiments.lib import (
    bench,
    flags,
    models,
    published,
    records,
    tables,
    terminal,
)
from spec_jax.debug import evidence


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "[A-Z][a-z]{1,11}"},
        "trade": {"enum": ["baker", "nurse", "pilot", "teacher"]},
        "likes": {
            "type": "array",
            "items": {"type": "string", "pattern": "[a-z ]{3,16}"},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "trade", "likes"],
}
"""A schema that bounds every length, so that answers end."""

TEMPERATURES = (0.0, 0.7, 1.0)

PROMPT = "Describe a person as JSON, with name, trade and likes."


FLAGS = """
    [models] models
    [answers and times] drafter gen-tokens=128 repeats=60
        --answers N=100  to draw, a seed each
        --steps N=16  tokens that are timed at a time, of decoding and of rounds
        --batch N=8  answers at once
        --gamma N=4  drafts of a round, at most
        --table  compare with decoding, in place of answers and times: with --batch
            prompts at once, at temperatures 0, 0.7 and 1
    [sampling] temperature=1.0 noise
    [out] one of the answers, then one per way and processor; or of the table
    """
parse_args = flags.parser(__doc__, FLAGS)


def is_answer(text: str) -> bool:
    """Returns whether a text is a JSON object with the keys that `SCHEMA` requires."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == set(SCHEMA["required"])


def draw(args: argparse.Namespace, lm: sj.LanguageModel, prompt: Any) -> dict[str, Any]:
    """Draws the answers; returns the row that says how many of them parse."""
    seeds = range(args.seed, args.seed + args.answers)
    outs = sj.generate(
        lm,
        [prompt] * args.answers,
        max_tokens=args.gen_tokens,
        num_slots=args.batch,
        gamma=min(args.gamma, lm.gamma_max),
        sampling=[flags.drawn(args, seed=seed) for seed in seeds],
        processors=sj.processors.json_schema(SCHEMA, lm),
    )
    texts = [out.text for out in outs]
    return {
        "kind": "answers",
        "answers": len(texts),
        "parsed": sum(map(is_answer, texts)),
        "different": len(set(texts)),
        "tokens": sum(len(out.tokens) for out in outs),
        "rounds": sum(out.metrics["rounds"] for out in outs),
        "example": texts[0],
    }


def timed(lm: sj.LanguageModel) -> dict[str, Any]:
    """Returns processors that do all of their work, and change no token."""
    mask = sj.processors.json_schema(SCHEMA, lm)
    return {
        "none": None,
        # Every state allows every token; the tables keep their sizes.
        "mask": mask.replace(next=jnp.maximum(mask.next, 0)),
        "penalties": sj.processors.penalties(),
    }


def cases(
    args: argparse.Namespace, lm: sj.LanguageModel, ids: list[int]
) -> dict[tuple[str, str], bench.Case]:
    """Returns the timed cases, a step of decoding and a round, by way and processor."""
    both, gamma = (lm.params, lm.drafter_params), min(args.gamma, lm.gamma_max)
    ways: dict[str, tuple[Any, Any, dict[str, int]]] = {
        "decoding": (sj.autoregressive(lm.target), lm.params, {}),
        "rounds": (sj.speculative(lm.target, lm.drafter), both, {"gamma": gamma}),
    }
    sampling = sj.Sampling(temperature=args.temperature, seed=args.seed)
    asked = {"max_tokens": args.steps, "sampling": sampling}

    def made(processor, algo, params, drafts) -> bench.Thunk:
        how = asked | drafts | {"processors": processor}
        begin = functools.partial(algo.init, params, [ids], **how)
        run = functools.partial(algo.run, params)
        # The number of rounds that the text takes, from a first run.
        calls = int(run(begin()).slots.num_rounds[0]) if drafts else args.steps
        return bench.on_copies(run, begin(), calls=calls)

    return {
        (way, name): functools.partial(made, processor, *parts)
        for name, processor in timed(lm).items()
        for way, parts in ways.items()
    }


def processors(lm: sj.LanguageModel) -> dict[str, Any]:
    """Returns a processor of each kind, and a chain of three; each changes texts."""
    tokens = range(lm.target.config.vocab_size)
    made = {
        "logit bias": sj.processors.logit_bias(dict.fromkeys(tokens[::2], -4.0)),
        "bad words": sj.processors.bad_words([[token] for token in tokens[::3]]),
        "min tokens": sj.processors.min_tokens(20, [*lm.stop_ids, *tokens[1::3]]),
        "penalties": sj.processors.penalties(
            repetition=1.3, presence=0.4, frequency=0.3
        ),
        "regular expression": sj.processors.regex("([a-z]+ ?)*", lm),
        "JSON schema": sj.processors.json_schema(SCHEMA, lm),
    }
    parts = ("penalties", "min tokens", "regular expression")
    return made | {"chain of three": sj.processors.chain(*map(made.get, parts))}


def shapes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the arguments of `check_lossless` for each shape of rounds."""
    tree = sj.Tree.parse(f"3x{args.gamma}:{3 * args.gamma}")
    return {
        "chain": {"gamma": args.gamma, "num_slots": 1},
        "tree": {"gamma": tree, "num_slots": 1},
        "batch": {"gamma": args.gamma, "num_slots": args.batch},
    }


def compare(
    lm: sj.LanguageModel,
    prompts: Sequence[Any],
    *,
    temperature: float,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Returns the fields of a row: prompts, and how many of them are equal in each of
    `evidence.WHATS`."""
    sampling = sj.Sampling(temperature=temperature, seed=seed) if temperature else None
    found = sj.check_lossless(lm, prompts, sampling=sampling, **settings).comparisons
    wrong = [one.what for each in found for one in each.differences]
    return {
        **{"temperature": temperature, "prompts": len(found)},
        "tokens_compared": sum(one.tokens for one in found),
        "rounds": sum(one.rounds for one in found),
        "nonfinite": sum(one.nonfinite for one in found),
        **{what: len(found) - wrong.count(what) for what in evidence.WHATS},
    }


def table_of(
    args: argparse.Namespace, lm: sj.LanguageModel
) -> Iterator[dict[str, Any]]:
    """Compares every processor, shape and temperature; yields the rows."""
    prompts = [f"{PROMPT} Number {number}." for number in range(args.batch)]
    axes = processors(lm).items(), shapes(args).items(), TEMPERATURES
    cases = list(itertools.product(*axes))
    with terminal.counted("cells", total=len(cases)) as advance:
        for (name, processor), (shape, settings), temperature in cases:
            found = compare(
                lm,
                prompts[: settings["num_slots"]],
                **settings,
                temperature=temperature,
                seed=args.seed,
                max_tokens=args.gen_tokens,
                ignore_eos=True,
                processors=processor,
            )
            yield {"kind": "cell", "processor": name, "shape": shape} | found
            advance()


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Draws, parses and times, or compares; returns whether all is well."""
    lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
    has_chat = lm.tokenizer is not None and lm.tokenizer.has_chat_template
    prompt = [{"role": "user", "content": PROMPT}] if has_chat else PROMPT
    out.common = models.common(args, lm, "drafter", "batch")
    if args.table:
        table = out.write_all(table_of(args, lm))
        tables.print_rows(table, CELLS)
        return all(map(published.is_equal, table))
    answers = draw(args, lm, prompt)
    out.write(answers)
    terminal.show(
        f"{answers['parsed']} of {answers['answers']} answers parse, "
        f"{answers['different']} different, such as {answers['example']}"
    )
    text = lm.tokenizer.apply_chat(prompt) if has_chat else PROMPT
    ids = lm.tokenizer.encode(text, begins=not has_chat)
    found = bench.run(cases(args, lm, ids), repeats=args.repeats)
    rows = out.write_all(
        {"kind": "step", "way": way, "processor": name, "steps": args.steps}
        | found.row((way, name), ratio_to=(way, "none"))
        | median_fields(found, (way, name), (way, "none"))
        for way, name in found.seconds
    )
    tables.print_rows([row | out.common for row in rows], COLUMNS)
    return answers["parsed"] == answers["answers"]


def median_fields(found: bench.Timings, case: Any, to: Any) -> dict[str, float]:
    """Returns the 95 % confidence interval of the median of the ratios, by ranks;
    with few ratios, their range."""
    ratios = bench.ratios(found.seconds[case], found.seconds[to])
    low, high = stats.quantile_test(ratios, p=0.5).confidence_interval(0.95)
    low, high = np.nanmax([low, min(ratios)]), np.nanmin([high, max(ratios)])
    return {"median_low": low, "median_high": high}


COLUMNS = {
    "way": "",
    "processor": "",
    "ms a step": ("ms", ".3f"),
    "x none": ("ratio", ".3f"),
    "median, 95 %": lambda row: f"{row['median_low']:.3f}-{row['median_high']:.3f}",
    "p10-p90": lambda row: f"{row['ratio_p10']:.3f}-{row['ratio_p90']:.3f}",
}
"""The columns of the table, for `tables.print_rows`."""

CELLS = {
    "processor": "",
    "shape": "",
    "temperature": ("temperature", ""),
    "tokens": ("tokens_compared", ",d"),
    "rounds": ("rounds", ",d"),
    "equal": lambda row: (
        "all" if published.is_equal(row) else tables.wrong("differs", True)
    ),
}

main = records.script("constrained.py", parse_args, run)
