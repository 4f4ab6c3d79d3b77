"""The pages in `docs/` and docstrings: what they show, name and link to."""

import ast
import doctest
import importlib
import inspect
import itertools
import pathlib
import re

import pytest
from slow_cases import slow

import spec_jax as sj


ROOT = pathlib.Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
RIDDLE = re.compile(
    r'(?:#:? *|// *|"""|\.\s+)(?:Of|What|Who|Whoever|Those|Also) [a-z]|"""Which '
    r"|\b(?:those that|whoever|for want of|goes on in|says nothing of|is none\b)"
)
"""Beginnings of sentences, and words, that leave the subject out."""
NOUNS = set(
    "As Bytes Characters Cosines Curves Distances Elements Entries Exactness Features "
    "Halves Heads Ids Indices Integers Its Keys Layers Logarithms Logits Loss Minus "
    "Nodes Pages Pairs Positions Rows Seconds Sequences Settings Siblings Terms This "
    "Tokens".split()
)
"""Beginnings in "s" that are no verbs."""
NOT_ALONE = {"CLAUSES", "TINY", "__version__"}
"""Public names that no page of the reference describes."""
FILE = re.compile(r"(?:docs|experiments|spec_jax|tests|\.ci)/[\w./*-]*\.(?:\w+)")


def missing(text: str) -> list[str]:
    """The files of the repository that a page names and that are not there."""
    named = {name.rstrip(".") for name in FILE.findall(text)}
    return sorted(name for name in named if not any(ROOT.glob(name)))


def test_the_files_that_a_page_names_exist():
    """Fails if a script or a test was renamed and a page was not."""
    assert missing("".join(PAGES.values())) == []
    # Negative control.
    text = "`experiments/spec_round.py`, `tests/test_m*.py`, `experiments/gone.py`."
    assert missing(text) == ["experiments/gone.py"]


def test_every_page_and_figure_is_shown():
    """Fails if a page, a notebook or a figure is made and cannot be found."""
    toctree = re.compile(r"^```{toctree}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    listed = "".join(toctree.findall(PAGES["index.md"]))
    there = {path.stem for path in ROOT.glob("docs/*.md")} - {"index"}
    there |= {f"notebooks/{path.stem}" for path in ROOT.glob("docs/notebooks/*.ipynb")}
    assert {*re.findall(r"^[a-z].*$", listed, re.MULTILINE)} == {
        *there,
        "reference/index",
    }
    shown = set(re.findall(r"figures/(\w+\.svg)\)", "".join(PAGES.values())))
    figures = ROOT.glob("experiments/results/figures/*.svg")
    assert shown == {path.name for path in figures}


def test_the_reference_lists_every_public_name():
    """Fails if a name is exported and on no page; modules are not names."""
    pages = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    entries = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)$", pages, re.MULTILINE)
    listed = {name.rpartition(".")[2] for name in entries}
    for package in (sj, sj.drafters, sj.gamma, sj.processors, sj.rules, sj.testing):
        public = {name for name in package.__all__ if name not in NOT_ALONE}
        modules = {n for n in public if inspect.ismodule(getattr(package, n))}
        assert sorted(public - modules - listed) == []


def riddles(text: str) -> list[str]:
    """Returns the words of a source file that make its English a riddle."""
    return [found[0].strip() for found in RIDDLE.finditer(text)]


def riddles_of_page(text: str) -> list[str]:
    """Returns those of a page, whose headings may leave the subject out."""
    return riddles(re.sub("^#+ .*$", "", text, flags=re.MULTILINE))


def without_verb(text: str) -> list[str]:
    """Returns functions whose docstring does not begin as "Returns" does. Properties
    are named by nouns, as attributes are; "Negative control" is a noun, too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        kinds = " ".join(map(ast.unparse, node.decorator_list))
        docstring = ast.get_docstring(node)
        is_named = re.search("property|optional", kinds)
        if is_named or docstring.startswith("Negative control"):
            continue
        word = docstring.split()[0].rstrip(",;:.")
        if not re.fullmatch("[A-Z][a-z]*s", word) or word in NOUNS:
            found.append(f"{node.name}: {word}")
    return found


@pytest.mark.parametrize(
    "look, files",
    [
        *itertools.product(
            (riddles, without_verb),
            ("spec_jax/**/*.py", "experiments/**/*.py", "tests/**/*.py"),
        ),
        (riddles, "spec_jax/native/*.[hc]*"),
        (riddles_of_page, "docs/*.md"),
        (riddles_of_page, "*.md"),
    ],
)
def test_docstrings_and_comments_say_who_does_what(look, files):
    """Fails if one begins with "Of" or "The", or leaves its subject out."""
    # This file holds planted riddles.
    paths = set(ROOT.glob(files)) - {pathlib.Path(__file__).resolve()}
    found = {str(path.relative_to(ROOT)): look(path.read_text()) for path in paths}
    assert found
    assert {path: words for path, words in found.items() if words} == {}


def test_riddles_and_missing_verbs_are_seen():
    """Negative control."""
    first = "# Of equal ones the first."
    for line in (first, "// What is kept.", "x = 1  # Those are.", "# It is none."):
        assert riddles(line)
    assert not riddles("# The first of equal ones is kept.")
    assert riddles_of_page("# What pays\n\nDraft. Of these one pays.") == [". Of t"]
    text = """
def noun(): "The sum."
def plural(): "Rows of a slab."
def verb(): "Returns the sum."
@property
def name(self): "The name."
"""
    assert without_verb(text) == ["noun: The", "plural: Rows"]


@pytest.mark.parametrize(
    "module", [*map(slow, ("algorithms", "generation")), "loading", "lossless"]
)
def test_examples_of_the_docstrings_run(module):
    """As they stand there, on the embedded pair."""
    module = importlib.import_module(f"spec_jax.{module}")
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert tests
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        assert runner.run(test).failed == 0, test.name
