"""The contract kit: it passes right drafters, and names the fault of each wrong one."""

import dataclasses
from typing import Any

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from spec_jax import pytree, testing
from spec_jax.engine import protocols
from spec_jax.model import row_model
from spec_jax.rules import acceptance
from spec_jax.testing import bench, drafter_kit


GAMMA_MAX = 2
BENCH = decoding.quickest_bench(4)  # as in other tests, so that one target is compiled


class Memory(pytree.Node):
    """A memory with a spare field, which some of the faults below use."""

    length: jax.Array  # [] int32
    spare: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo:
    """Drafts the last token again; the faults below are made of this drafter."""

    gamma_max: int = GAMMA_MAX

    def init(self, *, capacity, page_size):
        del page_size
        return Memory(length=jnp.zeros((), jnp.int32), spare=jnp.zeros(capacity))

    def prefill(self, params, memory, prompt):
        del params
        return memory.replace(length=jnp.array(len(prompt), jnp.int32))

    def drafts(self, memory, tokens, length, gamma):
        del memory
        return jnp.full((self.gamma_max,), tokens[length - 1]), gamma

    def propose(self, params, memory, *, tokens, length, gamma):
        del params
        drafts, num_drafted = self.drafts(memory, tokens, length, gamma)
        return memory, protocols.Proposal(tokens=drafts, num_drafted=num_drafted)

    def commit(self, params, memory, length):
        del params
        return memory.replace(length=length)


LOOPS = ("lossless", "slots")
"""The clauses that compile loops."""


@pytest.mark.parametrize("without", [LOOPS, slow(())])
def test_a_drafter_that_keeps_the_contract(without, monkeypatch, capsys):
    """Checks that it passes every clause, and that the kit reports its progress."""
    monkeypatch.setattr(drafter_kit, "INTERVAL_S", 0.0)
    for name in without:
        monkeypatch.delitem(testing.CLAUSES, name)
    checked = testing.check_drafter(Echo(), None, BENCH)
    assert checked == tuple(testing.CLAUSES)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(checked)
    assert said[0] == f"check_drafter: 1 of {len(checked)} clauses"


class GrowsWithThePrompt(Echo):
    def prefill(self, params, memory, prompt):
        return memory.replace(spare=jnp.zeros(len(prompt)))


class ChangesItsDtype(Echo):
    def commit(self, params, memory, length):
        return memory.replace(length=length.astype(jnp.float32))


class OneTooWide(Echo):
    def drafts(self, memory, tokens, length, gamma):
        return jnp.full((self.gamma_max + 1,), tokens[length - 1]), gamma


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawsOnTheHost(Echo):
    draws: Any = dataclasses.field(
        default_factory=lambda: np.random.default_rng(0), compare=False
    )

    def drafts(self, memory, tokens, length, gamma):
        drawn = self.draws.integers(0, 96, self.gamma_max).astype(np.int32)
        return jnp.where(tokens[length - 1] >= 0, jnp.asarray(drawn), 0), gamma


class AsksTheHost(Echo):
    def drafts(self, memory, tokens, length, gamma):
        drafts, gamma = super().drafts(memory, tokens, length, gamma)
        shape = jax.ShapeDtypeStruct(drafts.shape, drafts.dtype)
        return jax.pure_callback(lambda x: x, shape, drafts), gamma


class OverlooksGamma(Echo):
    def drafts(self, memory, tokens, length, gamma):
        drafts, _ = super().drafts(memory, tokens, length, gamma)
        return drafts, jnp.array(self.gamma_max, jnp.int32)


class PastTheVocabulary(Echo):
    def drafts(self, memory, tokens, length, gamma):
        drafts, gamma = super().drafts(memory, tokens, length, gamma)
        return drafts + 96, gamma


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaysItsProbabilities(Echo):
    """Gives each draft a probability of 1, or probabilities that cannot be."""

    scale: float = 1.0
    moved: int = 0
    width: int = 96

    def propose(self, params, memory, *, tokens, length, gamma):
        memory, proposal = super().propose(
            params, memory, tokens=tokens, length=length, gamma=gamma
        )
        probs = jax.nn.one_hot(proposal.tokens + self.moved, self.width)
        return memory, proposal.replace(probs=probs * self.scale)


