"""Processors compared with definitions and Hugging Face's, and refused values."""

import math

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import processor_cases as cases
import pytest

from spec_jax import testing
from spec_jax.engine import processing
from spec_jax.processors import built_in, processor as processor_lib
from spec_jax.testing import processor_kit


LONGEST = 8  # tokens of an answer
PROMPTS = ([5], [7, 3, 90, 41, 5, 66], [66, 3, 90], [2, 0, 2, 9])


def walked(processor, prompt, answer, logits) -> np.ndarray:
    """Returns the logits after an answer, processed as in rounds and in decoding."""
    text = np.zeros((64,), np.int32)
    text[: len(prompt)] = prompt
    begun = processing.begin(
        processor, text, np.int32(len(prompt)), vocab_size=cases.VOCAB_SIZE
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


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", cases.NAMES)
def test_a_processor_is_its_definition(name, rng):
    """Fails if a count, a window of the text or the order of parts is wrong."""
    made = cases.make(name)
    answers = rng.choice([3, 5, 7, 41, 66, 90, 2, 30], (8, 8))
    for prompt in PROMPTS:
        for answer in (*answers.tolist(), [66] * 8, [3, 90, 41, 7, 3, 90, 5, 5]):
            count = int(rng.choice([0, 1, 3, 8]))
            logits = (rng.normal(size=cases.VOCAB_SIZE) * 4).astype(np.float32)
            found = walked(made, prompt, answer[:count], logits)
            right = cases.expected(name, prompt, answer[:count], logits)
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_penalties_of_nothing_change_no_bit(rng):
    logits = np.append(rng.normal(size=95), -0.0).astype(np.float32)
    found = walked(built_in.penalties(), [3, 4], [5, 5], logits)
    testing.assert_same_bits(found, logits)


@pytest.mark.parametrize("name", ["penalties", "words", "least"])
def test_a_processor_is_hugging_faces(name, rng):
    """Fails if logits differ from those of the library that defined the processor."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers").generation.logits_process
    prompt, answer = [7, 3, 90, 5, 66], [3, 90, 66]
    theirs = {
        "penalties": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
        "words": lambda: hf.NoBadWordsLogitsProcessor(cases.WORDS, eos_token_id=95),
        "least": lambda: hf.MinNewTokensLengthLogitsProcessor(
            len(prompt), 6, list(cases.STOPS)
        ),
    }
    ours = built_in.penalties(repetition=1.7) if name == "penalties" else None
    ours = ours or cases.make(name)
    for count in range(len(answer) + 1):
        logits = rng.normal(size=(1, cases.VOCAB_SIZE)).astype(np.float32)
        ids = torch.tensor([[*prompt, *answer[:count]]])
        right = theirs[name]()(ids, torch.tensor(logits))[0].numpy()
        found = walked(ours, prompt, answer[:count], logits[0])
        np.testing.assert_allclose(found, right, rtol=1e-6)


REFUSED = {
    "a bias of nothing": (lambda: built_in.logit_bias({}), "give a value for each tok"),
    "a bias of NaN": (lambda: built_in.logit_bias({3: math.nan}),
        r"bias\[3\]=nan: give a number below infinity"),
    "an infinite bias": (lambda: built_in.logit_bias({3: math.inf}), r"bias\[3\]=inf"),
    "a bias of a word": (lambda: built_in.logit_bias({"a": 1}), "at least one token"),
    "a negative token": (lambda: built_in.logit_bias({-1: 1}), "that is no token"),
    "no bad word": (lambda: built_in.bad_words([]), "give rows of token ids"),
    "an empty word": (lambda: built_in.bad_words([[]]), "give at least one token id"),
    "words as text": (lambda: built_in.bad_words(["no"]), "give at least one token id"),
    "one row of words": (lambda: built_in.bad_words([3]), "give at least one token id"),
    "no least": (lambda: built_in.min_tokens(0, [1]), "count=0 must be a whole number"),
    "half a least": (lambda: built_in.min_tokens(1.5, [1]), "count=1.5 must be a w"),
    "nothing stops": (lambda: built_in.min_tokens(3, []), "give at least one token id"),
    "a penalty of 0": (lambda: built_in.penalties(repetition=0.0),
        "repetition=0.0 must be above 0: 1 is no penalty"),
    "a penalty of NaN": (lambda: built_in.penalties(presence=math.nan),
        "presence=nan is not a finite number"),
    "a penalty in words": (lambda: built_in.penalties(frequency="1"),
        "frequency='1' is not a finite number"),
    "a chain of nothing": (lambda: processor_lib.chain(), "a chain of no processors"),
    "a chain of words": (lambda: processor_lib.chain(built_in.penalties(), "no"),
        "part 1 of the chain is of type str: give a Processor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_in_one_line(case):
    make, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@SLOW
@pytest.mark.parametrize("name", cases.NAMES)
def test_the_kit_passes_ours(name):
    bench = decoding.quickest_bench(processor_kit.GAMMA)
    clauses = testing.check_processor(cases.make(name), bench, seed=1)
    assert clauses == ("static", "pure", "prefix", "allows", "lossless")


class _Broken(processor_lib.Processor):
    """Counts tokens, and adds the count to the logit of token 3."""

    def init(self, prompt, length, *, vocab_size):
        return jnp.int32(0)

    def step(self, state, token):
        return state + 1

    def apply(self, state, logits):
        return logits.at[3].add(state.astype(jnp.float32))


CALLS = [0]


class _Rounds(_Broken):
    """Counts calls, as a processor would that counts rounds."""

    def step(self, state, token):
        CALLS[0] += 1
        return jnp.int32(CALLS[0])


SEEN = [0]


class _Siblings(_Broken):
    """Gets from the host the token of the call before, whichever path that was on."""

    def step(self, state, token):
        last = jax.ShapeDtypeStruct((), jnp.int32)

        def swap(token):
            before, SEEN[0] = SEEN[0], int(token)
            return np.int32(before)

        return jax.pure_callback(swap, last, token)


class _Padding(_Broken):
    """Sums the whole buffer, and so what is behind the prompt."""

    def init(self, prompt, length, *, vocab_size):
        return jnp.sum(prompt, dtype=jnp.int32)


class _Grows(_Broken):
    """Returns a state of another shape after each token."""

    def step(self, state, token):
        return jnp.append(state, token)


class _Silent(_Broken):
    """Forbids every token."""

    def apply(self, state, logits):
        return jnp.full_like(logits, -jnp.inf)


class _Denies(_Broken):
    """Denies by `allows` the tokens that `apply` leaves."""

    def allows(self, state, token):
        return jnp.bool_(False)


@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (_Rounds, "pure functions"), (_Siblings, "no host"), (_Padding, "own prefix"),
        (_Grows, "static shapes"), (_Silent, "numbers"), (_Denies, "allows"),
    ],
)  # fmt: skip
def test_the_kit_catches_a_processor_that_breaks_a_clause(broken, clause):
    """Negative control: each of these processors breaks one clause."""
    with pytest.raises(AssertionError, match=f"^{clause}: "):
        testing.check_processor(broken())


@SLOW
def test_the_kit_passes_what_counts_tokens():
    """Checks that the base class of the broken ones breaks no clause itself."""
    assert testing.check_processor(_Broken())
