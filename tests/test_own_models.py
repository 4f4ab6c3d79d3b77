"""Targets of a user's own: the examples, compiled as users do."""

import dataclasses
import pathlib

import decoding
import jax
import pytest
import test_target_kit

import spec_jax as sj
from examples import own_target
from spec_jax.model import params as params_lib
from spec_jax.testing import bench


@pytest.mark.parametrize(
    "impl", [pytest.param("xla", marks=pytest.mark.slow), "native"]
)
def test_our_own_targets_pass(impl):
    """Rows of a model that comes along."""
    decoding.needs(impl)
    made = bench.tiny(3)
    target = dataclasses.replace(made.target, impl=impl)
    sj.testing.check_target(target, params_lib.prepare(made.params, impl))


def test_the_target_of_the_example():
    """Its rows keep the contract, drafts are kept, and it is short."""
    target = own_target.make_target()
    weights = own_target.init_params(jax.random.key(0), target.config)
    sj.testing.check_target(target, weights)
    drafter = sj.drafters.NGram(gamma_max=3)
    state = test_target_kit.assert_lossless(target, weights, drafter, max_tokens=32)
    assert state.slots.num_accepted.sum() > 0
    lines = pathlib.Path(own_target.__file__).read_text().splitlines()
    first = lines.index("def init_cache(config, num_slots, capacity):")
    assert lines.index("def main():") - first < 60


lenient = test_target_kit.lenient


def test_the_flax_target_of_the_example(lenient):
    """A module of whole texts keeps the contract, at its price."""
    nnx = pytest.importorskip("flax.nnx")
    from examples import nnx_target

    model = nnx_target.CausalModel(24, 16, num_positions=64, rngs=nnx.Rngs(0))
    target, weights = nnx_target.wrap(model, vocab_size=24, num_positions=64)
    sj.testing.check_target(target, weights)
