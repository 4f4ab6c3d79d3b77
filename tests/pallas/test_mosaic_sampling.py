"""Draws by the Mosaic kernels: interpreted, as Triton's; and compiled for an H100."""

import functools

import hopper_models as models
import jax
import mosaic_interpreter
import numpy as np
import pytest
import test_pallas_sampling as plain
import xla_fusions

from spec_jax import testing
from spec_jax.ops import dispatch, draw as draw_op
from spec_jax.pallas import (
    first_tokens_mosaic,
    first_tokens_triton,
    noisy_weights_mosaic,
    row_sums_mosaic,
)


PARAMS = mosaic_interpreter.params()
VOCAB = 200  # two chunks, which overlap
SETTINGS = (
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 3},
    {"temperature": 0.0},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95, "seed": 2**32 - 1},
)


@pytest.fixture
def draw(monkeypatch):
    """`draw(logits, settings, ..)` by the interpreted kernels, of chunks of 128."""
    for module in (first_tokens_mosaic, noisy_weights_mosaic, row_sums_mosaic):
        monkeypatch.setattr(module, "CHUNK", 128)
    real = dispatch.kernels

    def kernels(name, impl):
        module, interpret = real(name, impl)
        return module, PARAMS if impl == "mosaic" else interpret

    monkeypatch.setattr(dispatch, "kernels", kernels)
    return jax.jit(functools.partial(draw_op.draw, impl="mosaic"))


def inputs(rng):
    logits = rng.standard_normal((3, VOCAB)).astype(np.float32)
    positions = rng.integers(0, 2**20, 3).astype(np.int32)
    return logits, positions


def test_draws_are_those_of_triton(rng, draw):
    """Fails if a chunk, a filter, a noise or a setting is another than Triton's.

    Fails if a row's token depends on who else draws, or on NaN beside it.
    """
    settings = plain.stacked(SETTINGS)
    logits, positions = inputs(rng)
    every = np.ones(3, bool)
    found = np.asarray(draw(logits, settings, positions=positions, draws=every))
    triton = jax.jit(functools.partial(draw_op.draw, impl="interpret"))
    how = {"positions": positions, "draws": every}
    np.testing.assert_array_equal(found, triton(logits, settings, **how))
    assert found[1] == np.argmax(logits[1])
    draws = np.asarray([False, False, True])
    poisoned = np.where(draws[:, None], logits, np.float32(np.nan))
    alone = draw(poisoned, settings, positions=positions, draws=draws)
    np.testing.assert_array_equal(alone, [0, 0, found[2]])
    # Negative control: keyed one position late.
    late = triton(logits, settings, positions=positions + 1, draws=every)
    assert found[2] != late[2]


@pytest.mark.slow
@pytest.mark.rest
def test_distributions_are_those_of_triton(rng, draw):
    """Fails if a chunk is counted twice, or a row's sum depends on another row."""
    del draw  # Its kernels are interpreted.
    settings, (logits, _) = plain.stacked(SETTINGS), inputs(rng)
    made, triton = (
        jax.jit(functools.partial(draw_op.distribution, impl=impl))
        for impl in ("mosaic", "interpret")
    )
    found = np.asarray(made(logits, settings))
    np.testing.assert_allclose(found, triton(logits, settings), rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    one = jax.tree.map(lambda leaf: leaf[2:], settings)
    testing.assert_same_bits(made(logits[2:], one), found[2:])
    with pytest.raises(ValueError, match="rows of 100 logits"):
        row_sums_mosaic.row_sums(logits[:, :100], interpret=PARAMS)


def kept(module, logits, values, interpret):
    """`token_order.Kept` of each row."""
    settings = plain.stacked(values)
    first_tokens = functools.partial(module.first_tokens, interpret=interpret)
    return jax.jit(first_tokens)(
        logits,
        logits.max(axis=1),
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        draws=np.ones(len(values), bool),
    )


def test_filters_keep_what_triton_keeps(rng, monkeypatch):
    """Fails if ties are cut elsewhere, or what two chunks share is weighed twice."""
    monkeypatch.setattr(first_tokens_mosaic, "CHUNK", 128)
    logits = np.round(rng.standard_normal((2, VOCAB))).astype(np.float32)
    logits[0] = np.where(np.arange(VOCAB) % 2, np.float32(0.0), np.float32(-0.0))
    values = ({"top_k": 190}, {"top_p": 0.7})
    found = kept(first_tokens_mosaic, logits, values, PARAMS)
    testing.assert_same_bits(found, kept(first_tokens_triton, logits, values, True))
    assert tuple(np.asarray(found)[:, 0]) == (0, 190)
    other = kept(first_tokens_triton, logits, ({"top_k": 189}, values[1]), True)
    with pytest.raises(AssertionError, match="elements differ"):  # Negative control.
        testing.assert_same_bits(found, other)


def test_log1p_is_exact_to_its_last_bits(rng):
    """Fails if the rounding of 1 + x shows, in noise or next to 0."""
    x = -np.concatenate([rng.uniform(0, 1, 2000), 2.0 ** -rng.uniform(1, 126, 2000)])
    x = np.append(x.astype(np.float32), np.float32(-1 + 2.0**-24))
    expected = np.log1p(x.astype(np.float64))
    found = jax.jit(noisy_weights_mosaic.log1p)(x)
    np.testing.assert_allclose(found, expected, rtol=4e-7)
    with pytest.raises(AssertionError):  # Negative control.
        np.testing.assert_allclose(np.log(1 + x), expected, rtol=4e-7)


def test_refusals(draw):
    """Fails if rows that are not whole loads are searched in part."""
    settings = plain.stacked(SETTINGS)
    how = {"positions": np.zeros(3, np.int32), "draws": np.ones(3, bool)}
    for width in (120, 1001):
        with pytest.raises(ValueError, match=f"rows of {width} logits: a multiple of"):
            draw(np.zeros((3, width), np.float32), settings, **how)


KERNELS = (
    *(("argmax_chunks", "argmax_rows") * 2),
    # Eight launches for the bits of a logit, five for an index, and the last.
    *(("sampling_top_k", "sampling_top_p") * 14),
    "sampling_noisy_weights",
)


@pytest.mark.slow
def test_drawing_is_a_few_launches(compiler):
    """Fails if a kernel of Triton is left, spills or is more, or XLA adds floats."""
    report = compiler.compile(models.drawing, 5, impl="mosaic")
    report.assert_fits()
    assert xla_fusions.called(report.hlo) == {xla_fusions.MOSAIC}
    assert sorted(xla_fusions.mosaic_kernels(report.hlo)) == sorted(KERNELS)
    assert sum(thunk.kind == "kConditional" for thunk in report.thunks) == 2
    assert all(thunk.in_graph for thunk in report.launches)
    assert len(report.launches) <= len(KERNELS) + 14
    assert not xla_fusions.float_work(report.hlo)
    for kernel in report.kernels:
        assert not any("ATOM" in line or "RED." in line for line in kernel.sass)
        assert kernel.count("LDL") == 0


@pytest.mark.slow
def test_a_row_alone_has_the_code_of_five(compiler):
    """Fails if what is compiled for a number of rows is made for that number."""
    report = compiler.compile(models.drawing, 5, impl="mosaic")
    single = compiler.compile(models.drawing, 1, impl="mosaic")
    codes = [
        {kernel.sass for kernel in each.kernels if "sampling" in kernel.name}
        for each in (report, single)
    ]
    assert codes[0] == codes[1] and len(codes[0]) == 3
