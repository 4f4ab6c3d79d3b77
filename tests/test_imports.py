"""Rules of imports: which part may import which, and how, checked in the source."""

import ast
import importlib.util
import pathlib

import pytest
from script_runs import run_python


ROOT = pathlib.Path(__file__).parents[1]

EVERYWHERE = {"typing", "pytree", "compilation", "regular_files"}
"""Modules that every part of the package may import."""

LAYERS = (
    EVERYWHERE,
    {"tree"},
    {"pallas", "native", "parallel"},
    {"ops"},
    {"paging"},
    {"model"},
    {"training"},
    {"rules", "gamma", "processors"},
    {"engine"},
    {"drafters"},
    {"algorithms"},
    {"testing"},
    {"analysis", "debug"},
    {"results"},
    {"language_model"},
    {"inputs", "loading"},
    {"default_gamma", "scoring"},
    {"run"},
    {"keywords"},
    {"generation"},
    {"lossless"},
)
"""Modules and folders of `spec_jax`, from the ground up: each may import itself, and
all that is in layers below its own."""

ABSTRACT = {"engine", "rules", "gamma", "processors", "tree"}
"""Parts that know targets and drafters by protocols alone: neither pages nor Qwen3."""

FEWER = {
    **{name: set() for name in ("native", "pallas", "parallel")},
    **{name: set() for name in ("rules", "gamma", "processors")},
    "analysis/metrics": {"analysis"},
    "drafters/ngram": {"drafters", "engine"},
    "drafters/suffix": {"drafters", "engine", "native"},
    "drafters/oracle": {"engine"},
    **{
        f"engine/{name}": ABSTRACT
        for name in "loop processing protocols target state verification round".split()
    },
}
"""Modules that may import only these parts from below them, besides `EVERYWHERE`."""

NAMES_FROM = {
    "typing",
    "jaxtyping",
    "beartype",
    "collections.abc",
    "spec_jax.typing",
    "spec_jax.language_model",
    "spec_jax.testing.bits",  # `spec_jax.testing.bits` is also a function
    "spec_jax.testing.compare",
}
"""Modules from which names, mostly of types, may be imported."""


