"""The base class of the package's pytrees: frozen dataclasses of arrays."""

import dataclasses
from typing import Any, Self, dataclass_transform

import jax


def static(**options: Any) -> Any:
    """Declares a field that is part of a node's type: hashable, and no child.

    Args:
      **options: of `dataclasses.field`, such as `default`.
    """
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(dataclasses.field, static),
)
class Node:
    """Makes each subclass a frozen, keyword-only dataclass that jax maps over.

    Every field is a child, an array or another pytree, unless it is `static`.
    Constructors check nothing: jax rebuilds a node from whatever it mapped the leaves
    to.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        jax.tree_util.register_dataclass(cls)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Raises:
          TypeError: a name that is no field.
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]
