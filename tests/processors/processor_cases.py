"""Processors of every kind over a small vocabulary, and the definition of each."""

import numpy as np

from spec_jax.processors import built_in, grammar, processor


VOCAB_SIZE = 96
STOPS = (0, 2)
NEXT = {0: {5: 0, 6: 0, 7: 1, 2: 0, 41: 0}, 1: {token: 0 for token in range(20, 90)}}
"""The transitions of a grammar, whose texts may end in state 0."""

BIAS = {7: -np.inf, 3: 2.5, 90: -4.0}
WORDS = [[5], [7, 3], [3, 90, 41], [66, 66]]
PENALTIES = {"repetition": 1.7, "presence": 0.4, "frequency": 0.3}


def make(name: str) -> processor.Processor:
    """Returns a processor by its name; "all" is a chain of all but the grammar."""
    made = {
        "bias": lambda: built_in.logit_bias(BIAS),
        "words": lambda: built_in.bad_words(WORDS),
        "least": lambda: built_in.min_tokens(6, STOPS),
        "penalties": lambda: built_in.penalties(**PENALTIES),
        "grammar": lambda: grammar.of_transitions(
            NEXT, first=0, final={0}, stop_ids=STOPS, vocab_size=VOCAB_SIZE
        ),
    }
    if name != "all":
        return made[name]()
    kinds = ("penalties", "bias", "words", "least")
    return processor.chain(*(made[kind]() for kind in kinds))


NAMES = ("bias", "words", "least", "penalties", "grammar", "all")


def expected(name: str, prompt: list[int], answer: list[int], logits) -> np.ndarray:
    """Returns the processed logits in float64, by the definitions of the processors."""
    row = np.array(logits, np.float64)
    text = [*prompt, *answer]
    if name in ("penalties", "all"):
        for token in set(text):
            at = row[token]
            factor = np.float64(np.float32(PENALTIES["repetition"]))
            row[token] = at / factor if at > 0 else at * factor
        for token in set(answer):
            count = answer.count(token)
            row[token] -= PENALTIES["frequency"] * count + PENALTIES["presence"]
    if name in ("bias", "all"):
        for token, value in BIAS.items():
            row[token] += value
    if name in ("words", "all"):
        for *before, last in WORDS:
            if text[len(text) - len(before) :] == before:
                row[last] = -np.inf
    if name in ("least", "all") and len(answer) < 6:
        row[list(STOPS)] = -np.inf
    if name == "grammar":
        state = 0
        for token in answer:
            if state == "left" or (state == "end" and token not in STOPS):
                state = "left"
            elif state in ("end", 0) and token in STOPS:
                state = "end"
            else:
                state = NEXT[state].get(token, "left")
        allowed = {"end": STOPS, 0: (*NEXT[0], *STOPS), 1: NEXT[1]}
        if state != "left":
            kept = np.isin(np.arange(len(row)), list(allowed[state]))
            row[~kept] = -np.inf
    return row