def imports_of(path: pathlib.Path, package: str):
    """Yields every import of a file, even inside functions: `(line, module, names)`."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield node.lineno, dots + (node.module or ""), [a.name for a in node.names]


def is_module(root: pathlib.Path, name: str) -> bool:
    if name.split(".")[0] in ("spec_jax", "experiments"):
        path = root.joinpath(*name.split("."))
        return path.is_dir() or path.with_suffix(".py").exists()
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # The parent is a module, not a package.
        return False


def targets(module: str, names) -> set[str]:
    """Returns the parts of `spec_jax` that an import reaches, by their first names."""
    dotted = (
        [module] if module != "spec_jax" else [f"spec_jax.{name}" for name in names]
    )
    parts = [name.split(".") for name in dotted]
    return {part[1] for part in parts if part[0] == "spec_jax" and len(part) > 1}


def allowed(parts: tuple[str, ...]) -> set[str] | None:
    """Returns the parts that a module may import; None if no layer has the module."""
    heights = [n for n, layer in enumerate(LAYERS) if parts[0] in layer]
    if not heights:
        return None
    below = set().union(parts[:1], *LAYERS[: heights[0]])
    for name in (parts[0], "/".join(parts)):
        if name in FEWER:
            own = set(parts[:1]) if name == parts[0] else set()
            below = FEWER[name] | own | EVERYWHERE
    return below


def violations(root: pathlib.Path) -> list[str]:
    """Returns the imports below `root` that break the rules, one line each."""
    found = []
    for path in sorted((root / "spec_jax").rglob("*.py")):
        parts = path.relative_to(root / "spec_jax").with_suffix("").parts
        if parts == ("__init__",):
            continue
        where, below = path.relative_to(root), allowed(parts)
        if below is None:
            found.append(f"{where}: no layer has {parts[0]}")
            continue
        for line, module, names in imports_of(path, parts[0]):
            if module.split(".")[0] in ("experiments", "tests"):
                found.append(f"{where}:{line}: the package imports {module}")
            for target in sorted(targets(module, names) - below):
                found.append(f"{where}:{line}: {'/'.join(parts)} imports {target}")
    return found + style_violations(root)


def style_violations(root: pathlib.Path, folder: str = "spec_jax") -> list[str]:
    """Returns relative imports, and imports of names, not modules, one line each."""
    found = []
    for path in sorted(root.glob(f"{folder}/**/*.py")):
        where = path.relative_to(root)
        for line, module, names in imports_of(path, ""):
            if module.startswith("."):
                found.append(f"{where}:{line}: relative import")
                continue
            # A package lists its public names one by one.
            if module in NAMES_FROM or path.name == "__init__.py":
                continue
            for name in names:
                if not is_module(root, f"{module}.{name}"):
                    found.append(f"{where}:{line}: {module}.{name} is not a module")
    return found


def test_imports_follow_the_arrows():
    """Fails if a module reaches up, or a name is imported in place of its module."""
    assert violations(ROOT) == []


def test_scripts_import_modules():
    """Fails if a script imports a name, or a module that is not there."""
    assert style_violations(ROOT, "experiments") == []


def test_importing_the_package_is_cheap():
    """Fails if `import spec_jax` loads jax, which would delay a script's help, or if a
    package that lists its names loads them."""
    program = """if True:
        import sys, spec_jax
        lists = "load" in dir(spec_jax), "Goodput" in dir(spec_jax.gamma)
        packages = spec_jax.drafters, spec_jax.gamma, spec_jax.rules
        ours = sorted(name for name in sys.modules if name.startswith("spec_jax"))
        print("jax" in sys.modules, *lists, *ours)"""
    ran = run_python("-c", program)
    names = ["spec_jax", *(f"spec_jax.{x}" for x in ("drafters", "gamma", "rules"))]
    assert ran.stdout.split() == ["False", "True", "True", *names], ran.stderr


def test_what_packages_list_is_there():
    """Fails if a public name is found only after another part has imported it."""
    program = """if True:
        import types, spec_jax
        def walk(package):
            for name in package.__all__:
                found = getattr(package, name)
                print(package.__name__, name)
                if isinstance(found, types.ModuleType) and hasattr(found, "__all__"):
                    walk(found)
        walk(spec_jax)
        spec_jax.gamma.nothing"""
    ran = run_python("-c", program)
    said = ran.stdout.splitlines()
    for told in (
        "gamma goodput",
        "gamma RankGoodput",
        "drafters ngram",
        "testing TINY",
    ):
        assert f"spec_jax.{told}" in said, ran.stderr
    assert ran.stderr.splitlines()[-1] == (
        "AttributeError: module 'spec_jax.gamma' has no attribute 'nothing'"
    )


PLANTED = {
    "a layer below knows one above": ("ops/bad.py",
        "from spec_jax.paging import cache"),
    "rules know the engine": ("rules/bad.py", "from spec_jax.engine import round"),
    "rounds know pages": ("engine/round.py", "from spec_jax.paging import cache"),
    "rounds know models": ("engine/round.py", "import spec_jax.model.qwen3"),
    "lookup knows models": ("drafters/ngram.py", "from spec_jax.model import qwen3"),
    "metrics know rules": ("analysis/metrics.py",
        "from spec_jax.rules import acceptance"),
    "an import inside a function": ("ops/bad.py",
        "def f():\n    from spec_jax import loading\n    return loading"),
    "experiments": ("loading.py", "from experiments import records"),
    "tests": ("loading.py", "import tests"),
    "a module without a layer": ("helpers.py", "import jax"),
    "a relative import": ("ops/bad.py", "from . import rope"),
    "a function by name": ("ops/bad.py", "from spec_jax.ops.rope import rope"),
    "a library's function by name": ("ops/bad.py", "from jax.numpy import einsum"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_imports_are_reported(tmp_path, fault):
    """Negative control: each bad import is reported, at its file, and nothing else."""
    name, source = PLANTED[fault]
    package = tmp_path / "spec_jax"
    for real in (ROOT / "spec_jax").rglob("*.py"):
        path = package / real.relative_to(ROOT / "spec_jax")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import jax\n")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/records.py").write_text("import json\n")
    assert violations(tmp_path) == []
    (package / name).write_text(source + "\n")
    found = violations(tmp_path)
    assert len(found) == 1 and found[0].startswith(f"spec_jax/{name}:"), found
