"""The comparisons that exactness tests use: of bits, and of the evidence of runs."""

import numpy as np
import pytest

from spec_jax import testing
from spec_jax.debug import evidence


def make_evidence(**changes) -> evidence.Evidence:
    """Returns evidence of three prompt tokens and five generated, in two layers."""
    rng = np.random.default_rng(3)
    kv = [rng.integers(0, 99, (2, 7, 1, 4), np.uint16) for _ in range(2)]
    decisions = evidence.Decisions(
        log_probs=np.arange(5, dtype=np.uint32),
        logits=np.arange(10, dtype=np.uint32).reshape(5, 2),
        row=np.array([0, 1, 2, 0, 1], np.int32),
        constant=np.zeros(5, bool),
        drafted=np.full(5, -1, np.int32),
    )
    tokens = np.arange(5, dtype=np.int32)
    fields = {"num_prompt": 3, "tokens": tokens, "kv": kv, "decisions": decisions}
    return evidence.Evidence(**(fields | changes))


def with_change(name: str, at, value) -> evidence.Evidence:
    made = make_evidence()
    if name == "kv":
        made.kv[at[0]][at[1:]] = value
    else:
        getattr(made if name == "tokens" else made.decisions, name)[at] = value
    return made


@pytest.mark.parametrize(
    "wrong, expected",
    [
        (make_evidence(), []),
        (with_change("tokens", 2, 77), [("tokens", 5, 2, None)]),
        (make_evidence(tokens=np.arange(4, dtype=np.int32)), [("tokens", 7, 1, None)]),
        (with_change("log_probs", 3, 77), [("log_probs", 6, 0, None)]),
        (with_change("logits", (4, 1), 77), [("logits", 7, 1, None)]),
        (with_change("kv", (1, 0, 5, 0, 2), 777), [("kv", 5, None, 1)]),
        (with_change("kv", (0, 1, 0, 0, 0), 777), [("kv", 0, None, 0)]),
    ],
)
def test_differences_are_located(wrong, expected):
    found = evidence.compare(make_evidence(), wrong)
    assert [(d.what, d.position, d.row, d.layer) for d in found] == expected
    hashes = wrong.hashes(), make_evidence().hashes()
    differing = {what for what in evidence.WHATS if hashes[0][what] != hashes[1][what]}
    assert differing == {d.what for d in found}


def test_nothing_is_compared_past_another_token():
    """Fails if logits or K/V after another token count: they hide where it began."""
    wrong = with_change("tokens", 1, 77)
    wrong.decisions.log_probs[2:] += 1
    wrong.decisions.logits[2:] += 1
    for layer in wrong.kv:
        layer[:, 4:] += 1
    (found,) = evidence.compare(make_evidence(), wrong)
    assert (found.what, found.position) == ("tokens", 4)
    wrong.kv[0][0, 3] += 1  # in the row that chose the token
    found = evidence.compare(make_evidence(), wrong)
    assert [one.what for one in found] == ["tokens", "kv"]


def arrays(value, dtype="float32"):
    return {"a": [np.asarray([1.0, value], dtype)]}


ULP = np.nextafter(np.float32(1), np.float32(2))
PAIRS = ((0.0, -0.0), (np.nan, -np.nan), (np.inf, -np.inf), (1.0, ULP), (0.0, 1e-45))


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_one_other_bit_is_told(left, right):
    """Fails if zeros, NaNs or infinities of other bits pass, or a number an ULP off."""
    for dtype in ("float32", "float64"):
        testing.assert_same_bits(arrays(left, dtype), arrays(left, dtype))
    message = r"here\['a'\]\[0\]: 1 of 2 elements differ"
    with pytest.raises(AssertionError, match=message):
        testing.assert_same_bits(arrays(left), arrays(right), what="here")


def test_other_kinds_of_arrays_are_told():
    for other, words in (
        ([np.ones(2, np.float32)], "different structures"),
        (arrays(1, "float64"), "float32 against .* float64"),
        ({"a": [np.ones(3, np.float32)]}, r"\(2,\) .* against \(3,\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            testing.assert_same_bits(arrays(1), other)
