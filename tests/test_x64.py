"""With `JAX_ENABLE_X64` the library runs, and writes what it writes without."""

import json
import pathlib

import decoding
import pytest
import x64_texts
from decoding import SMALL
from script_runs import run_python


HERE = pathlib.Path(__file__).parent


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
        expected = decoding.text(decoding.decoded(SMALL, x64_texts.ask(name)))
        assert texts == [expected] * 3, name
