"""With `JAX_ENABLE_X64` the library runs, and writes what it writes without."""

import json
import os
import pathlib
import subprocess
import sys

import x64_texts

from spec_jax.rules import sampling


HERE = pathlib.Path(__file__).parent


def test_wide_defaults_change_nothing():
    """Fails if a counter, an index or a sum takes its dtype from JAX's defaults.

    Plain decoding, rounds and a batch, greedy and drawn, all against plain decoding
    without it.
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
    assert set(found) == set(x64_texts.SETTINGS)
    for name, texts in found.items():
        settings = sampling.make_settings(**x64_texts.SETTINGS[name])
        assert texts == [x64_texts.plain(settings)] * 4, name
