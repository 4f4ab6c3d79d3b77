"""Rows of `constrained.py` on the embedded pair, and a fault that it finds."""

import jax.numpy as jnp
import pytest

import spec_jax as sj
from experiments import constrained
from experiments.lib import published
from spec_jax.engine import processing


pytest.importorskip("outlines_core")

ARGS = constrained.parse_args(["--gamma", "4", "--batch", "4"])


@pytest.fixture(scope="module")
def lm():
    return sj.load(gamma_max=4)


def compared(lm, name, shape, temperature, **more):
    settings = constrained.shapes(ARGS)[shape] | more
    return constrained.compare(
        lm,
        [f"def f{number}(x):" for number in range(settings["num_slots"])],
        temperature=temperature,
        max_tokens=12,
        ignore_eos=True,
        processors=constrained.processors(lm)[name],
        **settings,
    )


def test_rounds_are_decoding(lm):
    """Fails if draws differ; for other shapes see `engine/test_processing.py`."""
    row = compared(lm, "penalties", "chain", 0.7)
    assert published.is_equal(row) and row["tokens_compared"] == 12 * row["prompts"]


@pytest.mark.slow
def test_a_difference_is_told(lm, monkeypatch):
    """Negative control: tokens change no state; a new page size compiles it."""
    monkeypatch.setattr(processing, "commit", lambda processing, *_: processing)
    assert not published.is_equal(
        compared(lm, "JSON schema", "chain", 0.7, page_size=9)
    )


@pytest.mark.slow
def test_what_is_timed_changes_nothing(lm):
    """Fails if the mask or the penalties that are timed change the text."""
    plain = sj.decode(lm, "import os", max_tokens=8, ignore_eos=True)
    made = constrained.timed(lm)
    assert (jnp.asarray(made["mask"].next) >= 0).all()
    for name in ("mask", "penalties"):
        found = sj.generate(
            lm, "import os", processors=made[name], max_tokens=8, ignore_eos=True
        )
        assert found.tokens == plain.tokens
