"""Faults that `check_target` catches, targets of one forward function, and examples."""

import dataclasses
import pathlib

import decoding
import jax
import jax.numpy as jnp
import pytest

import spec_jax as sj
from examples import own_target
from spec_jax.drafters import registry
from spec_jax.testing import target_kit


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocab_size: int = 24
    max_position_embeddings: int = 64
    width: int = 48


def toy_params():
    """Returns random weights for the toys below."""
    first, second = jax.random.split(jax.random.key(0))
    shape = Sizes.vocab_size, Sizes.width
    return {
        "embed": jax.random.normal(first, shape),
        "out": jax.random.normal(second, shape[::-1]),
    }


def toy(mix):
    """Returns a target without attention: it adds up what a slot was fed, by `mix`."""

    def forward_rows(params, config, rows, cache):
        at = rows.slots, rows.positions
        cache = cache.at[at].set(params["embed"][rows.tokens], mode="drop")
        seen = jnp.arange(cache.shape[1])[None] <= rows.positions[:, None]
        return cache, mix(params["out"], rows, seen[..., None], cache[rows.slots])

    return sj.ForwardTarget(
        forward_rows=forward_rows,
        init_cache=lambda config, slots, size: jnp.zeros((slots, size, config.width)),
        config=Sizes(),
    )


def right(out, rows, seen, values):
    return jnp.where(seen, values, 0).sum(1) @ out


def k_split(out, rows, seen, values):
    """Computes the sum over K in two halves where more than one row is active."""
    x, half = jnp.where(seen, values, 0).sum(1), Sizes.width // 2
    parts = x[:, :half] @ out[:half] + x[:, half:] @ out[half:]
    return jnp.where(rows.num_active > 1, parts, x @ out)


def reads_ahead(out, rows, seen, values):
    """Multiplies values past a row by 0: NaN times 0 is NaN."""
    return (seen.astype(values.dtype) * values).sum(1) @ out


def sees_neighbours(out, rows, seen, values):
    """Adds a little of the slab's mean to each row's sum."""
    x = jnp.where(seen, values, 0).sum(1)
    return (x + 1e-7 * x.mean(0, keepdims=True)) @ out


@pytest.mark.parametrize(
    ("fault", "clause"),
    [
        (k_split, "read in windows of many columns"),
        (reads_ahead, "read among rows of NaN"),
        (sees_neighbours, "read in windows of many columns"),
    ],
)
def test_planted_faults_are_caught(fault, clause):
    """Negative control: each fault is the right toy with one thing wrong."""
    with pytest.raises(AssertionError, match=f"batch-invariant: {clause}, the"):
        sj.testing.check_target(toy(fault), toy_params())


def assert_lossless(target, weights, drafter, draft_params=None):
    """Asserts that rounds of two slots write what decoding does, and keep a draft."""
    algo, base = sj.speculative(target, drafter), sj.autoregressive(target)
    prompts, params = [[7, 3, 9, 7, 3], [1]], (weights, draft_params)
    state = algo.run(params, algo.init(params, prompts, max_tokens=32))
    plain = base.run(weights, base.init(weights, prompts, max_tokens=32))
    assert algo.generated(state) == base.generated(plain)
    assert state.length.tolist() == [37, 33] and state.slots.num_accepted.sum() > 0


def test_a_right_toy_passes():
    target, weights = toy(right), toy_params()
    found = sj.testing.check_target(target, weights)
    assert found == [one.clause for one in target_kit.readings(8)]
    assert_lossless(target, weights, sj.drafters.NGram(gamma_max=3))


def test_a_forward_function_has_chains_and_tokens_alone():
    target, weights = toy(right), toy_params()
    tree = sj.drafters.NGram(gamma_max=3, tree=sj.Tree(top_k=2, depth=2, nodes=3))
    algo, params = sj.speculative(target, tree), (weights, None)
    state = algo.init(params, [[1, 2, 1]], max_tokens=4)
    with pytest.raises(NotImplementedError, match="draft chains, or write an engine."):
        algo.run(params, state)
    with pytest.raises(ValueError, match="num_pages=3, and slots share no pages"):
        target.new_cache(capacity=8, num_pages=3)
    with pytest.raises(ValueError, match="max_rows=1: a window has the pending"):
        sj.testing.check_target(dataclasses.replace(target, slab=1), weights)


def small(parts):
    """Builds the example's drafter, trained for a moment; `module:Name` names this."""
    from examples import nnx_drafter

    return nnx_drafter.build(parts, num_tokens=12, steps=12)


@pytest.mark.slow
def test_the_flax_drafter_of_the_example(capsys, optax_promotes):
    pytest.importorskip("flax")
    target = decoding.quickest_bench(3)
    parts = registry.Parts(
        gamma_max=3,
        vocab_size=96,
        load_draft=lambda: None,
        target=target.target,
        target_params=target.params,
    )
    drafter, params = registry.build(f"{__name__}:small", parts)
    assert "loss" in capsys.readouterr().out
    assert_lossless(target.target, target.params, drafter, params)


def test_the_target_of_the_example():
    target = own_target.make_target()
    weights = own_target.init_params(jax.random.key(0), target.config)
    sj.testing.check_target(target, weights)
    lines = pathlib.Path(own_target.__file__).read_text().splitlines()
    first = lines.index("def init_cache(config, num_slots, capacity):")
    assert lines.index("def main():") - first < 60


@pytest.mark.slow
def test_the_flax_target_of_the_example(optax_promotes):
    nnx = pytest.importorskip("flax.nnx")
    from examples import nnx_target

    model = nnx_target.CausalModel(24, 16, num_positions=64, rngs=nnx.Rngs(0))
    target, weights = nnx_target.wrap(model, vocab_size=24, num_positions=64)
    sj.testing.check_target(target, weights)
