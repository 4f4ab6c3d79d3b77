"""The package: its declarations agree with its source; its wheel is built, installed in
an environment of its own, and imported from there.

The environment borrows third parties from the one that runs the tests, and nothing from
the checkout; what it requires is compared with the imports.
"""

import ast
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable

import pytest
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


MAX_IMPORT, MAX_ALL = 2.0, 40.0
"""Limits of importing the package, and of all up to a first text, in units of jax's own
import: seconds, even of the processor, depend on the machine and its load."""

BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"

USE = """
import json, pathlib, time
started = time.process_time()
import jax.numpy
of_jax = time.process_time() - started
import spec_jax as sj
names = [getattr(sj, name) for name in sj.__all__]  # imported when asked for
imported = time.process_time() - started - of_jax
lm = sj.load()
out = sj.generate(lm, "import os", max_tokens=16, gamma=4)
print(json.dumps({
    "package": str(pathlib.Path(sj.__file__).parent),
    "version": sj.__version__,
    "import": imported / of_jax,
    "all": (time.process_time() - started) / of_jax,
    "text": out.text,
    "rounds": out.metrics["rounds"],
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """Builds a wheel of the checkout as it is, outside of it; returns its path."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
    for name in ("spec_jax", "experiments", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    built = run([sys.executable, "-c", BUILD], cwd=source)
    assert built.returncode == 0, built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> pathlib.Path:
    """Returns the interpreter of a new environment that has the wheel installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = sysconfig.get_paths()["purelib"]
    # `site` reads no .pth files in folders that a .pth file adds: the editable install
    # of the checkout is not borrowed.
    (packages / "borrowed.pth").write_text(others + "\n")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--no-index", "--target", str(packages), str(wheel)]
    installed = run(install, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return folder / "bin" / "python"


def run(command: list[str], *, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs a command without `PYTHONPATH`, so that it does not find the checkout."""
    known = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=known, capture_output=True, text=True)


def test_the_wheel_has_the_package_and_its_assets_alone(wheel):
    """Fails if a module, a kernel's source or an asset is missing, or one too many."""
    names = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in names if ".dist-info/" in name}
    files = (path for path in (ROOT / "spec_jax").rglob("*") if path.is_file())
    own = {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc"}
    assert names - described == own
    assert {"spec_jax/py.typed", "spec_jax/native/kernels.cc"} <= names
    for name in ("LICENSE", "NOTICE", "spec_jax/assets/LICENSE-PSF.txt"):
        assert any(other.endswith(f"/licenses/{name}") for other in described)


def test_the_installed_package_works_outside_the_checkout(python, tmp_path):
    """Fails if something is read from the checkout, or imported before it is needed."""
    used = run([str(python), "-c", USE], cwd=tmp_path)
    assert used.returncode == 0, used.stderr
    facts = json.loads(used.stdout)
    assert pathlib.Path(facts["package"]).is_relative_to(python.parents[1])
    assert facts["version"] == spec_jax.__version__ and facts["text"]
    assert facts["rounds"] < 16
    assert facts["import"] < MAX_IMPORT and facts["all"] < MAX_ALL
    # Negative control: the scripts are not installed.
    absent = run([str(python), "-c", "import experiments"], cwd=tmp_path)
    assert "No module named 'experiments'" in absent.stderr
