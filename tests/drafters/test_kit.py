"""The contract kit: it passes right drafters, and names the fault of each wrong one."""

import contextlib
import dataclasses
from typing import Any

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
        return Memory(length=jnp.zeros((), jnp.int32), spare=jnp.zeros(capacity))

    def prefill(self, params, memory, prompt):
        return memory.replace(length=jnp.array(len(prompt), jnp.int32))

    def drafts(self, memory, tokens, length, gamma):
        """Returns a token that is drafted again and again, and how often."""
        return tokens[length - 1], gamma

    def propose(self, params, memory, *, tokens, length, gamma):
        token, num_drafted = self.drafts(memory, tokens, length, gamma)
        drafts = jnp.full((self.gamma_max,), token)
        return memory, protocols.Proposal(tokens=drafts, num_drafted=num_drafted)

    def commit(self, params, memory, length):
        return memory.replace(length=length)


def test_a_drafter_that_keeps_the_contract(monkeypatch, capsys):
    """Checks that it passes every clause, and that the kit reports its progress."""
    monkeypatch.setattr(drafter_kit, "INTERVAL_S", 0.0)
    for name in ("lossless", "slots"):  # They compile loops.
        monkeypatch.delitem(testing.CLAUSES, name)
    checked = testing.check_drafter(Echo(), None, BENCH)
    assert checked == tuple(testing.CLAUSES)
    assert capsys.readouterr().err.count("clauses\n") == len(checked)


def echo_that(**changes):
    """Returns an `Echo` of a class of its own, with other methods or properties."""
    return type("Faulty", (Echo,), changes)()


def proposing(**changes):
    """Returns an `Echo` whose proposals have other fields, made of their tokens."""

    def propose(self, params, memory, **asked):
        memory, proposal = Echo.propose(self, params, memory, **asked)
        made = {name: change(proposal.tokens) for name, change in changes.items()}
        return memory, proposal.replace(**made)

    return propose


def saying(*, scale=1.0, moved=0, width=96):
    """Returns an `Echo` whose drafts have such probabilities, by default 1."""
    probs = lambda tokens: jax.nn.one_hot(tokens + moved, width) * scale
    return echo_that(propose=proposing(probs=probs))


RNG = np.random.default_rng(0)


def asked_of_the_host(self, memory, tokens, length, gamma):
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.pure_callback(lambda x: x, shape, tokens[length - 1]), gamma


def looked_up_ahead(self, memory, tokens, length, gamma):
    """Looks up the two tokens behind the text, and drafts the token after them."""
    after = jnp.roll(tokens, -1)
    places = jnp.arange(len(tokens))
    is_match = (tokens == tokens[length]) & (after == tokens[length + 1])
    is_match &= places < length - 1
    return tokens[jnp.argmax(is_match) + 2], jnp.where(jnp.any(is_match), gamma, 0)


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


class RefusedByItsCache(Echo):
    """Holds a cache in its memory; a commit marks an operation on it as refused."""

    def init(self, *, capacity, page_size):
        model = row_model.RowModel(config=bench.TINY, impl="xla", slab=2)
        kv = model.new_cache(capacity=capacity, page_size=page_size)
        memory = super().init(capacity=capacity, page_size=page_size)
        return memory.replace(spare={"draft": kv})

    def commit(self, params, memory, length):
        kv = memory.spare["draft"]
        kv = kv.replace(refused=jnp.ones_like(kv.refused))
        return memory.replace(spare={"draft": kv})


