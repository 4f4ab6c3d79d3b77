"""With `JAX_ENABLE_X64` the library runs, and writes what it writes without."""

import json
import os
import pathlib
import subprocess
import sys

import decoding
import pytest
import x64_texts


HERE = pathlib.Path(__file__).parent


@pytest.mark.slow
def test_wide_defaults_change_nothing():
    """Fails if a counter, an index or a sum takes its dtype from JAX's defaults.

    Decoding and rounds of two slots, greedy and drawn, against decoding without it.
    """
    ran = subprocess.run(
        [sys.executable, str(HERE / "x64_texts.py")],
        env=os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.pop("x64") is True
    assert set(found) == set(x64_texts.KINDS)
    for name, texts in found.items():
        expected = decoding.text(decoding.decoded(decoding.SMALL, x64_texts.ask(name)))
        assert texts == [expected] * 3, name
