"""Runs of the code that the README shows, as it stands there.

`python tests/test_readme.py` runs the first block and writes what it prints below it.
"""

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from spec_jax import loading
from spec_jax.native import build
from spec_jax.testing import bench


README = pathlib.Path(__file__).parents[1] / "README.md"
HEADING = "## A drafter in one file"


def python_blocks(text: str, heading: str) -> list[str]:
    """Returns the Python blocks of the one section with this heading."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    (found,) = (part for part in sections if part.startswith(f"{heading}\n"))
    return re.findall(r"^```python\n(.*?)^```$", found, re.DOTALL | re.MULTILINE)


def run_blocks(blocks: list[str]) -> dict:
    """Runs the blocks one after the other, in one namespace."""
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    return names


def bigram(**sizes: int) -> Any:
    """Returns the README's drafter."""
    drafter, _ = python_blocks(README.read_text(), HEADING)
    return run_blocks([drafter])["Bigram"](**sizes)


_OUTPUT = re.compile(
    r"(?P<before>^`SPEC_JAX_ISA=(?P<isa>\w+)`[^`]*^```text\n)(?P<output>.*?)(?=^```$)",
    re.DOTALL | re.MULTILINE,
)


def shown_output(text: str) -> tuple[str, str]:
    """Returns the instruction set that the README names, and its only output."""
    (found,) = _OUTPUT.finditer(text)
    return found["isa"], found["output"]


def printed_output(text: str) -> str:
    """Returns what the first block prints, run with the README's instruction set."""
    (block, *_), (isa, _) = python_blocks(text, "# spec_jax"), shown_output(text)
    ran = subprocess.run(
        [sys.executable, "-c", block],
        capture_output=True,
        text=True,
        check=True,
        cwd=README.parent,
        env=os.environ | {"PYTHONPATH": str(README.parent), "SPEC_JAX_ISA": isa},
    )
    return "".join(f"{line.rstrip()}\n" for line in ran.stdout.splitlines())


def test_the_first_lines_of_the_readme_print_what_it_shows():
    """Fails if they print another text; `python tests/test_readme.py` writes it."""
    text = README.read_text()
    isa, shown = shown_output(text)
    if isa not in build.available_isas():
        pytest.skip(f"this processor lacks the instruction set {isa}")
    assert printed_output(text) == shown
    assert shown.count("  equal") == 3 * 4 and "differ" not in shown


def test_the_drafter_of_the_readme_goes_through_the_front_door():
    """Fails if it breaks the contract, `load` changes it, or it is no longer short."""
    blocks = python_blocks(README.read_text(), HEADING)
    made = run_blocks(blocks)["Bigram"]
    assert len(blocks[0].splitlines()) < 50 and "testing.check_drafter(" in blocks[1]
    vocab_size = loading.load(drafter="ngram").target.config.vocab_size
    drafter = made(gamma_max=4, vocab_size=vocab_size)
    assert loading.load(drafter=drafter).drafter is drafter
    with pytest.raises(ValueError, match="different vocabularies: 96 and"):
        loading.load(drafter=made(gamma_max=4, vocab_size=bench.TINY.vocab_size))


@pytest.mark.parametrize(
    ("clause", "old", "new"),
    [
        ("reads past the end", "at < length - 1, at", "at < length + 3, at"),
        ("number drafted", "jnp.minimum(gamma, num_known)", "num_known"),
    ],
)
def test_a_fault_in_the_readme_is_caught(clause, old, new):
    """Negative control: a fault in the text is caught, so the kit runs that text."""
    drafter, check = python_blocks(README.read_text(), HEADING)
    assert drafter.count(old) == 1
    with pytest.raises(AssertionError, match=clause):
        run_blocks([drafter.replace(old, new), check])


if __name__ == "__main__":
    page = README.read_text()
    output = printed_output(page)
    README.write_text(_OUTPUT.sub(lambda found: found["before"] + output, page))