OF_A_TREE = {"depth_max": GAMMA_MAX}
ORPHANS = proposing(parents=lambda tokens: jnp.arange(1, 3, dtype=jnp.int32))
FAULTS = {
    "static": {
        "shapes: prefill makes a memory of .* from one of": echo_that(
            prefill=lambda self, params, memory, prompt: memory.replace(
                spare=jnp.zeros(len(prompt))
            )
        ),
        "shapes: commit makes a memory of .*float32": echo_that(
            commit=lambda self, params, memory, length: memory.replace(
                length=length.astype(jnp.float32)
            )
        ),
        r"shapes: .* is not int32 tokens \[2\] and an int32 number": echo_that(
            propose=proposing(tokens=lambda tokens: jnp.pad(tokens, (0, 1)))
        ),
        r"static shapes: probs .*\[2, 96\]": saying(width=97),
        "depth_max=2 and parents None": echo_that(**OF_A_TREE),
    },
    "pure": {
        "pure functions: ": echo_that(
            drafts=lambda self, memory, tokens, length, gamma: (
                tokens[0] * 0 + int(RNG.integers(0, 96)),
                gamma,
            )
        ),
        "no host: propose calls the host by pure_callback": echo_that(
            drafts=asked_of_the_host
        ),
    },
    "proposals": {
        "number drafted: 2 tokens for gamma=0": echo_that(
            drafts=lambda self, memory, tokens, length, gamma: (
                tokens[0],
                jnp.int32(GAMMA_MAX),
            )
        ),
        r"vocabulary: .* are not all in \[0, 96\)": echo_that(
            drafts=lambda self, memory, tokens, length, gamma: (tokens[0] + 96, gamma)
        ),
        "reads past the end: the text again behind the text ": echo_that(
            drafts=looked_up_ahead
        ),
        "probabilities: row 0 .* holds nan": saying(scale=np.nan),
        "probabilities: row 0 .* sums to 1.5": saying(scale=1.5),
        "probabilities: row 0 .* gives .* 0.0": saying(moved=1),
        "tree: column 1 has parent 1": echo_that(**OF_A_TREE, propose=ORPHANS),
    },
    "memory": {
        "memory that is put together from its leaves": echo_that(
            prefill=lambda self, params, memory, prompt: memory.replace(
                spare=Forgetful(memory.spare, lost=len(prompt))
            ),
            drafts=lambda self, memory, tokens, length, gamma: (
                tokens[0] * 0 + memory.spare.lost,
                gamma,
            ),
        ),
    },
    "truncation": {
        # It drafts the number of its commits, which no truncation takes back.
        ".* after 1 rounds, .* from a fresh memory": echo_that(
            prefill=lambda self, params, memory, prompt: memory,
            drafts=lambda self, memory, tokens, length, gamma: (memory.length, gamma),
            commit=lambda self, params, memory, length: memory.replace(
                length=memory.length + 1
            ),
        ),
    },
    "lossless": {
        "lossless: a cache refused an operation of the": RefusedByItsCache(),
        # Equal to itself alone: equal drafters do not share an executable.
        "no retrace: traced again for gamma=1": echo_that(
            __eq__=object.__eq__, __hash__=object.__hash__
        ),
    },
}
"""Words that a clause must say of a wrong drafter."""


@pytest.mark.parametrize(
    ("clause", "words"),
    [(clause, words) for clause, drafters in FAULTS.items() for words in drafters],
)
def test_faults_are_caught(clause, words):
    """Negative controls: each clause catches its own faults, with its own message."""
    with pytest.raises(AssertionError, match=words):
        testing.CLAUSES[clause](FAULTS[clause][words], None, BENCH)


def test_other_tokens_than_plain_decodings_are_caught(monkeypatch):
    """Negative control: a fault of acceptance, which no drafter causes, is caught."""
    real = acceptance.accept_exact
    monkeypatch.setattr(
        acceptance,
        "accept_exact",
        lambda drafts, own, number: real(drafts, own.at[0].add(1) % 96, number),
    )
    with pytest.raises(AssertionError, match="lossless: .* decoding"):
        # A class of this test alone: nothing is compiled for it yet.
        testing.CLAUSES["lossless"](echo_that(), None, BENCH)


def test_a_drafter_that_does_not_fit_is_refused():
    """Fails if a slab that is too small is noticed only inside a trace."""
    with pytest.raises(ValueError, match="needs 6 rows a window, the target has 5"):
        testing.check_drafter(Echo(gamma_max=5), None, BENCH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader(Echo):
    """Drafts a token that is a hash of the newest feature, or of another by a fault."""

    fault: str = ""
    taps: tuple[int, ...] = (0,)

    def init(self, **sizes):
        return super().init(**sizes).replace(spare=jnp.zeros((32,)))

    def prefill(self, params, memory, prompt, features):
        memory = super().prefill(params, memory, prompt)
        known = features[: len(prompt) - 1, 0]
        return memory.replace(spare=known[-1]) if len(known) else memory

    def drafts(self, memory, tokens, length, gamma):
        bits = jax.lax.bitcast_convert_type(memory.spare, jnp.uint32)
        token = (jnp.sum(bits % 9973) // 7 % 96).astype(jnp.int32)
        return 0 if self.fault == "reads none" else token, gamma

    def commit(self, params, memory, length, features):
        newest = length - memory.length - 1 - int(self.fault == "late")
        feature = features[-1 if self.fault == "past the end" else newest, 0]
        feature = jnp.where(newest < 0, memory.spare, feature)
        return memory.replace(length=length, spare=feature)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("reads none", "change no draft"),
        ("past the end", "after the features of committed rows"),
        ("late", "from fresh memories"),
        ("", None),
    ],
)
def test_features_that_are_read_wrongly(fault, why):
    """Negative controls; without a fault the clause passes."""
    caught = pytest.raises(AssertionError, match=f"features: .*{why}")
    with caught if fault else contextlib.nullcontext():
        testing.CLAUSES["features"](Reader(fault=fault), None, BENCH)
