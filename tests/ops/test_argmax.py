"""The op `argmax` of every implementation: which index wins, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.ops import argmax, dispatch


WIDTH = 600  # past one block of the native kernel

_argmax = jax.jit(argmax.argmax, static_argnames=("impl",))


def run(impl, logits, live=None) -> np.ndarray:
    try:
        dispatch.resolve(impl)
    except NotImplementedError as error:
        pytest.skip(str(error))
    live = np.int32(len(logits) if live is None else live)
    indices = _argmax(jnp.asarray(logits, jnp.float32), num_active=live, impl=impl)
    assert indices.dtype == jnp.int32
    return np.asarray(indices)[:live]


every_impl = functools.partial(
    pytest.mark.parametrize, "impl", ["xla", "native", "interpret"]
)()


@every_impl
def test_the_largest_of_an_active_row(rng, impl):
    """Fails if a padding row is looked at in place of an active one."""
    logits = rng.standard_normal((4, WIDTH))
    logits[2:] = np.nan
    np.testing.assert_array_equal(
        run(impl, logits, live=2), np.argmax(logits[:2], axis=-1)
    )


@every_impl
def test_the_first_of_equals_wins(rng, impl):
    """Fails if a later equal wins: implementations would choose other tokens."""
    logits = rng.integers(-3, 3, (4, WIDTH))
    expected = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(run(impl, logits), expected)
    # Negative control: there are equals, and the last of them is another.
    last = WIDTH - 1 - np.argmax(logits[:, ::-1], axis=-1)
    assert (last != expected).all()


@every_impl
def test_the_first_nan_wins(rng, impl):
    """Fails if NaN is swallowed: a broken row must not pass for a decision."""
    logits = rng.standard_normal((3, WIDTH))
    logits[:, 5] = np.inf
    logits[0, 7] = logits[1, [300, 599]] = logits[2, 0] = np.nan
    np.testing.assert_array_equal(run(impl, logits), [7, 300, 0])
