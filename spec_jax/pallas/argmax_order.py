"""The order of logits as integers: what the argmax compares.

NaN is the largest of all and both zeros are one value: nothing is rounded, and no order
of comparison can show.
"""

import jax
import jax.numpy as jnp


NAN = 0x7FFFFFFF  # above every number: infinity is 0x7F800000
NOTHING = -0x80000000  # below every number; as a float's bits, minus zero


def check(logits: jax.Array) -> None:
    """Raises `NotImplementedError` unless the logits can be ordered."""
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"logits are float32 or bfloat16, not {logits.dtype}")


def ordered(x: jax.Array) -> jax.Array:
    """Integers that compare as the floats of `x` do, NaN above all."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # Minus zero equals zero. Not by a comparison of floats: XLA on a CPU takes
    # denormals for zeros.
    bits = jnp.where(bits == NOTHING, 0, bits)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(x != x, NAN, ordered)


def first_of_largest(keys: jax.Array, indices: jax.Array):
    """The largest of `keys [.., n]`, and the least index that has it."""
    keepdims = keys.ndim > 1
    largest = jnp.max(keys, axis=-1, keepdims=keepdims)
    candidates = jnp.where(keys == largest, indices, NAN)
    return largest, jnp.min(candidates, axis=-1, keepdims=keepdims)
