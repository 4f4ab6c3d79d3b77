"""No proposal can make the output wrong: drafters that break each of their promises.

What a drafter returns is data here, so that all of its lies share an executable.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import GAMMA_MAX, PROMPT
from spec_jax.batch import lookups, queue, rows

from experiments.ablations import decode_rounds
from spec_jax import pytree, rounds, rules, session
from spec_jax.engine import protocols
from spec_jax.model import row_model
from spec_jax.ops import dispatch
from spec_jax.rules import sampling


CAPACITY, PAGE_SIZE = 24, 8
SIZES = {"capacity": CAPACITY, "page_size": PAGE_SIZE}
CONFIG, PARAMS = decoding.DRAFT_CONFIG, decoding.DRAFT_PARAMS
VOCAB_SIZE = CONFIG.vocab_size
ENDS = {"the limit": 6, "the cache": 60}


class Lie(pytree.Node):
    """What is wrong with a proposal: the parameters of `Liar`."""

    text: jax.Array  # [max_len] int32, what plain decoding writes
    more: jax.Array  # [] int32, drafts more than it was asked for
    start: jax.Array  # [] int32, the first draft that is wrong
    moved: jax.Array  # [] int32, added to the drafts from there on
    prob: jax.Array  # [] float32, in place of the probabilities from there on


def lie(text, *, more=0, start=0, moved=0, prob=1.0) -> Lie:
    return Lie(
        text=jnp.array(text),
        more=jnp.int32(more),
        start=jnp.int32(start),
        moved=jnp.int32(moved),
        prob=jnp.float32(prob),
    )


LIES = {
    "none": {},
    "too many": {"more": 3},
    "far too many": {"more": 2**30},
    "negative": {"more": -100},
    "past the vocabulary": {"moved": VOCAB_SIZE},
    "past it, late": {"moved": VOCAB_SIZE, "start": 2},
    "negative tokens": {"moved": -VOCAB_SIZE},
    "negative tokens, late": {"moved": -VOCAB_SIZE, "start": 1, "more": 2},
    "far outside": {"moved": 2**30, "start": 1},
    "NaN probabilities": {"prob": np.nan},
    "NaN probabilities of wrong drafts": {"prob": np.nan, "moved": 1, "start": 1},
    "probabilities of 0": {"prob": 0.0, "start": 1},
    "negative probabilities": {"prob": -1.0, "moved": 1},
    "infinite probabilities": {"prob": np.inf},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Liar:
    """Drafts the text that it is given, but for what its parameters make wrong."""

    has_probs: bool = False
    gamma_max: int = GAMMA_MAX

    def init(self, **_):
        return ()

    def prefill(self, params, memory, prompt):
        return memory

    def propose(self, params, memory, *, tokens, length, gamma):
        offsets = jnp.arange(self.gamma_max, dtype=jnp.int32)
        right = params.text.at[length + offsets].get(mode="fill", fill_value=0)
        is_wrong = offsets >= params.start
        drafts = right + jnp.where(is_wrong, params.moved, 0)
        probs = None
        if self.has_probs:
            probs = jax.nn.one_hot(drafts, VOCAB_SIZE, dtype=jnp.float32)
            probs = probs * jnp.where(is_wrong, params.prob, 1.0)[:, None]
        return memory, protocols.Proposal(
            tokens=drafts, num_drafted=gamma + params.more, probs=probs
        )

    def commit(self, params, memory, length, **_):
        return memory


def make_target(impl: str) -> row_model.RowModel:
    try:
        dispatch.resolve(impl)
    except NotImplementedError as error:
        pytest.skip(str(error))
    return row_model.RowModel(config=CONFIG, impl=impl, slab=GAMMA_MAX + 1)


def plain(target, max_tokens):
    return decoding.plain(
        capacity=CAPACITY, max_tokens=max_tokens, target=target, params=PARAMS
    )


def begin(target, drafter, params, *, max_tokens, settings=None):
    return session.begin(
        target,
        drafter,
        params,
        target.new_cache(**SIZES),
        drafter.init(**SIZES),
        PROMPT,
        max_tokens=max_tokens,
        settings=settings,
    )


LOOP = {
    "gamma": jnp.int32(GAMMA_MAX),
    "stop_ids": decoding.NO_STOP,
    "max_rounds": decoding.FOREVER,
}


@pytest.mark.parametrize(
    ("impl", "rule", "has_probs"),
    [
        ("xla", "sample-path", False),
        ("native", "sample-path", False),
        ("native", "rejection", False),
        ("native", "rejection", True),
        ("native", "block", False),
        ("xla", "block", True),
    ],
)
def test_no_proposal_makes_the_output_wrong(impl, rule, has_probs):
    """Fails if a number of drafts, or a token, is taken on trust by any rule.

    At temperature 0 every rule writes the text of plain decoding; above, no text is
    known, but its length is, and that its tokens are some.
    """
    target, drafter = make_target(impl), Liar(has_probs=has_probs)
    for end, max_tokens in ENDS.items():
        expected = plain(target, max_tokens)
        for name, what in LIES.items():
            for temperature in (0.0, 1.0):
                params = PARAMS, lie(expected.tokens, **what)
                state = begin(
                    target,
                    drafter,
                    params,
                    max_tokens=max_tokens,
                    settings=sampling.make_settings(temperature=temperature),
                )
                state = rounds.generate(
                    target, drafter, params, state, **LOOP, rule=rule
                )
                text = session.committed(state)
                case = f"{name}, up to {end}, {temperature=}"
                assert len(text) == int(expected.length), case
                assert 0 <= min(text) and max(text) < VOCAB_SIZE, case
                if temperature == 0:
                    assert text == session.committed(expected), case
                    if name == "none":
                        assert int(state.num_accepted) == int(state.num_proposed) > 0


def test_no_proposal_makes_the_output_of_a_slot_wrong():
    """As above, in a batch: slots of other gammas and limits, by one executable."""
    target, drafter = make_target("native"), Liar()
    texts = {n: session.committed(plain(target, n)) for n in (3, 6, 60)}
    requests = [queue.Request(prompt=PROMPT, max_tokens=n) for n in (60, 6, 3)]
    requests.append(queue.Request(prompt=PROMPT, max_tokens=6, gamma=1))
    for name, what in LIES.items():
        batch = queue.Batch(
            target=rows.RowBatch(model=target, num_slots=2),
            drafter=lookups.EachSlot(drafter=drafter, num_slots=2),
            params=(PARAMS, lie(plain(target, 60).tokens, **what)),
            **SIZES,
        )
        for one in batch.run(requests):
            expected = texts[requests[one.number].max_tokens][len(PROMPT) :]
            assert one.tokens == expected, (name, one.number)


def test_no_proposal_makes_decoding_wrong():
    """As above, where decoding decides and the verify path is thrown away."""
    target, drafter = make_target("native"), Liar()
    expected = plain(target, 6)
    for name, what in LIES.items():
        params = PARAMS, lie(expected.tokens, **what)
        inner = begin(target, drafter, params, max_tokens=6)
        kv = session.prefill(target, PARAMS, target.new_cache(**SIZES), PROMPT)
        state = decode_rounds.generate(
            target,
            target,
            drafter,
            params,
            decode_rounds.init_state(inner, commit_cache=kv),
            **LOOP,
        )
        assert session.committed(state.inner) == session.committed(expected), name


@pytest.mark.parametrize(
    ("fault", "what", "message"),
    [
        ("limit_proposal", LIES["too many"], "past the limit of 17"),
        ("_of_drafts", LIES["past the vocabulary"], r"outside \[0, 96\)"),
        ("_of_drafts", LIES["negative tokens"], r"outside \[0, 96\)"),
    ],
)
def test_trust_in_a_drafter_is_caught(fault, what, message, monkeypatch):
    """Negative control: without either bound `check_state` tells what was committed."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OfThisTest(Liar):
        """Nothing is compiled for it yet."""

    target, drafter = make_target("native"), OfThisTest()
    params = PARAMS, lie(plain(target, 6).tokens, **what)
    state = begin(target, drafter, params, max_tokens=6)
    if fault == "limit_proposal":
        monkeypatch.setattr(rounds, fault, lambda proposal, gamma: proposal)
    else:
        certain = lambda probs, tokens: jnp.ones(tokens.shape, jnp.float32)
        monkeypatch.setattr(rules.acceptance, fault, certain)
    rule = "sample-path" if fault == "limit_proposal" else "rejection"
    state = rounds.generate(target, drafter, params, state, **LOOP, rule=rule)
    with pytest.raises(RuntimeError, match=message):
        session.check_state(state)
