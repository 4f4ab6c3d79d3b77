"""Processors in rounds, compared with decoding under the same one, bit for bit."""

import dataclasses
import functools
import re

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import planting
import pytest
import tiny_pair
from slow_cases import slow

import spec_jax as sj
from spec_jax import inputs, lossless, run as run_lib, testing
from spec_jax.engine import processing, round as round_lib
from spec_jax.processors import grammar, processor as processor_lib


PROMPTS = ["def f(x):", "import os", "x = [1, 2]", "a" * 30]
SHORT = {"max_tokens": 14, "ignore_eos": True}
LETTERS = {token: token % 2 for token in range(40, 90)}
"""Transitions from state 0 of a grammar: an odd byte token leads to state 1."""


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """Loads a tiny pair of random weights, whose tokens are bytes."""
    target, draft = tiny_pair.write(tmp_path_factory.mktemp("random"))
    return sj.load(target, draft=draft, gamma_max=4)


def make(name: str) -> processor_lib.Processor:
    """Makes a processor that changes many tokens of the random pair."""
    if name == "grammar":
        transitions = {0: LETTERS, 1: {token: 0 for token in range(20, 200)}}
        return grammar.of_transitions(
            transitions, first=0, final={0}, stop_ids=[0], vocab_size=264
        )
    made = {
        "bias": lambda: sj.processors.logit_bias(
            {token: -np.inf if token % 3 else 2.0 for token in range(264)}
        ),
        "bad words": lambda: sj.processors.bad_words([[n] for n in range(0, 200, 2)]),
        "min tokens": lambda: sj.processors.min_tokens(9, list(range(0, 264, 2))),
        "penalties": lambda: sj.processors.penalties(
            repetition=1.9, presence=0.7, frequency=0.6
        ),
    }
    if name == "all":
        kinds = ("penalties", "min tokens", "grammar")
        return sj.processors.chain(*map(make, kinds))
    return made[name]()


SHAPES = {
    "chain": {"gamma": 4},
    "tree": {"gamma": sj.Tree.parse("2x2:5")},
    "batch 4": {"gamma": 3, "num_slots": 4},
}
DRAWS = {"greedy": None, "0.7": 0.7, "1": 1.0}


def settings_of(shape: str, draw: str, **more) -> dict:
    temperature = DRAWS[draw]
    sampling = temperature and sj.Sampling(temperature=temperature, seed=5)
    return SHORT | SHAPES[shape] | {"sampling": sampling or None} | more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "draw"),
    [("all", "tree", "0.7"), ("all", "batch 4", "1"), ("bad words", "chain", "greedy")],
)
def test_rounds_are_decoding(lm, name, shape, draw):
    """Compares tokens, log-probabilities, logits and K/V with decoding, as integers."""
    settings = settings_of(shape, draw, processors=make(name))
    prompts = PROMPTS if shape == "batch 4" else PROMPTS[:1]
    report = sj.check_lossless(lm, prompts, **settings)
    assert report, str(report)
    # Negative control: without the processor another text is written.
    plain = {key: settings[key] for key in (*SHORT, "sampling")}
    first = sj.decode(lm, prompts[0], processors=settings["processors"], **plain)
    assert first.tokens != sj.decode(lm, prompts[0], **plain).tokens


@pytest.mark.parametrize("shape", ["batch 4", slow("tree")])
def test_log_probs_are_those_of_decoding_and_of_scoring(lm, shape):
    """Compares raw and processed log-probabilities of rounds, decoding and scoring."""
    made, prompts = make("all"), PROMPTS[:1]
    settings = settings_of(shape, "0.7", processors=made, log_probs=True)
    if shape == "batch 4":  # Slots are refilled, and begin anew.
        prompts = [*PROMPTS, *PROMPTS[::-1]]
    found = sj.generate(lm, prompts, **settings)
    settings.pop("gamma"), settings.pop("num_slots", None)
    plain = sj.decode(lm, prompts, **settings)
    how = {"sampling": settings["sampling"], "processors": made}
    scored = sj.score(lm, prompts, [one.tokens for one in plain], **how)
    for one, other, third in zip(found, plain, scored, strict=True):
        assert one.tokens == other.tokens
        for name in ("log_probs", "drawn_log_probs"):
            right = getattr(other, name)
            testing.assert_same_bits(getattr(one, name), right)
            testing.assert_same_bits(getattr(third, name), right)
        assert np.isfinite(other.drawn_log_probs).all()
        raw = sj.score(lm, one.prompt_tokens, one.tokens, sampling=settings["sampling"])
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
    settings = settings_of("batch 4", "0.7", log_probs=True)
    found = sj.generate(lm, PROMPTS, processors=each, **settings)
    settings.pop("gamma"), settings.pop("num_slots")
    plain, others = (
        sj.decode(lm, PROMPTS, processors=own, **settings) for own in (each, each[::-1])
    )
    found, plain, others = ([one.tokens for one in of] for of in (found, plain, others))
    assert found == plain != others


DRAFTERS = {
    **dict.fromkeys(("ngram", "hybrid", "draft-model"), None),
    "eagle3": tiny_pair.write_head,
    "dspark": tiny_pair.WRITE_HEAD["dspark"],
}


