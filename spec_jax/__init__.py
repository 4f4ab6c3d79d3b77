"""Lossless speculative decoding in JAX: bit for bit the target's own tokens.

import spec_jax as sj

lm = sj.load()  # the embedded pair; or sj.load("Qwen3-8B", draft="Qwen3-0.6B")
out = sj.generate(lm, "def quicksort(xs):", max_tokens=64, gamma=4)
print(out.text, out.metrics["acceptance_rate"], out.metrics["repetition"])
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any


__version__ = "0.2.0"

# Names by their module, which is imported when one is first used: `import spec_jax`
# costs nothing, and a script's help does not wait for jax. Type checkers read the
# imports below.
_NAMES = {
    "algorithms": ["autoregressive", "speculative"],
    "drafters.tree_shapes": ["FixedTree", "Tree"],
    "engine.forward": ["ForwardTarget"],
    "engine.protocols": ["Drafter", "Proposal"],
    "engine.state": ["Origin", "Status"],
    "generation": ["decode", "generate", "score", "stream"],
    "language_model": ["LanguageModel"],
    "loading": ["load"],
    "lossless": ["check_lossless"],
    "results": ["Generation", "Piece"],
    "rules.settings": ["Sampling"],
}
_MODULES = ("drafters", "gamma", "processors", "rules", "testing")

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
    package: str, names: Mapping[str, Sequence[str]], modules: Iterable[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package that imports names on
    first use.

    Args:
      names: the package's names, by the submodule that defines them.
      modules: public submodules; a name that is in `names` too means that one.
    """
    module_of = {name: module for module, found in names.items() for name in found}

    def find(name: str) -> Any:
        if name in module_of:
            module = importlib.import_module(f"{package}.{module_of[name]}")
            return getattr(module, name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *public})

    public = sorted({*module_of, *modules})
    return find, listed, public


__getattr__, __dir__, __all__ = exports(__name__, _NAMES, _MODULES)
__all__ += ["__version__"]
