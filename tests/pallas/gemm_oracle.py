"""The products of the row path in float64 NumPy, from the docstrings of the ops."""

import jax.numpy as jnp
import numpy as np


def wide(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def rounded(x) -> np.ndarray:
    return wide(x.astype(jnp.bfloat16))


def normal(rng, *shape, scale=1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(jnp.bfloat16)


def rms_norm(x, weight, eps) -> np.ndarray:
    x = wide(x)
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return rounded(rounded(x * scale) * wide(weight))


def project(x, w, *, norm=None, residual=None, eps=0.0, out_dtype=jnp.bfloat16):
    y = (wide(x) if norm is None else rms_norm(x, norm, eps)) @ wide(w).T
    y = rounded(y) if out_dtype == jnp.bfloat16 else y
    return y if residual is None else rounded(y + wide(residual))


def gate(x, w, *, norm, eps):
    gates, up = np.split(project(x, w, norm=norm, eps=eps), 2, axis=-1)
    return rounded(rounded(gates / (1 + np.exp(-gates))) * up)


def assert_rounded_alike(actual, expected) -> None:
    """Asserts that few elements differ at all: those at the edge of a rounding.

    A rounding too many or too few moves a third of them.
    """
    differing = np.mean(wide(actual) != expected)
    assert differing < 0.06, f"{differing:.0%} of {expected.size} elements differ"
