"""`steps.step`: one call has the bits of the operations one by one."""

import dataclasses
import functools

import block_models as models
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.model import decoder, params as params_lib, qwen3
from spec_jax.native import steps


SLAB = 9
TAPS = (0, 2, 1)


def make(dtype, **changes):
    config = decoding.make_config(dtype=dtype, num_layers=2, **changes)
    params = params_lib.init(jax.random.key(3), config, stddev=0.1)
    if config.is_bytes:
        params = params_lib.to_bytes(params, config.weights)
    return config, params_lib.prepare(params, "native")


def compile_(config, *, taps=TAPS, **how):
    """Returns a step, which is compiled once."""
    how |= {"config": config, "impl": "native", "taps": taps}
    return jax.jit(functools.partial(qwen3.forward_rows, **how))


def run(config, params, live, *, num_kept=None, forward=None, **how):
    """Runs two slabs of two slots; returns logits and features of `num_kept` rows, or
    of the active ones, and both pools."""
    forward = forward or compile_(config, **how)
    kept = slice(live if num_kept is None else num_kept)
    kv, found = models.new_slots(config, 2), []
    for rows in models.two_slabs(live, SLAB):
        kv, outputs = forward(params, rows=rows, kv=kv)
        found += [outputs.logits[kept], outputs.features[kept]]
    return jax.tree.map(np.asarray, (found, kv.k, kv.v))


@pytest.mark.parametrize(
    ("dtype", "live", "changes"),
    [
        pytest.param("float32", 6, {}, id="float32-6"),
        pytest.param("float32", 3, {"tie_word_embeddings": False}, id="own head"),
        pytest.param("bfloat16", 1, {}, id="bfloat16-1"),
        pytest.param("bfloat16", 6, {"weights": "q8_0"}, id="q8_0"),
        pytest.param("bfloat16", 9, {"weights": "q4_1"}, id="q4_1"),
    ],
)
def test_a_step_is_its_operations(dtype, live, changes):
    """Fails if the step leaves out an operation, rounds or sums otherwise, or takes the
    embedding for the head although there is a head."""
    config, params = make(dtype, **changes)
    assert isinstance(params.embed, jax.Array) == ("tie_word_embeddings" in changes)
    one_by_one = run(config, params, live, observe=lambda layer, name, value: value)
    testing.assert_same_bits(run(config, params, live), one_by_one)


@pytest.mark.parametrize("taps", [TAPS, TAPS[::2]])
@pytest.mark.parametrize(
    ("head_dim", "weights"), [(8, "dense"), (10, "dense"), (8, "q8_0")]
)
def test_without_logits_the_rest_is_the_same(head_dim, weights, taps):
    """Fails if features, keys or values change when the head is left out, and, where
    no tap needs it, the last layer but for its keys and values. With a head size of 10,
    the first key is not the first output of a panel."""
    config, params = make("bfloat16", head_dim=head_dim, weights=weights)
    whole, *pools = run(config, params, 4, taps=taps)
    less, *same = run(config, params, 4, taps=taps, with_logits=False)
    testing.assert_same_bits(same, pools)
    assert all(np.count_nonzero(pool[-1]) for pool in pools)
    testing.assert_same_bits(less[1::2], whole[1::2])
    assert [logits.shape for logits in less[::2]] == [(0, config.vocab_size)] * 2


@pytest.fixture
def poisoned(monkeypatch):
    """Gives steps memory of NaN to write their results to."""
    call = steps.calls.call

    def poison(target, outputs, *arguments, aliases=None, **how):
        is_step = target == "spec_jax_step"
        for number, output in enumerate(outputs if is_step else ()):
            if output.size and number not in aliases.values():
                aliases = aliases | {len(arguments): number}
                # Kernels take any number of arguments after those of the last layer.
                arguments += (jnp.full(output.shape, jnp.nan, output.dtype),)
        return call(target, outputs, *arguments, aliases=aliases, **how)

    monkeypatch.setattr(steps.calls, "call", poison)


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("live", [0, 4, SLAB])
def test_padding_rows_of_features_are_zeros(live, with_logits, poisoned):
    """Fails if they keep old memory, whose NaN would stop `jax_debug_nans`."""
    how = {"with_logits": with_logits, "num_kept": SLAB}
    found, *_ = run(*make("bfloat16"), live, **how)
    for features in found[1::2]:
        assert not features[live:].any() and np.isfinite(features[:live]).all()
    if with_logits and live < SLAB:  # Negative control: the memory is NaN.
        assert all(np.isnan(logits[live:]).all() for logits in found[::2])


def test_an_operation_that_differs_is_caught():
    """Negative control: a residual of a layer that is one bit off."""
    config, params = make("float32")

    def planted(layer, name, value):
        if layer == 1 and name == "attention_residual":
            return jnp.nextafter(value, jnp.float32(9))
        return value

    one_by_one = run(config, params, 3, observe=planted)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(run(config, params, 3), one_by_one)


def test_refusals():
    """Fails if the kernel runs on weights of another shape or form."""
    config, params = make("float32")
    kv = models.new_slots(config, 2)
    model = steps.Model.of(params, params.layers, config, kv)
    (first, second), (pool, _) = model.layers, model.pages[0]
    number = jnp.zeros((2,), jnp.int32)
    angle = jnp.zeros((2, config.head_dim // 2))
    rows = decoder.Rows(
        tokens=number, slots=number, positions=number, num_active=jnp.int32(1)
    )
    how = {"rows": rows, "angles": (angle, angle), "taps": (), "with_logits": True}
    bad = second._replace(down=second.gate_up)
    half = second._replace(k_norm=None)
    for message, change in {
        r"taps=\(3,\) of 2 layers": {"taps": (3,)},
        "cos has shape": {"angles": (angle[:1], angle)},
        "page_table has shape": {"page_table": number},
        "both, or neither": {"layers": [first, half]},
        "down has shape": {"layers": [first, bad]},
        "v_pages has shape": {"pages": [(pool, pool[:2])] * 2},
        "of panels": {"embed": jnp.zeros(params.embed.shape)},
    }.items():
        of_model = {name: change[name] for name in change.keys() - how}
        given = how | {name: change[name] for name in change.keys() & how}
        with pytest.raises(ValueError, match=message):
            steps.step(model=dataclasses.replace(model, **of_model), **given)
