"""`calls.argmax` against `jnp.argmax`: ties, NaN, infinities, and rows alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.native import calls
from spec_jax.ops import argmax


# Around the blocks of 512 and the pieces of 16,384 of argmax.h, and a real vocabulary.
SIZES = (1, 7, 512, 513, 16384, 16385, 33000, 151936)

_argmax = jax.jit(calls.argmax, static_argnames=("isa",))


def run(isa, x, live=None):
    live = len(x) if live is None else live
    return np.asarray(_argmax(jnp.asarray(x), num_active=jnp.int32(live), isa=isa))


@pytest.mark.few(8)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_references(rng, isa, size):
    """Fails if a piece, a block or a tail is missed, a later tie wins, or a NaN is
    passed over for a later one or for infinity.
    """
    x = rng.normal(size=(12, size)).astype(np.float32)
    x[1] = np.round(x[1])  # ties
    x[2] = -np.inf
    x[3, rng.integers(size)] = np.inf
    x[4] = np.where(rng.random(size) < 0.5, 0.0, -0.0)
    for first, value in ((5, np.nan), (7, -np.nan), (9, np.inf)):
        x[first : first + 2, size // 3] = value
        x[first, rng.integers(size)] = np.nan
        x[first + 1, rng.integers(size)] = np.inf
    expected = np.asarray(jnp.argmax(jnp.asarray(x), axis=-1))
    np.testing.assert_array_equal(run(isa, x), expected)


def test_every_place_is_seen(isa):
    """Fails if the largest is found anywhere but where it is."""
    positions = [0, 1, 511, 512, 16383, 16384, 20000, 20479]
    x = np.zeros((len(positions), 20480), np.float32)
    x[np.arange(len(positions)), positions] = 1.0
    assert run(isa, x).tolist() == positions


def test_padding_rows_are_zero_and_unread(rng, isa):
    """Fails if a padding row costs a look, or spoils an active one."""
    x = rng.normal(size=(4, 1000)).astype(np.float32)
    x[2:] = np.nan
    x[2:, 0] = 0.0
    for live in range(5):
        expected = np.where(np.arange(4) < live, np.argmax(x, axis=-1), 0)
        np.testing.assert_array_equal(run(isa, x, live), expected)


def test_the_last_of_ties_is_caught(rng, isa):
    """Negative control: an argmax that takes the last of several is told apart."""
    x = np.round(rng.normal(size=(3, 600))).astype(np.float32)
    last = 599 - np.argmax(x[:, ::-1], axis=-1)
    assert (run(isa, x) != last).any()


@pytest.mark.parametrize("impl", ["xla", "native"])
def test_the_op(rng, impl):
    """Fails if implementations of the op differ in an active row."""
    x = jnp.asarray(rng.normal(size=(3, 4096)), jnp.float32)
    got = argmax.argmax(x, num_active=jnp.int32(2), impl=impl)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got[:2], np.argmax(x, axis=-1)[:2])


def test_bad_input():
    live = jnp.int32(1)
    with pytest.raises(ValueError, match="no values"):
        calls.argmax(jnp.zeros((1, 0)), num_active=live)
    with pytest.raises(NotImplementedError, match="float32, not bfloat16"):
        calls.argmax(jnp.zeros((1, 4), jnp.bfloat16), num_active=live)
    with pytest.raises(ValueError, match="num_active has shape"):
        calls.argmax(jnp.zeros((1, 4)), num_active=jnp.zeros((1,), jnp.int32))
