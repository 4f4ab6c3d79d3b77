"""Who may import whom, and how: the arrows of the package, read from its source."""

import ast
import importlib.util
import pathlib

import pytest


ROOT = pathlib.Path(__file__).parents[1]

ARRAYS_ONLY = {"acceptance", "sampling", "theory", "metrics"}
"""Modules that know arrays, and nothing of the package but `EVERYWHERE`."""

EVERYWHERE = {"typing", "pytree"}
"""What every part of the package may import."""

ARROWS = {
    "typing": set(),
    "pytree": set(),
    "testing": {"typing", "bench", "rounds", "protocols", "session"},
    "bench": {"typing", "model", "rounds", "protocols", "autoregressive", "session"},
    **{name: {"typing"} for name in ARRAYS_ONLY},
    "pallas": {"typing"},
    "native": {"typing"},
    "ops": {"typing", "pallas", "native"},
    "paging": {"typing", "ops"},
    "model": {"typing", "ops", "paging"},
    "protocols": {"typing"},
    "loop": set(),
    "rules": {"typing", "protocols", "acceptance", "sampling"},
    "rounds": {
        "typing",
        "protocols",
        "acceptance",
        "sampling",
        "rules",
        "gamma",
        "loop",
    },
    "autoregressive": {"typing", "protocols", "sampling", "rules", "rounds", "loop"},
    "decode_rounds": {"typing", "protocols", "acceptance", "rules", "rounds", "loop"},
    "recorder": {"typing", "rounds", "protocols", "autoregressive"},
    "replay": {"typing", "acceptance", "rounds", "protocols", "gamma"},
    "conventions": {"typing", "metrics"},
    "gamma": {"typing", "theory"},
    # Looks at operations by name, wherever they run.
    "microscope": {"typing", "testing", "ops", "paging", "model"},
    # Drafters speak the protocol of rounds, which know them by what they do.
    "drafters": {
        "typing",
        "ops",
        "paging",
        "model",
        "rounds",
        "protocols",
        "gamma",
        *ARRAYS_ONLY,
    },
    "batch": {
        "typing",
        "ops",
        "paging",
        "model",
        "loop",
        "rules",
        "rounds",
        "protocols",
        "gamma",
        "drafters",
    }
    | {"session", *ARRAYS_ONLY},
    "session": {
        "typing",
        "ops",
        "paging",
        "model",
        "rounds",
        "protocols",
        "autoregressive",
    }
    | {"drafters", "gamma", *ARRAYS_ONLY},
}
"""What each module or folder of `spec_jax` may import, besides itself."""

NAMES_FROM = {"typing", "jaxtyping", "beartype", "collections.abc", "spec_jax.typing"}
"""Sources of types, from which names and not modules are imported."""


def imports_of(path: pathlib.Path, package: str):
    """Every import of a file, also inside functions: `(line, module, names)`."""
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
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False


def targets(module: str, names) -> set[str]:
    """The parts of `spec_jax` that an import reaches: first names after the package."""
    dotted = (
        [module] if module != "spec_jax" else [f"spec_jax.{name}" for name in names]
    )
    parts = [name.split(".") for name in dotted]
    return {part[1] for part in parts if part[0] == "spec_jax" and len(part) > 1}


def violations(root: pathlib.Path) -> list[str]:
    """What breaks the rules below `root`, one line each."""
    found = []
    for path in sorted((root / "spec_jax").rglob("*.py")):
        parts = path.relative_to(root / "spec_jax").with_suffix("").parts
        if parts == ("__init__",):
            continue
        where = path.relative_to(root)
        if parts[0] not in ARROWS:
            found.append(f"{where}: no rule says what {parts[0]} may import")
            continue
        allowed = ARROWS[parts[0]] | EVERYWHERE | {parts[0]}
        for line, module, names in imports_of(path, parts[0]):
            if module.split(".")[0] in ("experiments", "tests"):
                found.append(f"{where}:{line}: the package imports {module}")
            for target in sorted(targets(module, names) - allowed):
                found.append(f"{where}:{line}: {parts[0]} imports {target}")
    return found + style_violations(root)


def style_violations(root: pathlib.Path) -> list[str]:
    found = []
    files = [*root.glob("spec_jax/**/*.py"), *root.glob("experiments/**/*.py")]
    for path in sorted(files):
        where = path.relative_to(root)
        for line, module, names in imports_of(path, ""):
            if module.startswith("."):
                found.append(f"{where}:{line}: relative import")
                continue
            # `spec_jax/__init__.py` lists the public names one by one.
            if module in NAMES_FROM or path == root / "spec_jax/__init__.py":
                continue
            for name in names:
                if not is_module(root, f"{module}.{name}"):
                    found.append(f"{where}:{line}: {module}.{name} is not a module")
    return found


def test_imports_follow_the_arrows():
    """Fails if a module reaches up, or a name is imported in place of its module."""
    assert violations(ROOT) == []


def test_the_rules_see_the_package():
    """Fails if the walk finds no files, or misses the imports that there are."""
    assert len(list((ROOT / "spec_jax").rglob("*.py"))) > 20
    qwen3 = list(imports_of(ROOT / "spec_jax/model/qwen3.py", "model"))
    reached = set().union(*(targets(module, names) for _, module, names in qwen3))
    assert {"model", "ops", "paging"} <= reached


PLANTED = {
    "ops know pages": ("ops/bad.py", "from spec_jax.paging import cache"),
    "paging knows models": ("paging/bad.py", "import spec_jax.model.qwen3"),
    "models know rounds": ("model/bad.py", "from spec_jax import rounds"),
    "models know drafters": ("model/bad.py", "from spec_jax.drafters import ngram"),
    "rounds know pages": ("rounds.py", "from spec_jax.paging import cache"),
    "rounds know drafters": ("rounds.py", "from spec_jax.drafters import ngram"),
    "rounds know the session": ("rounds.py", "from spec_jax import session"),
    "acceptance knows rounds": ("acceptance.py", "from spec_jax import rounds"),
    "metrics know acceptance": ("metrics.py", "from spec_jax import acceptance"),
    "an import inside a function": (
        "ops/bad.py",
        "def f():\n    from spec_jax import session\n    return session",
    ),
    "experiments": ("session.py", "from experiments import records"),
    "a module without a rule": ("helpers.py", "import jax"),
    "a relative import": ("ops/bad.py", "from . import rope"),
    "a relative name": ("ops/bad.py", "from .rope import rope"),
    "a function by name": ("ops/bad.py", "from spec_jax.ops.rope import rope"),
    "a library's function by name": ("ops/bad.py", "from jax.numpy import einsum"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_imports_are_reported(tmp_path, fault):
    """Negative control: each bad import is reported, at its file, and alone."""
    name, source = PLANTED[fault]
    package = tmp_path / "spec_jax"
    for module in ("drafters/ngram", "ops/rope", "paging/cache", "model/qwen3"):
        (package / module).parent.mkdir(parents=True, exist_ok=True)
        (package / module).with_suffix(".py").write_text("import jax\n")
    for module in ("rounds", "protocols", "session", "acceptance", "metrics"):
        (package / module).with_suffix(".py").write_text("import jax\n")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/records.py").write_text("import json\n")
    assert violations(tmp_path) == []
    (package / name).write_text(source + "\n")
    found = violations(tmp_path)
    assert len(found) == 1 and found[0].startswith(f"spec_jax/{name}:"), found
