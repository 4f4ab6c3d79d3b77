"""With `JAX_ENABLE_X64` the library runs, and writes what it writes without."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import x64_texts


HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def texts():
    return x64_texts.texts()


@pytest.mark.parametrize("name", x64_texts.SETTINGS)
def test_every_way_writes_the_same_text(texts, name):
    """The texts that the next test compares with are those of plain decoding."""
    expected = texts[f"plain {name}"]
    for way in ("Goodput", "Threshold", "decoded"):
        assert texts[f"{way} {name}"] == expected, way
    assert texts[f"batch {name}"] == [expected] * 3
    if name == "greedy":
        assert texts["rejection greedy"] == texts["block greedy"] == expected


def test_wide_defaults_change_nothing(texts):
    """Fails if a counter, an index or a sum takes its dtype from JAX's defaults."""
    ran = subprocess.run(
        [sys.executable, str(HERE / "x64_texts.py")],
        env=os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"x64": True, **texts}
