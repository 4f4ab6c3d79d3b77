"""The Python of the README, read from its text: shared by tests.

`python tests/readme_blocks.py` runs the first block and writes what it prints below it.
"""

import os
import pathlib
import re
import subprocess
import sys
from typing import Any


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


if __name__ == "__main__":
    page = README.read_text()
    output = printed_output(page)
    README.write_text(_OUTPUT.sub(lambda found: found["before"] + output, page))
