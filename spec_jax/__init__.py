"""Lossless speculative decoding in JAX: bit for bit the target's own tokens.

import spec_jax as sj

lm = sj.load()  # the embedded pair; or sj.load("Qwen3-8B", draft="Qwen3-0.6B")
out = sj.generate(lm, "def quicksort(xs):", max_tokens=64, gamma=4)
print(out.text, out.metrics["acceptance_rate"], out.metrics["repetition"])
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any


__version__ = "0.2.0"

# Name -> its module, imported when the name is first used: `import spec_jax` costs
# nothing, and a script's help does not wait for jax.
_NAMES = {
    "Drafter": "spec_jax.engine.protocols",
    "FixedTree": "spec_jax.drafters.tree_shapes",
    "ForwardTarget": "spec_jax.engine.forward",
    "Generation": "spec_jax.results",
    "LanguageModel": "spec_jax.language_model",
    "Origin": "spec_jax.engine.state",
    "Piece": "spec_jax.results",
    "Proposal": "spec_jax.engine.protocols",
    "Sampling": "spec_jax.rules.settings",
    "Status": "spec_jax.engine.state",
    "Tree": "spec_jax.drafters.tree_shapes",
    "autoregressive": "spec_jax.algorithms",
    "check_lossless": "spec_jax.lossless",
    "decode": "spec_jax.generation",
    "generate": "spec_jax.generation",
    "load": "spec_jax.loading",
    "score": "spec_jax.generation",
    "speculative": "spec_jax.algorithms",
    "stream": "spec_jax.generation",
}
_MODULES = ("drafters", "gamma", "processors", "rules", "testing")

__all__ = [
    "Drafter",
    "FixedTree",
    "ForwardTarget",
    "Generation",
    "LanguageModel",
    "Origin",
    "Piece",
    "Proposal",
    "Sampling",
    "Status",
    "Tree",
    "__version__",
    "autoregressive",
    "check_lossless",
    "decode",
    "drafters",
    "gamma",
    "generate",
    "load",
    "processors",
    "rules",
    "score",
    "speculative",
    "stream",
    "testing",
]

if TYPE_CHECKING:
    from spec_jax import drafters, gamma, processors, rules, testing
    from spec_jax.algorithms import autoregressive, speculative
    from spec_jax.drafters.tree_shapes import FixedTree, Tree
    from spec_jax.engine.forward import ForwardTarget
    from spec_jax.engine.protocols import Drafter, Proposal
    from spec_jax.engine.state import Origin, Status
    from spec_jax.generation import decode, generate, score, stream
    from spec_jax.language_model import LanguageModel
    from spec_jax.loading import load
    from spec_jax.lossless import check_lossless
    from spec_jax.results import Generation, Piece
    from spec_jax.rules.settings import Sampling


def exports(
    package: str, names: Mapping[str, str], modules: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package that imports names on first use.

    Args:
      names: the package's names, and the module that defines each.
      modules: the package's submodules; a name that is in `names` too means that one.
    """

    def find(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *names, *modules})

    return find, listed


__getattr__, __dir__ = exports(__name__, _NAMES, _MODULES)
