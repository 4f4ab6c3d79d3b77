"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) with narrow products.

`optax.contrib.muon` orthogonalises in the dtype of the momentum, float32. Here the
products take bfloat16 operands, as in the original: twice as fast on a CPU that has
such products. All else stays float32. The states are optax's own, so checkpoints of
one can be read by the other.
"""

import jax
import jax.numpy as jnp
import optax


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
BETA = 0.95
EPS = 1e-8


def muon(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns Nesterov momentum, orthogonalised and scaled, for `[out, in]` matrices.

    The update of a matrix is `-learning_rate * sqrt(max(1, out / in)) * UV^T`, where
    `USV^T` is its momentum, up to the errors of the iteration (see `orthogonalize`).
    """
    return optax.chain(
        optax.GradientTransformation(_init, _update),
        optax.identity(),  # Stateless steps of optax's muon: the chain is as long.
        optax.identity(),
        optax.scale_by_learning_rate(learning_rate),
    )


def _init(params):
    return optax.contrib.MuonState(
        count=jnp.zeros([], jnp.int32),
        mu=jax.tree.map(jnp.zeros_like, params),
        ns_coeffs=jnp.asarray(COEFFICIENTS),
    )


def _update(grads, state, params=None):
    del params
    count = state.count + 1
    mu = optax.tree.update_moment(grads, state.mu, BETA, 1)
    ahead = jax.tree.map(
        lambda moment, grad: BETA * moment + (1 - BETA) * grad,
        optax.tree.bias_correction(mu, BETA, count + 1),
        optax.tree.bias_correction(grads, BETA, count),
    )
    updates = jax.tree.map(_scaled, ahead)
    return updates, state._replace(count=count, mu=mu)


def _scaled(momentum):
    rows, columns = momentum.shape
    return max(1.0, rows / columns) ** 0.5 * orthogonalize(momentum)


def orthogonalize(x: jax.Array) -> jax.Array:
    """Maps the singular values of `x`, a float32 matrix, to about 1.

    Five Newton-Schulz iterations of a quintic that ends between 0.7 and 1.2, not at 1.
    Operands of products are rounded to bfloat16; sums, and `x` between the iterations,
    are float32.
    """
    if x.shape[0] > x.shape[1]:
        return orthogonalize(x.T).T
    first, third, fifth = COEFFICIENTS
    x = x / (jnp.linalg.norm(x) + EPS)
    for _ in range(ITERATIONS):
        square = _product("ik,jk->ij", x, x)
        steep = third * square + fifth * _product("ij,jk->ik", square, square)
        x = first * x + _product("ij,jk->ik", steep, x)
    return x


def _product(subscripts, a, b):
    # Not `jnp.matmul`, which would widen the operands to float32 again.
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
