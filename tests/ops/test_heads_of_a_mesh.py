"""Heads one by one, as XLA attends on a mesh: bits do not depend on their number."""

import dataclasses

import numpy as np
from ops import row_slabs as slabs

from spec_jax import testing


def of_devices(count: int, *, by_head: bool = True) -> np.ndarray:
    """Returns the output of eight heads, in `count` parts as on so many devices."""
    slab = slabs.small_slab(np.random.default_rng(0), "float32", N=8, K=8)
    R, parts = slab.num_rows, []
    for own in np.split(np.arange(8), count):
        arrays = {
            name: getattr(slab, name)[:, :, own] for name in ("k_pages", "v_pages")
        }
        arrays["heads"] = slab.heads.reshape(R, 3, 8, -1)[:, :, own].reshape(R, -1)
        part = dataclasses.replace(slab, **arrays)
        parts.append(slabs.run("xla", part, R, by_head=by_head)[0])
    return np.concatenate(parts, axis=1)


def test_heads_are_the_same_on_any_number_of_devices():
    """Fails if XLA computes heads in shapes, or loops, that their number decides."""
    whole = of_devices(1)
    for count in (2, 8):
        testing.assert_same_bits(of_devices(count), whole)
    # Negative control: without loops over heads, one of these differs in a bit.
    beside, *others = (of_devices(count, by_head=False) for count in (1, 2, 8))
    assert any((testing.bits(other) != testing.bits(beside)).any() for other in others)
    np.testing.assert_allclose(beside, whole, rtol=1e-5, atol=1e-6)
