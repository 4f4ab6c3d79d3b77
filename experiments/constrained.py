"""Do drawn answers hold to a JSON schema, and what do masks and penalties cost a step?

Draws answers to one prompt under a schema, speculatively, and parses them. Then times
steps of decoding, and rounds, without a processor, with the schema's mask and with
penalties, in turn in one process: the same number of tokens each, whatever they are.

Exit status: 0 all answers parse; 2 some do not; 1 the input was unusable.
"""

from experiments.lib import cli


if __name__ == "__main__":
    cli.start()  # Before the imports, which take seconds.

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import spec_jax as sj
from experiments.lib import bench, flags, models, records, tables, terminal


PARSED, NOT_PARSED = 0, 2

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
"""Bounded in every place, so that answers end."""

PROMPT = "Describe a person as JSON, with name, trade and likes."


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    flags.add_models(parser.add_argument_group("models"), has_mesh=False)
    group = parser.add_argument_group("answers and times")
    flags.add_drafter(group)
    flags.add_gen_tokens(group, default=128)
    flags.add_repeats(group, default=9)
    cli.add(
        group,
        """
        --answers N=100  to draw, a seed each
        --batch N=8  answers at once
        --gamma N=4  drafts of a round, at most
        --temperature T=1.0  divides the logits; 0 is greedy
        """,
    )
    flags.add_noise(parser.add_argument_group("sampling"))
    flags.add_out(parser, rows="one of the answers, then one per way and processor")
    args = parser.parse_args(argv)
    flags.check_models(parser, args)
    flags.check_sampling(parser, args)
    return args


def is_answer(text: str) -> bool:
    """Returns whether a text is JSON with what the schema requires."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == set(SCHEMA["required"])


def draw(args: argparse.Namespace, lm: sj.LanguageModel, prompt: Any) -> dict[str, Any]:
    """Draws the answers; returns the row that counts those that parse."""
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: getattr(args, name) for name in names}
    seeds = range(args.seed, args.seed + args.answers)
    outs = sj.generate(
        lm,
        [prompt] * args.answers,
        max_tokens=args.gen_tokens,
        num_slots=args.batch,
        gamma=min(args.gamma, lm.gamma_max),
        sampling=[sj.Sampling(**given, seed=seed) for seed in seeds],
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


def cases(
    args: argparse.Namespace, lm: sj.LanguageModel, ids: list[int]
) -> dict[tuple[str, str], bench.Case]:
    """Returns what is timed: a step of decoding and a round, by way and processor."""
    kinds: Mapping[str, Any] = {
        "none": None,
        "mask": sj.processors.json_schema(SCHEMA, lm),
        "penalties": sj.processors.penalties(
            repetition=1.1, presence=0.2, frequency=0.1
        ),
    }
    base, algo = sj.autoregressive(lm.target), sj.speculative(lm.target, lm.drafter)
    sampling = sj.Sampling(temperature=args.temperature, seed=args.seed)
    found: dict[tuple[str, str], bench.Case] = {}
    for name, processor in kinds.items():
        asked: dict[str, Any] = {"max_tokens": args.gen_tokens, "sampling": sampling}
        asked["processors"] = processor

        def decoding(asked=asked):
            """Makes steps of decoding."""
            state = base.init(lm.params, [ids], **asked)
            run = functools.partial(base.run, lm.params)
            return bench.on_copies(run, state, calls=args.gen_tokens)

        def rounds(asked=asked):
            """Makes rounds, as many as the text takes."""
            params = lm.params, lm.drafter_params
            gamma = min(args.gamma, lm.gamma_max)
            state = algo.init(params, [ids], gamma=gamma, **asked)
            run = functools.partial(algo.run, params)
            bench.on_copies(run, state)()
            done = algo.run(params, algo.init(params, [ids], gamma=gamma, **asked))
            count = int(done.slots.num_rounds[0])
            return bench.on_copies(run, state, calls=count)

        found["decoding", name], found["rounds", name] = decoding, rounds
    return found


def run(args: argparse.Namespace) -> int:
    """Draws, parses and times; returns the exit status."""
    console = terminal.console()
    with records.open_out(args) as out:
        lm = models.load(args, drafter=args.drafter, gamma_max=args.gamma)
        has_chat = lm.tokenizer is not None and lm.tokenizer.has_chat_template
        prompt = [{"role": "user", "content": PROMPT}] if has_chat else PROMPT
        out.common = (
            models.describe(args, lm)
            | {"drafter": args.drafter, "batch": args.batch}
            | records.provenance()
        )
        answers = draw(args, lm, prompt)
        out.write(answers)
        console.print(
            f"{answers['parsed']} of {answers['answers']} answers parse, "
            f"{answers['different']} different, such as {answers['example']}",
            highlight=False,
            markup=False,
        )
        text = lm.tokenizer.apply_chat(prompt) if has_chat else PROMPT
        ids = lm.tokenizer.encode(text, begins=not has_chat)
        timed = bench.run(cases(args, lm, ids), repeats=args.repeats)
        rows = [
            {"kind": "step", "way": way, "processor": name}
            | timed.row((way, name), ratio_to=(way, "none"))
            for way, name in timed.seconds
        ]
        out.write_all(rows)
    tables.print_rows([row | out.common for row in rows], COLUMNS, console)
    return PARSED if answers["parsed"] == answers["answers"] else NOT_PARSED


COLUMNS = {
    "way": "",
    "processor": "",
    "ms a step": ("ms", ".3f"),
    "x none": ("ratio", ".3f"),
    "p10-p90": lambda row: f"{row['ratio_p10']:.3f}-{row['ratio_p90']:.3f}",
}
"""Of the table, for `tables.print_rows`."""

main = cli.script("constrained.py", parse_args, run)

if __name__ == "__main__":
    cli.end(main)
