"""Processors compared with definitions and Hugging Face's, and refused values."""

import itertools
import math

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.engine import processing
from spec_jax.processors import built_in, grammar, processor as processor_lib
from spec_jax.testing import processor_kit


VOCAB_SIZE = 96
STOPS = (0, 2)
NEXT = {0: {5: 0, 6: 0, 7: 1, 2: 0, 41: 0}, 1: {token: 0 for token in range(20, 90)}}
"""The transitions of a grammar, whose texts may end in state 0."""

BIAS = {7: -np.inf, 3: 2.5, 90: -4.0}
WORDS = [[5], [7, 3], [3, 90, 41], [66, 66]]
PENALTIES = {"repetition": 1.7, "presence": 0.4, "frequency": 0.3}


def make(name: str) -> processor_lib.Processor:
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
    return processor_lib.chain(*(made[kind]() for kind in kinds))


NAMES = ("bias", "words", "least", "penalties", "grammar", "all")


def expected(
    name: str, prompt, answer, logits, *, penalties=PENALTIES, words=WORDS
) -> np.ndarray:
    """Returns the processed logits in float64, by the definitions of the processors."""
    row, text = np.array(logits, np.float64), [*prompt, *answer]
    if name in ("penalties", "all"):
        for token in set(text):
            at = row[token]
            factor = np.float64(np.float32(penalties["repetition"]))
            row[token] = at / factor if at > 0 else at * factor
        for token in set(answer):
            count = list(answer).count(token)
            row[token] -= penalties["frequency"] * count + penalties["presence"]
    if name in ("bias", "all"):
        for token, value in BIAS.items():
            row[token] += value
    if name in ("words", "all"):
        for *before, last in words:
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


LONGEST = 8  # tokens of an answer
PROMPTS = ([5], [7, 3, 90, 41, 5, 66], [66, 3, 90], [2, 0, 2, 9])


def walked(processor, prompt, answer, logits) -> np.ndarray:
    """Returns the logits after an answer, processed as in rounds and in decoding."""
    text = np.zeros((64,), np.int32)
    text[: len(prompt)] = prompt
    begun = processing.begin(
        processor, text, np.int32(len(prompt)), vocab_size=VOCAB_SIZE
    )
    padded = np.zeros((LONGEST,), np.int32)
    padded[: len(answer)] = answer
    return np.asarray(_walk(begun, padded, np.int32(len(answer)), logits))


