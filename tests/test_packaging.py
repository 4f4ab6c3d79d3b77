"""Declarations about the package agree with its source."""

import ast
import pathlib
import re
import sys
import tomllib

import pytest

import spec_jax


ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAINING = ROOT / "spec_jax/training"
WITH_JAX = {"jaxlib"}
"""Modules that come with jax, in the version that jax needs."""
DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Distributions whose modules have another name, by module."""


def declared(*extras: str) -> set[str]:
    """Returns the distributions that an installation with these extras requires."""
    found = set(PROJECT["dependencies"])
    for extra in extras:
        found |= set(PROJECT["optional-dependencies"][extra])
    return {re.match(r"[\w-]+", requirement)[0] for requirement in found}


def imported(tree: ast.AST) -> set[str]:
    """Returns full names of the modules that a source imports, outside of `try`."""
    tried = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node in tried:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def third_parties(root: pathlib.Path, *, without: str = "") -> set[str]:
    """Returns top-level names of the third parties that sources below `root` import."""
    found = set()
    for path in root.rglob("*.py"):
        if not without or without not in path.relative_to(root).parts:
            names = imported(ast.parse(path.read_text()))
            found |= {name.split(".")[0] for name in names}
    return found - sys.stdlib_module_names - {"spec_jax"} - WITH_JAX


def needed_to_start(script: pathlib.Path) -> set[str]:
    """Returns third parties that a script imports, also through scripts and training.

    Imports inside functions do not count: they run when the functions are called.
    """
    found, seen, waiting = set(), set(), [script]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        tree = ast.parse(path.read_text())
        tree.body = [
            node for node in tree.body if not isinstance(node, ast.FunctionDef)
        ]
        for name in imported(tree):
            parts = name.split(".")
            if parts[0] == "experiments" or parts[:2] == ["spec_jax", "training"]:
                file = ROOT.joinpath(*parts).with_suffix(".py")
                waiting += [file] if file.exists() else []
            else:
                found.add(DISTRIBUTIONS.get(parts[0], parts[0]))
    return found - sys.stdlib_module_names - {"spec_jax"} - WITH_JAX


def test_the_library_depends_on_what_it_imports_and_on_nothing_else():
    """Fails if a dependency is missing, or is only needed by scripts or tests."""
    assert third_parties(ROOT / "spec_jax", without="training") == declared()


def test_training_depends_on_its_extra():
    """Fails if the extra lacks a dependency, or the library imports the folder.

    Other parts of the extra are for the scripts that train, and for all scripts.
    """
    found = {DISTRIBUTIONS.get(name, name) for name in third_parties(TRAINING)}
    assert declared("train") - declared("experiments") < found <= declared("train")
    for path in (ROOT / "spec_jax").rglob("*.py"):
        if TRAINING not in path.parents:
            names = imported(ast.parse(path.read_text()))
            assert not any(name.startswith("spec_jax.training") for name in names)


def test_an_undeclared_import_is_seen(tmp_path):
    """Negative control: an import in a function counts, one within `try` does not."""
    (tmp_path / "a.py").write_text(
        "import json\ndef f():\n    import rich.table\n"
        "try:\n    import beartype\nexcept ImportError:\n    pass\n"
    )
    assert third_parties(tmp_path) == {"rich"}


def test_the_main_script_needs_the_extra_experiments_alone():
    """Fails if the README's first command needs what its `pip install` lacks."""
    needed = needed_to_start(ROOT / "experiments/spec_round.py")
    assert {"rich", "jax"} <= needed <= declared("experiments")
    # Negative control: the trainer needs more than that.
    needed = needed_to_start(ROOT / "experiments/train_drafter.py")
    assert not needed <= declared("experiments")
    assert needed <= declared("train")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("CITATION.cff", r"^version: {version}$"),
        ("CHANGELOG.md", r"\A# Changelog\n[^#]*^## {version}\b"),
    ],
)
def test_the_version_is_the_same_everywhere(name, line):
    """Fails if a release was named in one file and forgotten in another."""
    version = spec_jax.__version__
    text = (ROOT / name).read_text()
    assert re.search(line.format(version=re.escape(version)), text, re.MULTILINE)
    # Negative control: the next version is not there yet.
    assert not re.search(line.format(version="99"), text, re.MULTILINE)
