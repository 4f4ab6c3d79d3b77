"""Processors in rounds, compared with decoding under the same one, bit for bit."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from slow_cases import slow

import spec_jax as sj
from spec_jax import run as run_lib, testing
from spec_jax.engine import processing, round as round_lib
from spec_jax.processors import grammar, processor as processor_lib


PROMPTS = ["def f(x):", "import os", "x = [1, 2]", "a" * 30]
SHORT = {"max_tokens": 14, "ignore_eos": True}
LETTERS = {token: token % 2 for token in range(40, 90)}
"""Transitions from state 0 of a grammar: an odd byte token leads to state 1."""


def make(name: str) -> processor_lib.Processor:
    """Makes a processor that changes many tokens of the random pair."""
    if name == "grammar":
        transitions = {0: LETTERS, 1: {token: 0 for token in range(20, 200)}}
        return grammar.of_transitions(
            transitions, first=0, final={0}, stop_ids=[0], vocab_size=264
        )
    if name == "min tokens":
        return sj.processors.min_tokens(9, list(range(0, 264, 2)))
    if name == "every fourth":
        return sj.processors.logit_bias(dict.fromkeys(range(0, 264, 4), -np.inf))
    return sj.processors.penalties(repetition=1.9, presence=0.7, frequency=0.6)


SHAPES = {
    "tree": {"gamma": sj.Tree.parse("2x2:5")},
    "batch 4": {"gamma": 3, "num_slots": 4},
}
WARM = sj.Sampling(temperature=0.7, seed=5)


@pytest.mark.parametrize("shape", ["batch 4", slow("tree")])
def test_log_probs_are_those_of_decoding_and_of_scoring(lm, shape):
    """Compares raw and processed log-probabilities of rounds, decoding and scoring."""
    kinds = ("penalties", "min tokens", "grammar")
    made, prompts = sj.processors.chain(*map(make, kinds)), PROMPTS[:1]
    if shape == "batch 4":  # Slots are refilled, and begin anew.
        prompts = [*PROMPTS, *PROMPTS[::-1]]
    how = {"sampling": WARM, "processors": made}
    settings = SHORT | how | {"log_probs": True}
    found = sj.generate(lm, prompts, **settings, **SHAPES[shape])
    plain = sj.decode(lm, prompts, **settings)
    scored = sj.score(lm, prompts, [one.tokens for one in plain], **how)
    for one, other, third in zip(found, plain, scored, strict=True):
        assert one.tokens == other.tokens
        for name in ("log_probs", "drawn_log_probs"):
            right = getattr(other, name)
            testing.assert_same_bits(getattr(one, name), right)
            testing.assert_same_bits(getattr(third, name), right)
        assert np.isfinite(other.drawn_log_probs).all()
        raw = sj.score(lm, one.prompt_tokens, one.tokens, sampling=WARM)
        testing.assert_same_bits(raw.log_probs, one.log_probs)
        assert not np.array_equal(raw.drawn_log_probs, one.drawn_log_probs)


def test_requests_have_parameters_of_their_own(lm):
    """Fails if a slot has the state or the parameters of another."""
    # Kinds and shapes are those of the test above, so that its programs are used.
    rest = make("min tokens"), make("grammar")
    each = [
        sj.processors.chain(
            sj.processors.penalties(repetition=1.0 + n / 2, frequency=n / 4), *rest
        )
        for n in range(4)
    ]
    settings = SHORT | {"sampling": WARM, "log_probs": True}
    found = sj.generate(lm, PROMPTS, processors=each, **settings, **SHAPES["batch 4"])
    plain, others = (
        sj.decode(lm, PROMPTS, processors=own, **settings) for own in (each, each[::-1])
    )
    found, plain, others = ([one.tokens for one in of] for of in (found, plain, others))
    assert found == plain != others


def drafting(tmp_path, name: str) -> sj.LanguageModel:
    """Loads the tiny target with a drafter."""
    target, draft = tiny_pair.write(tmp_path, name)
    return sj.load(target, draft=draft, drafter=name, gamma_max=3)


_step = jax.jit(round_lib.run_round)


def in_vain(lm, settings, *, rounds=4):
    """Counts the drafts that the processor forbids in some rounds, and all drafts."""
    run = run_lib.Run.make(lm, PROMPTS, **settings)
    state, counts = run.scheduler.begin(*run.requests), []
    for _ in range(rounds):
        before = state.processing
        state, info = _step(run.scheduler.speculator, state)
        proposal = jax.device_get(info.proposal)
        counts.append((is_in_vain(before, proposal), int(proposal.num_drafted.sum())))
    return np.sum(counts, axis=0).tolist()


def is_in_vain(before, proposal) -> int:
    """Counts the drafts that the processor forbids after their parents."""
    count = 0
    for slot, number in enumerate(proposal.num_drafted):
        one = jax.tree.map(lambda leaf, at=slot: leaf[at], before.states)
        states = [one]
        for at in range(number):
            parent = at if proposal.parents is None else proposal.parents[slot, at]
            token = jnp.int32(proposal.tokens[slot, at])
            count += not before.processor.allows(states[parent], token)
            states.append(before.processor.step(states[parent], token))
    return count


@pytest.mark.parametrize(
    ("name", "made", "temperature", "tree"),
    [
        ("ngram", "grammar", 0.0, None),
        slow("draft-model", "grammar", 1.0, "2x2:3"),
        slow("dspark", "grammar", 1.0, None),
        slow("hybrid", "grammar", 1.0, None),
        slow("eagle3", "grammar", 0.0, "2x2:3"),
        slow("eagle3", "every fourth", 0.0, None),
    ],
)
def test_no_draft_is_proposed_in_vain(tmp_path, name, made, temperature, tree):
    """Fails if a forbidden draft is proposed: drafters avoid it, or it is cut off; or
    if a head drafts although all its tokens, every fourth one, are forbidden."""
    lm = drafting(tmp_path, name)
    lm = lm.with_tree(tree) if tree else lm
    sampling = sj.Sampling(temperature=temperature, seed=5) if temperature else None
    settings = SHORT | SHAPES["batch 4"] | {"sampling": sampling}
    settings |= {"processors": make(made)}
    forbidden, number = in_vain(lm, settings)
    assert forbidden == 0 and (number > 0) == (made == "grammar")


def test_a_tree_is_cut_with_what_is_below():
    """Fails if a child stays although its parent is cut, or gets another parent."""
    proposal = sj.Proposal(
        tokens=jnp.array([[40, 41, 7, 8, 41, 50, 61]], jnp.int32),
        num_drafted=jnp.array([6], jnp.int32),
        parents=jnp.array([[0, 0, 1, 3, 1, 2, 0]], jnp.int32),
        survival=jnp.arange(7, dtype=jnp.float32)[None] / 8,
    )
    text = np.zeros((9,), np.int32)
    one = processing.begin(make("grammar"), text, np.int32(1), vocab_size=264)
    found = jax.jit(processing.cut)(processing.of_slots(one, 1), proposal)
    # Token 7 may not follow 40, and 8 is its child; 41 leads to state 1.
    count = int(found.num_drafted[0])
    assert count == 4
    assert found.tokens[0, :count].tolist() == [40, 41, 41, 50]
    assert found.parents[0, :count].tolist() == [0, 0, 1, 2]
    assert found.survival[0, :count].tolist() == [0, 1 / 8, 4 / 8, 5 / 8]
    # Drafts with probabilities were drawn: to cut them would bias what is verified.
    drawn = proposal.replace(probs=jnp.zeros((1, 7, 264)))
    assert processing.cut(processing.of_slots(one, 1), drawn) is drawn


def test_without_a_processor_no_program_changes(monkeypatch):
    """Fails if rounds without a processor trace functions that processors need."""
    scheduler = decoding.SMALL.scheduler()
    state = scheduler.empty(draws=True)
    assert state.processing is None
    for name in ("process_rows", "commit", "cut", "process", "after"):
        monkeypatch.setattr(processing, name, None)
    # A new function: jax would reuse the trace of the same one.
    jax.eval_shape(functools.partial(round_lib.run_round), scheduler.speculator, state)


@pytest.mark.slow
def test_the_default_gamma_has_costs_of_its_own(lm):
    """Fails if the default gamma, timed with a processor, raises or changes a token."""
    made = make("penalties")
    found = sj.generate(lm, PROMPTS[0], processors=made, **SHORT)
    assert found.tokens == sj.decode(lm, PROMPTS[0], processors=made, **SHORT).tokens


PENALTY = sj.processors.penalties(repetition=1.2)
REFUSED = {
    "a word": ({"processors": "no"}, "processors is of type str: give a Processor"),
    "a function": ({"processors": len}, "processors is of type builtin_function_or_m"),
    "one of two": ({"prompt": ["a", "b"], "processors": [PENALTY, None]},
        r"processors\[1\] is of type NoneType: give a Processor of sj.processors"),
    "too few": ({"prompt": ["a", "b"], "processors": [PENALTY]},
        r"1 processors for 2 prompts: give one for each, .*chain\(a, b\) applies"),
    "two kinds": (
        {
            "prompt": ["a", "b"],
            "processors": [PENALTY, sj.processors.logit_bias({1: 1.0})],
        },
        "the processors of two requests differ in kind or in shapes",
    ),
    "a token of another model": ({"processors": sj.processors.logit_bias({300: 1.0})},
        r"logit_bias has token 300, outside \[0, 264\)"),
    "a stop of another model": ({"processors": sj.processors.min_tokens(3, [264])},
        r"min_tokens has token 264, outside \[0, 264\)"),
    "a word of another model": (
        {"processors": sj.processors.bad_words([[3], [4, 900]])},
        r"bad_words has token 900, outside \[0, 264\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(lm, case):
    arguments, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as caught:
        sj.generate(lm, **{"prompt": "a"} | arguments)
    assert "\n" not in str(caught.value)


def test_requests_with_and_without_one_are_refused(lm):
    run = run_lib.Run.make(lm, [[1], [2]], processors=PENALTY)
    first, second = run.requests
    second = dataclasses.replace(second, processor=None)
    with pytest.raises(ValueError, match="some requests have a processor and some"):
        list(run.scheduler.run([first, second]))
    state = run.scheduler.empty(draws=False)
    with pytest.raises(ValueError, match="a request that has a processor, and a st"):
        run.scheduler.admit(state, 0, first)
