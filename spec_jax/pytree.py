"""The base class of the package's pytrees: frozen dataclasses of arrays."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, dataclass_transform

import jax


def static(**options: Any) -> Any:
    """Declares a static field: a part of the node's structure, hashable, no child.

    Args:
      **options: arguments of `dataclasses.field`, such as `default`.
    """
    return dataclasses.field(metadata={"static": True}, **options)


class _Optional:
    """A property with a default, which a dataclass that inherits may make a field.

    A dataclass takes a base class's value for the field's default; this has no value.
    """

    def __init__(self, function: Callable[[Any], Any]):
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the default; raises `AttributeError` for the class itself."""
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

    Every field is a child, an array or another pytree, unless it is `static`. A hidden
    static field holds the node's class. Constructors check nothing: jax rebuilds nodes
    from any values that it mapped the leaves to.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # In jaxlib (0.10.2 and 0.11.2) the structures of registered dataclasses with as
        # many children are equal. Their hashes differ, but a call of `jax.jit` compares
        # 7 bits of them: it may run another class's program, and return that class.
        cls.__annotations__ = cls.__dict__.get("__annotations__", {}) | {"_kind": type}
        cls._kind = static(default=cls, repr=False, compare=False)  # type: ignore[attr-defined]
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        jax.tree_util.register_dataclass(cls)
        # Only jax and the constructor know the field: `dataclasses.fields` omits it.
        del cls.__dataclass_fields__["_kind"]  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Raises:
          TypeError: a name that is no field.
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]
