"""Heads one by one, as XLA attends on a mesh: bits do not depend on their number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import testing
from spec_jax.ops import row_attention


R, K, H = 4, 8, 8
FIRST = 3  # position of the first row; before it are keys of zeros


def attend(heads, norm, cos, sin, *, by_head):
    """Attends rows of one slot: `heads [R, 3, heads, H]` has queries, keys, values."""
    pages, positions = jnp.zeros((1, 8, heads.shape[2], H)), FIRST + jnp.arange(R)
    out, *_ = row_attention.row_attention(
        heads.reshape(R, -1), norm, norm, pages, pages, cos=cos, sin=sin,
        page_table=jnp.zeros((1, 1), jnp.int32), slots=jnp.zeros((R,), jnp.int32),
        positions=positions, num_active=jnp.int32(R), eps=1e-6, scale=H**-0.5,
        impl="xla", by_head=by_head,
    )  # fmt: skip
    return out


@functools.cache
def of_devices(count: int, *, by_head: bool = True) -> np.ndarray:
    """Returns the output of all heads, in `count` parts as on so many devices."""
    drawn = np.random.default_rng(0).normal(size=(2 * R, 3, K, H)).astype("float32")
    angles, norm = drawn[R:, 0, 0, : H // 2], 1 + 0.1 * drawn[R, 1, 0]
    run = jax.jit(functools.partial(attend, by_head=by_head))
    shared = norm, np.cos(angles), np.sin(angles)
    parts = np.split(3 * drawn[:R], count, axis=2)
    return np.concatenate([run(part, *shared) for part in parts], axis=1)


def test_heads_are_the_same_on_any_number_of_devices():
    """Fails if XLA computes heads in shapes, or loops, that their number decides."""
    whole = of_devices(1)
    for count in (2, 8):
        testing.assert_same_bits(of_devices(count), whole)


def test_heads_side_by_side_are_others():
    """Negative control: without loops over heads, one of these differs in a bit."""
    whole = of_devices(1, by_head=False)
    others = [of_devices(count, by_head=False) for count in (2, 8)]
    assert any((testing.bits(other) != testing.bits(whole)).any() for other in others)
    np.testing.assert_allclose(of_devices(8), whole, rtol=1e-5, atol=1e-6)
