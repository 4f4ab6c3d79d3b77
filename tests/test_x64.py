"""With `JAX_ENABLE_X64` the library runs, and writes what it writes without."""

import json
import pathlib

import decoding
import jax
import pytest
import x64_texts
from script_runs import run_python

from spec_jax.drafters import ngram


HERE = pathlib.Path(__file__).parent


def test_rounds_are_traced_with_wide_defaults():
    """Fails if a write of the rounds of two slots is wider than what it writes to.

    Only traced, which takes a second; the test below runs the loops, and other ones.
    """
    found = ngram.PromptLookup(gamma_max=decoding.GAMMA_MAX)
    # Promotion as users have it: there are sums of both widths, whose dtype is said.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert jax.numpy.asarray(0).dtype == "int64"
        scheduler = decoding.SMALL.scheduler(found, num_slots=2)
        x64_texts.trace(scheduler, draws=False)


@pytest.mark.slow
def test_wide_defaults_change_nothing():
    """Fails if a counter, an index or a sum takes its dtype from JAX's defaults.

    Decoding and rounds of two slots, greedy and drawn, against decoding without it.
    """
    ran = run_python(HERE / "x64_texts.py", JAX_ENABLE_X64="1")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.pop("x64") is True
    assert set(found) == set(x64_texts.KINDS)
    for name, texts in found.items():
        expected = decoding.text(decoding.decoded(decoding.SMALL, x64_texts.ask(name)))
        assert texts == [expected] * 3, name
