"""The Python of the README, read from its text: shared by tests."""

import pathlib
import re
from typing import Any


README = pathlib.Path(__file__).parents[1] / "README.md"
HEADING = "## A drafter in one file"


FIRST = "# spec_jax"
"""The heading of what stands first."""


def python_blocks(text: str, heading: str) -> list[str]:
    """The Python blocks of one section.

    Raises:
      LookupError: there is no such section.
    """
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    found = [section for section in sections if section.startswith(f"{heading}\n")]
    if len(found) != 1:
        raise LookupError(f"{len(found)} sections are headed {heading!r}, not one")
    return re.findall(r"^```python\n(.*?)^```$", found[0], re.DOTALL | re.MULTILINE)


def run_blocks(blocks: list[str]) -> dict:
    """Runs the blocks one after the other, in one namespace."""
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    return names


def bigram(**sizes: int) -> Any:
    """The README's drafter."""
    drafter, _ = python_blocks(README.read_text(), HEADING)
    return run_blocks([drafter])["Bigram"](**sizes)
