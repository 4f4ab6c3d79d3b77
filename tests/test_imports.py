"""Rules of imports: which part may import which, and how, checked in the source."""

import ast
import importlib.util
import pathlib

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
    {"training"},
)
"""Modules and folders of `spec_jax`, from the ground up: each may import itself, and
all that is in layers below its own."""

ABSTRACT = {"engine", "rules", "gamma", "processors", "tree"}
"""Parts that know targets and drafters by protocols alone: neither pages nor Qwen3."""

FEWER = {
    **{name: set() for name in ("native", "pallas", "parallel")},
    **{name: set() for name in ("rules", "gamma", "processors")},
    "training": {"ops", "model"},
    "analysis/metrics": {"analysis"},
    "drafters/ngram": {"drafters", "engine"},
    "drafters/suffix": {"drafters", "engine", "native"},
    "drafters/oracle": {"engine"},
    **{
        f"engine/{name}": ABSTRACT
        for name in "processing protocols target state verification round".split()
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


def imports_of(path: pathlib.Path, *skipped: type[ast.AST]):
    """Yields imports of a file, even inside functions: `(line, module, names)`.

    Args:
      skipped: nodes within which imports do not count.
    """
    waiting: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield node.lineno, dots + (node.module or ""), [a.name for a in node.names]
        elif not isinstance(node, skipped):
            waiting += ast.iter_child_nodes(node)


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
    whole = [module] if module != "spec_jax" else [f"{module}.{name}" for name in names]
    parts = [name.split(".") for name in whole]
    return {part[1] for part in parts if part[0] == "spec_jax" and len(part) > 1}


def allowed(parts: tuple[str, ...]) -> set[str]:
    """Returns the parts that a module may import; none if no layer has the module."""
    name, path = parts[0], "/".join(parts)
    if path in FEWER:
        return FEWER[path] | EVERYWHERE
    if name in FEWER:
        return FEWER[name] | {name} | EVERYWHERE
    for height, layer in enumerate(LAYERS):
        if name in layer:
            return {name}.union(*LAYERS[:height])
    return set()


def violations(root: pathlib.Path) -> list[str]:
    """Returns the imports below `root` that break the rules, one line each."""
    found = []
    for path in sorted((root / "spec_jax").rglob("*.py")):
        parts = path.relative_to(root / "spec_jax").with_suffix("").parts
        if parts == ("__init__",):
            continue
        where, below = path.relative_to(root), allowed(parts)
        if not below:
            found.append(f"{where}:0: no layer has {parts[0]}")
        for line, module, names in imports_of(path):
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
        for line, module, names in imports_of(path):
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
    """Fails if `import spec_jax` loads jax, or a list of names loads what it names."""
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
    names = "gamma goodput, gamma RankGoodput, drafters ngram, testing TINY".split(", ")
    assert {f"spec_jax.{name}" for name in names} <= {*ran.stdout.splitlines()}
    told = "AttributeError: module 'spec_jax.gamma' has no attribute 'nothing'"
    assert ran.stderr.splitlines()[-1] == told


PLANTED = (
    ("ops/rope.py", "from spec_jax.paging import cache"),  # It is in a layer above.
    ("rules/sampling.py", "from spec_jax.engine import round"),
    ("engine/round.py", "from spec_jax.paging import cache"),
    ("engine/target.py", "import spec_jax.model.qwen3"),
    ("drafters/ngram.py", "from spec_jax.model import qwen3"),
    ("analysis/metrics.py", "from spec_jax.rules import acceptance"),
    (
        "model/qwen3.py",
        "def f():\n    from spec_jax import loading\n    return loading",
    ),
    ("drafters/each.py", "import spec_jax.training.loop"),
    ("loading.py", "from experiments import records"),
    ("generation.py", "import tests"),
    ("helpers.py", "import jax"),  # No layer has it.
    ("ops/argmax.py", "from . import rope"),
    ("ops/rms_norm.py", "from spec_jax.ops.rope import rope"),  # a function by name
    ("ops/projection.py", "from jax.numpy import einsum"),
)


def test_planted_imports_are_reported(tmp_path):
    """Negative control: each bad import is reported, at its file, and nothing else."""
    package = tmp_path / "spec_jax"
    for real in (ROOT / "spec_jax").rglob("*.py"):
        path = package / real.relative_to(ROOT / "spec_jax")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import jax\n")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/records.py").write_text("import json\n")
    assert violations(tmp_path) == []
    for name, source in PLANTED:
        (package / name).write_text(source + "\n")
    files = [found.split(":")[0] for found in violations(tmp_path)]
    assert sorted(files) == sorted(f"spec_jax/{name}" for name, _ in PLANTED)
