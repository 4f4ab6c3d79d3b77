"""The EAGLE-3 head: the row contract, gradients, and pairs that other tests run.

`test_head_files` compares rows on pages and whole sequences with float64.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import head_layouts as layouts
from slow_cases import slow

from spec_jax import testing, tree
from spec_jax.model import decoder, eagle3, row_model
from spec_jax.paging import allocator


SLAB, WIDTH = 8, 4
HEAD = layouts.EAGLE
VARIANTS = {
    "plain": HEAD,
    "published variants": dataclasses.replace(
        HEAD, draft_vocab_size=96, has_head_norms=True, fc_norm=True,
        norm_before_residual=True, norm_output=True,
    ),
    "window": dataclasses.replace(HEAD, window=3),
}  # fmt: skip

_forward = jax.jit(eagle3.forward_rows, static_argnames=("config", "impl"))
_sequence = jax.jit(eagle3.forward_sequence, static_argnames=("config",))


def inputs(config, num_pairs: int):
    """Draws features of a target and tokens for the pairs."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(num_pairs, config.features_size)).astype(np.float32)
    return features, rng.integers(0, 96, num_pairs).astype(np.int32)


class Pairs:
    """One slot of a head's cache, to which slabs of pairs are added."""

    def __init__(self, params, config, impl, *, rows=SLAB):
        self.params, self.config, self.impl = params, config, impl
        self.slab = row_model.slab_for(impl, rows)
        model = row_model.RowModel(config=config.layer, impl=impl, slab=self.slab)
        self.kv = model.new_cache(capacity=32, page_size=8)

    def add(self, tokens, features, *, start, branch=None, parents_at=None):
        """Runs pairs from `start` on, padded with NaN; returns hidden and logits."""
        count = len(tokens)
        pad = (0, self.slab - count)
        positions = start + np.arange(count) if parents_at is None else parents_at
        kv = allocator.reserve(self.kv, 0, start + count)
        if branch is not None:
            branch = jnp.asarray(np.pad(branch, (pad, (0, 0))))
        rows = decoder.Rows(
            tokens=jnp.asarray(np.pad(tokens, pad)),
            slots=jnp.zeros((self.slab,), jnp.int32),
            positions=jnp.asarray(np.pad(positions, pad), jnp.int32),
            num_active=jnp.int32(count),
            branch=branch,
        )
        features = np.asarray(features, np.float32)
        features = np.pad(features, (pad, (0, 0)), constant_values=np.nan)
        kv, hidden, logits = _forward(
            self.params, self.config, rows, jnp.asarray(features), kv, impl=self.impl
        )
        self.kv = allocator.extend(kv, 0, start + count)
        return np.asarray(hidden[:count]), np.asarray(logits[:count])


def chain_by_rows(params, config, impl, features, tokens, *, num_own):
    """Runs two slabs of pairs with features, then single pairs with hidden states."""
    pairs = Pairs(params, config, impl)
    cut, known = 5, len(features)
    made = [pairs.add(tokens[:cut], features[:cut], start=0)]
    made.append(pairs.add(tokens[cut:known], features[cut:], start=cut))
    for own in range(num_own):
        at = known + own
        hidden = made[-1][0][-1:].astype(np.float32)
        made.append(pairs.add(tokens[at : at + 1], hidden, start=at))
    hidden, logits = (np.concatenate(part) for part in zip(*made, strict=True))
    # The first layer's.
    keys, values = decoding.held(pairs.kv, len(tokens))[:: config.layer.num_layers]
    return hidden, logits, keys, values


def sequences(params, config, features, tokens, num_own):
    """Runs pairs of features, then `num_own` times pairs of the hidden states."""
    steps = []
    for first in range(num_own + 1):
        read = steps[-1].hidden if steps else features
        pairs = tokens[:, first : first + features.shape[1]]
        steps.append(_sequence(params, config, pairs, read, earlier=tuple(steps)))
    return steps


@pytest.mark.parametrize("impl", ["native", slow("xla"), slow("interpret")])
def test_row_contract(impl):
    """Fails if a pair's bits depend on its slab, its neighbours or a tree's order."""
    decoding.needs(impl)
    dtype = "bfloat16"
    config = layouts.with_dtype(HEAD, dtype)
    params = layouts.make_params(config, dtype)
    features, tokens = inputs(config, 8)
    together = Pairs(params, config, impl).add(tokens[:6], features[:6], start=0)
    alone = Pairs(params, config, impl)
    for i in range(6):
        made = alone.add(tokens[i : i + 1], features[i : i + 1], start=i)
        for ours, theirs in zip(made, together, strict=True):
            testing.assert_same_bits(ours[0], theirs[i], what=f"pair {i}")
    # Two branches after pair 5: the second does not see the first.
    parents = np.array([0, 0, 0], np.int32)
    positions, branch = tree.layout(
        jnp.asarray(parents), start=jnp.int32(5), width=WIDTH
    )
    own = np.repeat(together[0][5:6], 2, axis=0)
    made = alone.add(
        np.array([7, 9], np.int32), own, start=6,
        branch=np.asarray(branch[1:]), parents_at=np.asarray(positions[1:]),
    )  # fmt: skip
    fresh = Pairs(params, config, impl)
    fresh.add(tokens[:6], features[:6], start=0)
    expected = fresh.add(np.array([9], np.int32), own[:1], start=6)
    second = tuple(part[1:] for part in made)
    testing.assert_same_bits(second, expected, what="second branch")


def test_the_loss_of_a_later_step_reaches_every_weight():
    """Fails if a gradient is cut between steps, or a weight is not used."""
    config = VARIANTS["published variants"]
    params = layouts.make_params(config)
    features, tokens = map(jnp.asarray, inputs(config, 8))

    def loss(trained):
        whole = trained.replace(embed=params.embed)
        first = eagle3.forward_sequence(
            whole, config, tokens[None, :7], features[None, :7]
        )
        second = eagle3.forward_sequence(
            whole, config, tokens[None, 1:], first.hidden, earlier=(first,)
        )
        return jnp.mean(jax.nn.logsumexp(second.logits, axis=-1))

    less_effort = {"xla_backend_optimization_level": 0}  # No bits are compared.
    gradient = jax.jit(jax.grad(loss), compiler_options=less_effort)
    grads = gradient(params.replace(embed=None))
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))