def drafting(tmp_path, name: str) -> sj.LanguageModel:
    """Loads the tiny target with a drafter."""
    target, draft = tiny_pair.write(tmp_path)
    if DRAFTERS[name] is not None:
        draft = DRAFTERS[name](tmp_path / "head", target)
    return sj.load(target, draft=draft, drafter=name, gamma_max=3)


UNCUT = [(processing, "cut", lambda real: lambda processing, proposal: proposal)]


@jax.jit
def _step(speculator, state, fault):
    with planting.planted(UNCUT, fault):
        return round_lib.run_round(speculator, state)


def in_vain(lm, settings, *, fault=0, rounds=4):
    """Counts the drafts that the processor forbids in some rounds, and all drafts."""
    run = run_lib.Run.make(lm, inputs.encode(lm, PROMPTS)[0], **settings)
    state, counts = run.scheduler.begin(*run.requests), []
    for _ in range(rounds):
        before = state.processing
        state, info = _step(run.scheduler.speculator, state, jnp.int32(fault))
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
    ("name", "draw", "tree"),
    [
        ("ngram", "greedy", None),
        slow("draft-model", "1", "2x2:3"),
        slow("dspark", "1", None),
        slow("hybrid", "1", None),
        slow("eagle3", "greedy", "2x2:3"),
    ],
)
def test_no_draft_is_proposed_in_vain(tmp_path, name, draw, tree):
    """Fails if a forbidden draft is proposed: drafters avoid it, or it is cut off."""
    lm, gamma = drafting(tmp_path, name), 3
    lm = lm.with_tree(tree) if tree else lm
    made = make("grammar")
    settings = settings_of("batch 4", draw) | {"gamma": gamma, "processors": made}
    forbidden, number = in_vain(lm, settings)
    assert number > 0 and forbidden == 0
    if name == "ngram":  # Negative control: lookups that are not cut.
        assert in_vain(lm, settings, fault=1)[0] > 0


@pytest.mark.slow
def test_a_head_whose_tokens_are_all_forbidden_drafts_nothing(tmp_path):
    """Fails if a head drafts although its tokens, every fourth one, are forbidden."""
    lm = drafting(tmp_path, "eagle3")
    made = sj.processors.logit_bias(dict.fromkeys(range(0, 264, 4), -np.inf))
    settings = settings_of("batch 4", "greedy", processors=made)
    assert in_vain(lm, settings) == [0, 0]


def test_a_tree_is_cut_with_what_is_below(lm):
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


def _of_parent(real):
    """Plants a fault: a row has the state of its parent."""

    def after(processor, state, tokens, parents, column):
        return real(processor, state, tokens, parents, parents[column])

    return after


def _by_rounds(real):
    """Plants a fault: a round is a step, however many tokens it commits."""

    def commit(processing, before, slots):
        return real(processing, jnp.maximum(before, slots.length - 1), slots)

    return commit


FAULTS = {
    "a mask of the parent's": ("grammar", "after", _of_parent, 5),
    "penalties by round": ("penalties", "commit", _by_rounds, 7),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "shape"), [*zip(FAULTS, ("tree", "chain"), strict=True)]
)
def test_planted_faults_are_caught(tmp_path, monkeypatch, fault, shape):
    """Negative control, with right drafts, so that rounds commit several tokens."""
    processor, name, plant, page_size = FAULTS[fault]
    monkeypatch.setattr(processing, name, plant(getattr(processing, name)))
    target, _ = tiny_pair.write(tmp_path)
    lm = sj.load(target, draft=target, gamma_max=4)
    # Another page size makes new programs, which are traced with the fault.
    settings = settings_of(shape, "1", processors=make(processor))
    report = lossless.check_lossless(
        lm, PROMPTS[:2], **settings | {"page_size": page_size, "max_tokens": 30}
    )
    assert "tokens" in {d.what for one in report.comparisons for d in one.differences}


def test_without_a_processor_no_program_changes():
    """Fails if rounds without a processor trace functions that processors need."""
    scheduler = decoding.SMALL.scheduler()
    state = scheduler.empty(draws=True)
    assert state.processing is None

    def trace():
        # A new function each time: jax would reuse the trace of the same one.
        traced = jax.make_jaxpr(functools.partial(round_lib.run_round))
        found = traced(scheduler.speculator, state)
        return re.sub("0x[0-9a-f]+", "", str(found))

    expected = trace()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("process_rows", "commit", "cut", "process", "after"):
            patch.setattr(processing, name, None)
        assert trace() == expected


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


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("repetition_penalty", r"processors=sj.processors.penalties\(...\)"),
        ("logit_bias", r"processors=sj.processors.logit_bias\(...\)"),
        ("json_schema", r"processors=sj.processors.json_schema\(..., lm\)"),
    ],
)
def test_other_names_point_to_the_right_one(lm, name, remedy):
    with pytest.raises(TypeError, match=f"has no argument '{name}': write {remedy}"):
        sj.generate(lm, "a", **{name: 1})
