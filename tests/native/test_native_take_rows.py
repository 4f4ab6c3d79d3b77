"""`calls.take_rows` against numpy's indexing: rows as they lie, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.native import calls
from spec_jax.ops import embedding


ENTRIES = 11

_take_rows = jax.jit(calls.take_rows, static_argnames=("isa",))


def table_of(rng, width, dtype):
    """Ordinary values, a NaN, infinities and both zeros."""
    table = rng.normal(size=(ENTRIES, width)).astype(np.float32)
    table[3, 0], table[4], table[5], table[6] = np.nan, np.inf, -np.inf, -0.0
    return jnp.asarray(table, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 7, 320])
def test_rows_are_the_tables(rng, isa, dtype, width):
    """Fails if a bit of a row changes, or another row is taken."""
    table = table_of(rng, width, dtype)
    index = np.concatenate([np.arange(ENTRIES), rng.integers(ENTRIES, size=9)])
    rows = _take_rows(
        table, jnp.asarray(index, jnp.int32), num_active=jnp.int32(len(index)), isa=isa
    )
    testing.assert_same_bits(np.asarray(rows), np.asarray(table)[index])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_rows_are_not_looked_up(rng, isa, dtype):
    """Fails if a padding row is looked up, or an active one is not."""
    table = table_of(rng, 20, dtype)
    index = jnp.asarray([2, 9, 2**31 - 1, -1], jnp.int32)
    for live in range(3):
        rows = _take_rows(table, index, num_active=jnp.int32(live), isa=isa)
        expected = np.array(table)[[2, 9]][:live]
        testing.assert_same_bits(np.asarray(rows)[:live], expected)


def test_no_such_entry_is_nan(rng, isa):
    """Fails if what lies outside the table is read."""
    table = table_of(rng, 5, "float32")
    index = jnp.asarray([ENTRIES, 2**31 - 1, -1, -(2**31), 1], jnp.int32)
    rows = _take_rows(table, index, num_active=jnp.int32(5), isa=isa)
    assert np.isnan(rows[:4]).all()
    testing.assert_same_bits(np.asarray(rows[4]), np.asarray(table[1]))


def test_a_neighbouring_row_is_caught(rng, isa):
    """Negative control: the row beside the right one is told apart."""
    table = table_of(rng, 64, "bfloat16")
    row = _take_rows(
        table, jnp.asarray([8], jnp.int32), num_active=jnp.int32(1), isa=isa
    )
    with pytest.raises(AssertionError):
        testing.assert_same_bits(np.asarray(row[0]), np.asarray(table[7]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_implementations_agree(rng, dtype):
    """Fails if implementations of the op differ in an active row."""
    table = table_of(rng, 33, dtype)
    index = jnp.asarray([0, 3, 10, 5], jnp.int32)
    native, xla = (
        np.asarray(embedding.embed(table, index, num_active=jnp.int32(4), impl=impl))
        for impl in ("native", "xla")
    )
    testing.assert_same_bits(native, xla)


def test_bad_input():
    """Fails if shapes or dtypes that the kernel would misread are taken."""
    index, live = jnp.zeros((2,), jnp.int32), jnp.int32(1)
    with pytest.raises(NotImplementedError, match="float32 or bfloat16"):
        calls.take_rows(jnp.zeros((3, 4), jnp.float16), index, num_active=live)
    with pytest.raises(ValueError, match="num_active has shape"):
        calls.take_rows(jnp.zeros((3, 4)), index, num_active=jnp.zeros((1,), jnp.int32))
