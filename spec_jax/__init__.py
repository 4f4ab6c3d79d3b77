"""Lossless speculative decoding in JAX: bit for bit the target's own tokens.

import spec_jax as sj

lm = sj.load()  # the embedded pair; or sj.load("Qwen3-8B", draft="Qwen3-0.6B")
out = sj.generate(lm, "def quicksort(xs):", max_tokens=64, gamma=4)
print(out.text, out.metrics["acceptance_rate"], out.metrics["repetition"])
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


__version__ = "0.2.0"

# A name is imported when it is first used: `import spec_jax` costs nothing, and a
# script's help does not wait for jax. `exports` reads these lines, as type checkers do.
if TYPE_CHECKING:
    from spec_jax import (
        drafters as drafters,
        gamma as gamma,
        processors as processors,
        rules as rules,
        testing as testing,
    )
    from spec_jax.algorithms import (
        autoregressive as autoregressive,
        speculative as speculative,
    )
    from spec_jax.drafters.tree_shapes import FixedTree as FixedTree, Tree as Tree
    from spec_jax.engine.forward import ForwardTarget as ForwardTarget
    from spec_jax.engine.protocols import Drafter as Drafter, Proposal as Proposal
    from spec_jax.engine.state import Origin as Origin, Status as Status
    from spec_jax.generation import (
        decode as decode,
        generate as generate,
        score as score,
        stream as stream,
    )
    from spec_jax.language_model import LanguageModel as LanguageModel
    from spec_jax.loading import load as load
    from spec_jax.lossless import check_lossless as check_lossless
    from spec_jax.results import Generation as Generation, Piece as Piece
    from spec_jax.rules.settings import Sampling as Sampling


def exports(
    package: str, *, modules: bool = True
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package that imports names on
    first use, which its source imports under `if TYPE_CHECKING`.

    Args:
      modules: whether the submodules that they come from are public, too.
    """
    spec: Any = sys.modules[package].__spec__
    body = ast.parse(spec.loader.get_source(package)).body
    (block,) = (node for node in body if isinstance(node, ast.If))
    imports: list[Any] = block.body
    module_of = {alias.name: one.module for one in imports for alias in one.names}
    if modules:
        submodules = {one.module for one in imports} - {package}
        module_of = {one.split(".")[-1]: package for one in submodules} | module_of

    def find(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(module), name)

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *public})

    public = sorted(module_of)
    return find, listed, public


__getattr__, __dir__, __all__ = exports(__name__, modules=False)
__all__ += ["__version__"]
