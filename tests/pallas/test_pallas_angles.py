"""Angles of rows in interpret mode, against NumPy in float64 and `ops.rope`."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.ops import rope
from spec_jax.pallas import angles_triton


HALF, THETA = 64, 1e6
FREQUENCIES = rope.inverse_frequencies(2 * HALF, THETA)
# The last position of Qwen3, and the first ones.
POSITIONS = np.array([0, 1, 2, 63, 1000, 4095, 4096, 40_959], np.int32)

_kernel = functools.partial(angles_triton.angles, interpret=True)
_angles = jax.jit(_kernel, static_argnames=("scale", "dtype"))


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("bfloat16", 1.25)])
def test_angles_are_those_of_float64(dtype, scale):
    """Fails if a position, a frequency or a half is another's, or scale is left out."""
    found = _angles(POSITIONS, FREQUENCIES, scale=scale, dtype=jnp.dtype(dtype))
    # The radians are rounded to float32, as everywhere.
    radians = (POSITIONS.astype(np.float32)[:, None] * FREQUENCIES).astype(np.float64)
    rounding = {"float32": 2.0**-22, "bfloat16": 2.0**-8}[dtype]
    for values, turned in zip(found, (np.cos(radians), np.sin(radians)), strict=True):
        assert values.dtype == dtype and values.shape == (POSITIONS.size, HALF)
        np.testing.assert_allclose(
            np.asarray(values).astype(np.float64), scale * turned, atol=scale * rounding
        )


def test_angles_are_those_of_the_reference():
    """Fails if a cast stands elsewhere: of bfloat16 hardly an element may differ."""
    ours = _angles(POSITIONS, FREQUENCIES, scale=1.25, dtype=jnp.dtype("bfloat16"))
    theirs = jax.jit(functools.partial(rope.angles, scale=1.25, dtype="bfloat16"))(
        POSITIONS, FREQUENCIES
    )
    for one, other in zip(ours, theirs, strict=True):
        one, other = (np.asarray(x).view(np.int16).astype(int) for x in (one, other))
        assert np.mean(one != other) < 0.01 and np.max(np.abs(one - other)) <= 1


@pytest.mark.parametrize("half", [48, 64])
def test_a_row_depends_on_its_position_alone(rng, half):
    """Fails if a row's bits depend on its place, or on how many there are."""
    frequencies = rope.inverse_frequencies(2 * half, THETA)
    positions = rng.integers(0, 40_960, 16).astype(np.int32)
    dtype = jnp.dtype("float32")
    together = _angles(positions, frequencies, scale=1.0, dtype=dtype)
    for row in (0, 7, 15):
        alone = _angles(positions[row : row + 1], frequencies, scale=1.0, dtype=dtype)
        testing.assert_same_bits(alone, tuple(x[row : row + 1] for x in together))
    rolled = _angles(np.roll(positions, 3), frequencies, scale=1.0, dtype=dtype)
    testing.assert_same_bits(rolled, tuple(jnp.roll(x, 3, axis=0) for x in together))
    with pytest.raises(AssertionError, match="differ"):  # Negative control.
        testing.assert_same_bits(rolled, together)


def test_implementations_without_kernels_keep_the_reference():
    """Fails if another program than `rope.angles` is traced for a CPU."""
    traced = [
        str(jax.make_jaxpr(functools.partial(f, scale=1.0, dtype="bfloat16", **how))(
            POSITIONS, FREQUENCIES
        ).eqns)
        for f, how in (
            (rope.angles, {}),
            (rope.row_angles, {"impl": "native"}),
            (rope.row_angles, {"impl": "xla"}),
            (rope.row_angles, {"impl": "interpret"}),
        )
    ]  # fmt: skip
    assert traced[0] == traced[1] == traced[2]
    assert "pallas_call" in traced[3] and "pallas_call" not in traced[0]


def test_shapes_are_checked():
    """Fails if positions of slots are taken for those of rows."""
    with pytest.raises(ValueError, match="positions has shape"):
        _angles(
            POSITIONS[None], FREQUENCIES, scale=1.0, dtype=jnp.dtype(ml_dtypes.bfloat16)
        )
