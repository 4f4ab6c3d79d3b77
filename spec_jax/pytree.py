"""The base class of the package's pytrees, frozen dataclasses of arrays, and fields."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, dataclass_transform

import jax


def static(**options: Any) -> Any:
    """Declares a field that is part of a node's type: hashable, and no child.

    Args:
      **options: of `dataclasses.field`, such as `default`.
    """
    return dataclasses.field(metadata={"static": True}, **options)


class _Optional:
    """A property that a dataclass below may leave out, or have as a field.

    Dataclasses take the value of a base class for a field's default; this has none.
    """

    def __init__(self, function: Callable[[Any], Any]):
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the default."""
        if instance is None:
            raise AttributeError(f"{self._function.__name__} is of instances")
        return self._function(instance)


if TYPE_CHECKING:
    optional = property
else:
    optional = _Optional


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(dataclasses.field, static),
)
class Node:
    """Makes each subclass a frozen, keyword-only dataclass that jax maps over.

    Every field is a child, an array or another pytree, unless it is `static`; one more
    is static, and says of which class the node is.
    Constructors check nothing: jax rebuilds a node from whatever it mapped the leaves
    to.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # To jaxlib (0.10.2 and 0.11.2) the structures of all registered dataclasses of
        # as many children are equal. Their hashes differ, but a call of `jax.jit` looks
        # at 7 bits of them: it may run the program of another class, and return that.
        cls.__annotations__ = cls.__dict__.get("__annotations__", {}) | {"_kind": type}
        cls._kind = static(default=cls, repr=False, compare=False)  # type: ignore[attr-defined]
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        jax.tree_util.register_dataclass(cls)
        # Known to jax and the constructor alone: it is not listed as a field.
        del cls.__dataclass_fields__["_kind"]  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Raises:
          TypeError: a name that is no field.
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]
