"""The pages in `docs/`: what they show, what they name, and what links to them."""

import inspect
import pathlib
import re

import pytest

import spec_jax as sj


ROOT = pathlib.Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
RIDDLE = re.compile(
    r'^\s*(?:#|""") ?(?:Of|What|Who|Whoever|Those|Also) '
    r"|\b(?:or is none|whoever|for want of|goes on in|says nothing of|is none\b)",
    re.MULTILINE,
)
"""Beginnings of docstrings and comments, and words, that leave the subject out."""
NOT_ALONE = {"CLAUSES", "TINY", "__version__"}
"""Public names that no page of the reference describes."""
FILE = re.compile(r"(?:docs|experiments|spec_jax|tests|\.ci)/[\w./*-]*\.(?:\w+)")


def missing(text: str) -> list[str]:
    """The files of the repository that a page names and that are not there."""
    named = {name.rstrip(".") for name in FILE.findall(text)}
    return sorted(name for name in named if not any(ROOT.glob(name)))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page):
    """Fails if a script or a test was renamed and a page was not."""
    assert missing(PAGES[page]) == []


def test_a_file_that_does_not_exist_is_seen():
    """Negative control."""
    text = "`experiments/spec_round.py`, `tests/test_m*.py`, `experiments/gone.py`."
    assert missing(text) == ["experiments/gone.py"]


def test_every_figure_is_on_a_page():
    """Fails if a figure is drawn and shown nowhere."""
    shown = set(re.findall(r"figures/(\w+\.svg)\)", "".join(PAGES.values())))
    figures = ROOT.glob("experiments/results/figures/*.svg")
    assert shown == {path.name for path in figures}


def includes(text: str) -> set[str]:
    """Returns what a page's tables of contents list."""
    listed = re.findall(r"^```{toctree}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return {line for part in listed for line in part.split("\n") if line[:1].isalpha()}


def test_every_page_is_linked_from_the_index_of_the_site():
    """Fails if a page or a notebook is written and cannot be found."""
    there = {path.stem for path in ROOT.glob("docs/*.md")} - {"index"}
    there |= {f"notebooks/{path.stem}" for path in ROOT.glob("docs/notebooks/*.ipynb")}
    assert includes(PAGES["index.md"]) == there | {"reference/index"}


def test_the_reference_lists_every_public_name():
    """Fails if a name is exported and on no page; modules are not names."""
    pages = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    entries = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)$", pages, re.MULTILINE)
    listed = {name.rpartition(".")[2] for name in entries}
    for package in (sj, sj.drafters, sj.gamma, sj.rules, sj.testing):
        public = {name for name in package.__all__ if name not in NOT_ALONE}
        modules = {n for n in public if inspect.ismodule(getattr(package, n))}
        assert sorted(public - modules - listed) == []


def test_docstrings_and_comments_begin_with_what_they_are_about():
    """Fails if one begins with "Of" or "What", or leaves its subject out."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in sorted(ROOT.glob("spec_jax/**/*.py"))
        for match in RIDDLE.finditer(path.read_text())
    ]
    assert not found
    assert RIDDLE.search("    # Of equal ones the first.")  # Negative controls.
    assert RIDDLE.search('    """Whether it is one; a literal is none."""')
