"""The base class of pytrees: the leaves, structures and fields of nodes in jax."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_jax import pytree, testing


class Inner(pytree.Node):
    values: jax.Array  # [3] float32


class Outer(pytree.Node):
    inner: Inner
    length: jax.Array  # [] int32


def outer() -> Outer:
    return Outer(inner=Inner(values=jnp.arange(3.0)), length=jnp.int32(7))


def test_every_field_is_a_child_and_has_a_name():
    """Fails if a field is static, or if its path does not name it."""
    leaves = jax.tree_util.tree_leaves_with_path(outer())
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [".inner.values", ".length"]
    doubled = jax.jit(lambda node: jax.tree.map(lambda leaf: leaf * 2, node))(outer())
    assert type(doubled) is Outer and int(doubled.length) == 14
    assert jax.vmap(lambda node: node)(jax.tree.map(jnp.atleast_2d, outer()))


def test_a_node_is_changed_by_replacing_fields():
    node = outer()
    other = node.replace(length=jnp.int32(8))
    assert (int(node.length), int(other.length)) == (7, 8)
    testing.assert_same_bits(other.inner, node.inner)
    with pytest.raises(TypeError, match="size"):
        node.replace(size=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.length = jnp.int32(9)
    with pytest.raises(TypeError, match="positional"):
        Inner(jnp.arange(3.0))


class Twin(pytree.Node):
    values: jax.Array  # [3] float32


class Child(Inner):
    """A subclass without fields of its own, as `StaticKV` is of `PagedKV`."""


@pytest.mark.parametrize("other", [Twin, Child])
def test_nodes_of_other_classes_have_other_structures(other):
    """Fails if `jax.jit`, which looks at 7 bits of a hash, can confuse two classes."""
    one, two = (kind(values=jnp.arange(3.0)) for kind in (Inner, other))
    assert jax.tree.structure(one) != jax.tree.structure(two)
    assert jax.tree.structure(one) == jax.tree.structure(one.replace(values=0))
    assert type(jax.tree.map(lambda leaf: leaf, two)) is other
    assert [field.name for field in dataclasses.fields(two)] == ["values"]


class Sized(pytree.Node):
    values: jax.Array  # [size] float32
    size: int = pytree.static(default=3)


def test_a_static_field_is_no_child():
    """Fails if it is traced, or if two values of it share a structure."""
    node = Sized(values=jnp.arange(3.0))
    assert len(jax.tree.leaves(node)) == 1
    shape = jax.jit(lambda node: jnp.zeros((node.size,)))
    assert shape(node).shape == (3,)
    assert shape(node.replace(size=5)).shape == (5,)
    structures = [jax.tree.structure(one) for one in (node, node.replace(size=5))]
    assert structures[0] != structures[1]
