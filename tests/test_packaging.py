"""Declarations about the package agree with its source."""

import ast
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable

import test_imports

import spec_jax


ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Distributions whose modules have another name, by module."""


def declared(*extras: str) -> set[str]:
    """Returns the distributions that an installation with these extras requires."""
    found = set(PROJECT["dependencies"])
    for extra in extras:
        found |= set(PROJECT["optional-dependencies"][extra])
    return {re.match(r"[\w-]+", requirement)[0] for requirement in found}


def imported(path: pathlib.Path, *skipped: type[ast.AST]) -> set[str]:
    """Returns full names of the modules that a source imports, outside of `try`."""
    found = set()
    for _, module, names in test_imports.imports_of(path, ast.Try, *skipped):
        found |= {f"{module}.{name}" for name in names} or {module}
    return found


def others(names: Iterable[str]) -> set[str]:
    """Returns the distributions of the third parties among modules."""
    tops = {name.split(".")[0] for name in names}
    tops -= sys.stdlib_module_names | {"spec_jax", "jaxlib"}  # jaxlib comes with jax.
    return {DISTRIBUTIONS.get(name, name) for name in tops}


def third_parties(root: pathlib.Path, *, without: str = "") -> set[str]:
    """Returns the third parties that sources below `root` import."""
    found = set()
    for path in root.rglob("*.py"):
        if without not in path.relative_to(root).parts:
            found |= imported(path)
    return others(found)


def needed_to_start(script: pathlib.Path) -> set[str]:
    """Returns third parties that a script imports at once, also through our others."""
    found, seen, waiting = set(), set(), [script]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported(path, ast.FunctionDef):
            parts = name.split(".")
            if parts[0] == "experiments" or parts[:2] == ["spec_jax", "training"]:
                file = ROOT.joinpath(*parts).with_suffix(".py")
                waiting += [file] if file.exists() else []
            else:
                found.add(name)
    return others(found)


def test_the_library_depends_on_what_it_imports_and_on_nothing_else():
    """Fails if a dependency is missing, or is only needed by scripts or tests."""
    assert third_parties(ROOT / "spec_jax", without="training") == declared()


def test_training_depends_on_its_extra():
    """Fails if the extra lacks a dependency; other parts of it are for the scripts."""
    found = third_parties(ROOT / "spec_jax/training")
    assert declared("train") - declared("experiments") < found <= declared("train")


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


def test_the_version_is_the_same_everywhere():
    """Fails if a release was named in one file and forgotten in another."""
    version = re.escape(spec_jax.__version__)
    for name, line in (
        ("CITATION.cff", rf"^version: {version}$"),
        ("CHANGELOG.md", rf"\A# Changelog\n[^#]*^## {version}\b"),
    ):
        assert re.search(line, (ROOT / name).read_text(), re.MULTILINE), name