@jax.jit
def _walk(begun, answer, count, logits):
    """Processes logits after `count` tokens: one program for answers of all lengths."""
    step = lambda at, state: begun.processor.step(state, answer[at])
    state = jax.lax.fori_loop(0, count, step, begun.states)
    return processing.process(begun.processor, state, logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_is_its_definition(name, rng):
    """Fails if a count, a window of the text or the order of parts is wrong."""
    made = make(name)
    answers = rng.choice([3, 5, 7, 41, 66, 90, 2, 30], (8, 8))
    for prompt in PROMPTS:
        for answer in (*answers.tolist(), [66] * 8, [3, 90, 41, 7, 3, 90, 5, 5]):
            count = int(rng.choice([0, 1, 3, 8]))
            logits = (rng.normal(size=VOCAB_SIZE) * 4).astype(np.float32)
            found = walked(made, prompt, answer[:count], logits)
            right = expected(name, prompt, answer[:count], logits)
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_penalties_of_nothing_change_no_bit(rng):
    logits = np.append(rng.normal(size=95), -0.0).astype(np.float32)
    found = walked(built_in.penalties(), [3, 4], [5, 5], logits)
    testing.assert_same_bits(found, logits)


def test_processors_are_hugging_faces(rng):
    """Fails if logits differ from those of the library that defined the processor."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers").generation.logits_process
    prompt, answer, stops = [7, 3, 90, 5, 66], [3, 90, 66], list(STOPS)
    pairs = (
        (built_in.penalties(repetition=1.7), hf.RepetitionPenaltyLogitsProcessor(1.7)),
        (make("words"), hf.NoBadWordsLogitsProcessor(WORDS, 95)),
        (make("least"), hf.MinNewTokensLengthLogitsProcessor(5, 6, stops)),
    )
    for count, (ours, theirs) in itertools.product(range(len(answer) + 1), pairs):
        logits = rng.normal(size=(1, VOCAB_SIZE)).astype(np.float32)
        ids = torch.tensor([[*prompt, *answer[:count]]])
        right = theirs(ids, torch.tensor(logits))[0].numpy()
        found = walked(ours, prompt, answer[:count], logits[0])
        np.testing.assert_allclose(found, right, rtol=1e-6)


bias, words, least = built_in.logit_bias, built_in.bad_words, built_in.min_tokens
penalties, chain = built_in.penalties, processor_lib.chain
NO_ID = "give at least one token id"
REFUSED = {
    "a bias of nothing": (bias, {}, "give a value for each token"),
    "a bias of NaN": (bias, {3: math.nan}, r"bias\[3\]=nan: give a number below infin"),
    "an infinite bias": (bias, {3: math.inf}, r"bias\[3\]=inf: give a number below"),
    "a negative token": (bias, {-1: 1}, "that is no token"),
    "no bad word": (words, [], "give rows of token ids"),
    "an empty word": (words, [[]], NO_ID),
    "a bias of a word": (bias, {"a": 1}, NO_ID),
    "one row of words": (words, [3], NO_ID),
    "no least": (least, 0, [1], "count=0 must be a whole number"),
    "half a least": (least, 1.5, [1], "count=1.5 must be a whole number"),
    "nothing stops": (least, 3, [], NO_ID),
    "a penalty of 0": (lambda: penalties(repetition=0.0), "repetition=0.0 must be ab"),
    "a penalty of NaN": (lambda: penalties(presence=math.nan), "presence=nan is not a"),
    "a penalty in words": (lambda: penalties(frequency="1"), "frequency='1' is not a"),
    "a chain of nothing": (chain, "a chain of no processors"),
    "a chain of words": (lambda: chain(penalties(), "no"), "part 1 of the chain is of"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_in_one_line(case):
    refused, *given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        refused(*given)
    assert "\n" not in str(caught.value)


class _Counts(processor_lib.Processor):
    """Counts tokens, and adds the count to the logit of token 3; breaks no clause."""

    def init(self, prompt, length, *, vocab_size):
        return jnp.int32(0)

    def step(self, state, token):
        return state + 1

    def apply(self, state, logits):
        return logits.at[3].add(state.astype(jnp.float32))


HELD = [0]


def calls(self, state, token):
    """Counts calls, as a processor would that counts rounds."""
    HELD[0] += 1
    return jnp.int32(HELD[0])


def siblings(self, state, token):
    """Gets from the host the token of the call before, whichever path that was on."""

    def swap(token):
        before, HELD[0] = HELD[0], int(token)
        return np.int32(before)

    return jax.pure_callback(swap, jax.ShapeDtypeStruct((), jnp.int32), token)


def padding(self, prompt, length, *, vocab_size):
    """Sums the whole buffer, and so what is behind the prompt."""
    return jnp.sum(prompt, dtype=jnp.int32)


BROKEN = {
    "pure functions": {"step": calls},
    "no host": {"step": siblings},
    "own prefix": {"init": padding},
    "static shapes": {"step": lambda self, state, token: jnp.append(state, token)},
    "numbers": {"apply": lambda self, state, logits: jnp.full_like(logits, -jnp.inf)},
    "allows": {"allows": lambda self, state, token: jnp.bool_(False)},
}
"""By clause, a method that breaks it."""


@pytest.mark.parametrize("clause", BROKEN)
def test_the_kit_catches_a_processor_that_breaks_a_clause(clause):
    broken = type("Broken", (_Counts,), BROKEN[clause])
    with pytest.raises(AssertionError, match=f"^{clause}: "):
        testing.check_processor(broken())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "counts"])
def test_the_kit_passes_ours(name):
    bench = decoding.quickest_bench(processor_kit.GAMMA)
    made = _Counts() if name == "counts" else make(name)
    clauses = testing.check_processor(made, bench, seed=1)
    assert clauses == ("static", "pure", "prefix", "allows", "lossless")