class LooksUpAhead(Echo):
    """Looks up the two tokens behind the text, and drafts the token after them."""

    def drafts(self, memory, tokens, length, gamma):
        after = jnp.roll(tokens, -1)
        places = jnp.arange(len(tokens))
        is_match = (tokens == tokens[length]) & (after == tokens[length + 1])
        at = jnp.argmax(is_match & (places < length - 1))
        return jnp.full((self.gamma_max,), tokens[at + 2]), jnp.where(
            jnp.any(is_match & (places < length - 1)), gamma, 0
        )


@jax.tree_util.register_pytree_node_class
class Forgetful:
    """A node that loses a field when it is put together from its leaves."""

    def __init__(self, leaf, lost=0):
        self.leaf, self.lost = leaf, lost

    def tree_flatten(self):
        return (self.leaf,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


class LosesAField(Echo):
    def prefill(self, params, memory, prompt):
        return memory.replace(spare=Forgetful(memory.spare.leaf, lost=len(prompt)))

    def init(self, *, capacity, page_size):
        memory = super().init(capacity=capacity, page_size=page_size)
        return memory.replace(spare=Forgetful(memory.spare))

    def drafts(self, memory, tokens, length, gamma):
        return jnp.full((self.gamma_max,), tokens[0] * 0 + memory.spare.lost), gamma


class CountsItsRounds(Echo):
    """Drafts the number of its commits, which no truncation takes back."""

    def prefill(self, params, memory, prompt):
        return memory

    def drafts(self, memory, tokens, length, gamma):
        return jnp.full((self.gamma_max,), memory.length), gamma

    def commit(self, params, memory, length):
        return memory.replace(length=memory.length + 1)


class RefusedByItsCache(Echo):
    """Holds a cache in its memory; a commit marks an operation on it as refused."""

    def init(self, *, capacity, page_size):
        model = row_model.RowModel(config=bench.TINY, impl="xla", slab=2)
        kv = model.new_cache(capacity=capacity, page_size=page_size)
        memory = super().init(capacity=capacity, page_size=page_size)
        return memory.replace(spare={"draft": kv})

    def commit(self, params, memory, length):
        kv = memory.spare["draft"]
        return memory.replace(
            spare={"draft": kv.replace(refused=jnp.ones_like(kv.refused))}
        )


class EqualToItselfAlone(Echo):
    """Equals only itself, so that equal drafters do not share an executable."""

    __eq__, __hash__ = object.__eq__, object.__hash__


FAULTS = {
    GrowsWithThePrompt: ("static", "shapes: prefill makes a memory of .* from one of"),
    ChangesItsDtype: ("static", "shapes: commit makes a memory of .*float32"),
    OneTooWide: ("static", r"shapes: .* is not int32 tokens \[2\] and an int32 number"),
    DrawsOnTheHost: ("pure", "pure functions: "),
    AsksTheHost: ("pure", "no host: propose calls the host by pure_callback"),
    OverlooksGamma: ("proposals", "number drafted: 2 tokens for gamma=0"),
    PastTheVocabulary: ("proposals", r"vocabulary: .* are not all in \[0, 96\)"),
    LooksUpAhead: ("proposals", "reads past the end: the text again behind the text "),
    LosesAField: ("memory", "memory that is put together from its leaves"),
    CountsItsRounds: ("truncation", ".* after 1 rounds, .* from a fresh memory"),
    RefusedByItsCache: ("lossless", "lossless: a cache refused an operation of the"),
    EqualToItselfAlone: ("lossless", "no retrace: traced again for gamma=1"),
}
"""The clause that each fault breaks, and words of its message."""


WRONG_PROBABILITIES = {
    "NaN": ({"scale": np.nan}, "probabilities: row 0 .* holds nan"),
    "more than one": ({"scale": 1.5}, "probabilities: row 0 .* sums to 1.5"),
    "of another token": ({"moved": 1}, "probabilities: row 0 .* gives .* 0.0"),
    "of another vocabulary": ({"width": 97}, r"static shapes: probs .*\[2, 96\]"),
}


@pytest.mark.parametrize("name", WRONG_PROBABILITIES)
def test_probabilities_that_cannot_be_are_caught(name):
    changes, message = WRONG_PROBABILITIES[name]
    with pytest.raises(AssertionError, match=message):
        testing.check_drafter(SaysItsProbabilities(**changes), None, BENCH)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_caught(fault):
    """Negative controls: each clause catches its own faults, with its own message."""
    clause, words = FAULTS[fault]
    with pytest.raises(AssertionError, match=words):
        testing.CLAUSES[clause](fault(), None, BENCH)


def test_other_tokens_than_plain_decodings_are_caught(monkeypatch):
    """Negative control: a fault of acceptance, which no drafter causes, is caught."""

    class OfThisTest(Echo):
        """A class of this test alone: nothing is compiled for it yet."""

    real = acceptance.accept_exact
    monkeypatch.setattr(
        acceptance,
        "accept_exact",
        lambda drafts, own, number: real(drafts, own.at[0].add(1) % 96, number),
    )
    with pytest.raises(AssertionError, match="lossless: .* decoding"):
        testing.CLAUSES["lossless"](OfThisTest(), None, BENCH)


def test_a_drafter_that_does_not_fit_is_refused():
    """Fails if a slab that is too small is noticed only inside a trace."""
    with pytest.raises(ValueError, match="needs 6 rows a window, the target has 5"):
        testing.check_drafter(Echo(gamma_max=5), None, BENCH)


class Reading(pytree.Node):
    """The last feature that was handed out, and the position of the next one."""

    feature: jax.Array  # [D]
    end: jax.Array  # [] int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Drafts a token that is a hash of the newest feature, or of another by a fault."""

    fault: str = ""
    gamma_max: int = GAMMA_MAX
    taps: tuple[int, ...] = (0,)

    def init(self, *, capacity, page_size):
        del capacity, page_size
        return Reading(feature=jnp.zeros((32,)), end=jnp.zeros((), jnp.int32))

    def prefill(self, params, memory, prompt, features):
        del params
        end = len(prompt) - 1
        feature = features[max(end - 1, 0), 0] if end else memory.feature
        return memory.replace(feature=jnp.array(feature), end=jnp.array(end, jnp.int32))

    def propose(self, params, memory, *, tokens, length, gamma):
        del params, tokens, length
        bits = jax.lax.bitcast_convert_type(memory.feature, jnp.uint32)
        token = (jnp.sum(bits % 9973) // 7 % 96).astype(jnp.int32)
        token = 0 if self.fault == "reads none" else token
        drafts = jnp.full((self.gamma_max,), token, jnp.int32)
        return memory, protocols.Proposal(tokens=drafts, num_drafted=gamma)

    def commit(self, params, memory, length, features=None):
        del params
        if features is None:
            return memory.replace(end=length - 1)
        newest = length - 1 - memory.end - 1
        newest -= int(self.fault == "late")
        feature = features[-1 if self.fault == "past the end" else newest, 0]
        feature = jnp.where(newest < 0, memory.feature, feature)
        return memory.replace(feature=feature, end=length - 1)


@pytest.mark.slow
def test_a_drafter_that_reads_the_target():
    assert testing.check_drafter(Reader(), None, BENCH) == tuple(testing.CLAUSES)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("reads none", "change no draft"),
        ("past the end", "after the features of committed rows"),
        ("late", "from fresh memories"),
    ],
)
def test_features_that_are_read_wrongly(fault, why):
    with pytest.raises(AssertionError, match=f"features: .*{why}"):
        testing.CLAUSES["features"](Reader(fault=fault), None, BENCH)


def test_features_that_are_read_rightly():
    """Checks that the clause of the test above passes a right reader."""
    testing.CLAUSES["features"](Reader(), None, BENCH)
