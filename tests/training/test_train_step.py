"""The fast training step learns what the plain one learns, up to rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_loss
import tiny_pair

from spec_jax.model import params as params_lib, sequence
from spec_jax.ops import rms_norm
from spec_jax.training import loop


CONFIG = tiny_pair.config(
    vocab_size=32, hidden_size=16, intermediate_size=24, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip
# Relative to the norm of each gradient: float32 sums are in another order.
TOLERANCE = 1e-5


pytestmark = pytest.mark.usefixtures("optax_promotes")


def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (8, 13), 0, 32, jnp.int32)


@functools.cache
def init(seed: int = 0) -> params_lib.Params:
    """Returns weights with noise in every leaf, norms too, so that each leaf counts."""
    params = params_lib.init(jax.random.key(seed), CONFIG, stddev=0.3)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 100), len(leaves))
    noisy = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def distance(actual, expected) -> float:
    """Returns the largest relative error of a leaf, in the Frobenius norm."""

    def error(a, e) -> float:
        # By NumPy, which compiles nothing.
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        return float(np.linalg.norm(a - e) / np.linalg.norm(e))

    return max(jax.tree.leaves(jax.tree.map(error, actual, expected)))


LOSS = functools.partial(text_loss.text_loss, CONFIG)


def test_a_batch_in_parts_has_the_gradients_of_the_whole():
    """Fails if a part is lost, or has another weight than its share."""
    expected = jax.jit(jax.value_and_grad(LOSS))(init(), tokens())
    inputs = jax.jit(functools.partial(loop.value_and_grad, LOSS, part_size=2))
    assert distance(inputs(init(), tokens(), None), expected) < TOLERANCE
    # Negative control: without one sequence the gradient differs.
    fewer = inputs(init(), tokens().at[0].set(tokens()[1]), None)
    assert distance(fewer, expected) > 10 * TOLERANCE


def test_a_batch_is_of_whole_parts():
    with pytest.raises(ValueError, match="8 sequences is not of whole parts of 3"):
        loop.value_and_grad(LOSS, init(), tokens(), None, part_size=3)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3)]
)
def test_the_norm_has_the_gradient_of_rms_norm(dtype, tolerance):
    """Compares gradients with `rms_norm`'s, which rounds 2 or 3 times in bfloat16."""
    x, weight, cotangent = (
        jax.random.normal(jax.random.key(seed), shape).astype(dtype)
        for seed, shape in enumerate([(3, 5, 16), (16,), (3, 5, 16)])
    )

    def gradients(norm):
        value, pull = jax.vjp(jax.jit(norm), x, weight)
        return value, pull(cotangent)

    plain, expected = gradients(lambda x, w: rms_norm.rms_norm(x, w, eps=1e-3))
    value, actual = gradients(lambda x, w: sequence.norm(x, w, 1e-3))
    np.testing.assert_array_equal(value, plain)
    assert distance(actual, expected) < tolerance
    # Negative control: another `eps` gives other gradients.
    _, other = gradients(lambda x, w: sequence.norm(x, w, 1.0))
    assert distance(other, expected) > 10 * tolerance


def test_the_learning_rate_rises_stays_and_falls():
    recipe = loop.Recipe(steps=100, warmup_steps=10, decay_share=0.3)
    rate = loop.learning_rate(recipe, 0.02)
    rates = [float(rate(step)) for step in (0, 5, 10, 40, 70, 85, 100)]
    np.testing.assert_allclose(rates, [0, 0.01, 0.02, 0.02, 0.02, 0.01, 0], atol=1e-9)
    # Before it falls, the rate does not depend on the length of the run.
    longer = loop.learning_rate(dataclasses.replace(recipe, steps=1000), 0.02)
    assert [float(longer(step)) for step in (5, 40)] == rates[1:4:2]
    assert float(longer(85)) != rates[5]
