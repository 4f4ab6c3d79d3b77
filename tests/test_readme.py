"""What the README shows is run, as it stands there."""

import pathlib
import re

import pytest


README = pathlib.Path(__file__).parents[1] / "README.md"
HEADING = "## A drafter in one file"


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


def test_the_drafter_of_the_readme_keeps_the_contract():
    """Fails if the text in the README is no drafter, or none in under 50 lines."""
    drafter, check = python_blocks(README.read_text(), HEADING)
    assert len(drafter.splitlines()) < 50
    assert "testing.check_drafter(" in check
    assert "Bigram" in run_blocks([drafter, check])


FAULTS = {
    "reads past the end": ("at < length - 1, at", "at < length + 3, at"),
    "number drafted": ("jnp.minimum(gamma, num_known)", "num_known"),
}


@pytest.mark.parametrize("clause", FAULTS)
def test_a_fault_in_the_readme_is_caught(clause):
    """Negative control: the kit runs the text, and not another drafter."""
    drafter, check = python_blocks(README.read_text(), HEADING)
    old, new = FAULTS[clause]
    assert drafter.count(old) == 1
    with pytest.raises(AssertionError, match=clause):
        run_blocks([drafter.replace(old, new), check])


def test_a_section_that_is_not_there():
    with pytest.raises(LookupError, match="0 sections are headed '## Nothing'"):
        python_blocks("# A\n\n## B\n", "## Nothing")
