"""The base class of pytrees: the leaves, structures and fields of nodes in jax."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_jax import pytree


class Inner(pytree.Node):
    values: jax.Array  # [3] float32


class Outer(pytree.Node):
    inner: Inner
    length: jax.Array  # [] int32


def test_every_field_is_a_child_and_has_a_name():
    """Fails if a field is static, or if its path does not name it."""
    outer = Outer(inner=Inner(values=jnp.arange(3.0)), length=jnp.int32(7))
    leaves = jax.tree_util.tree_leaves_with_path(outer)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [".inner.values", ".length"]
    doubled = jax.jit(lambda node: jax.tree.map(lambda leaf: leaf * 2, node))(outer)
    assert type(doubled) is Outer and int(doubled.length) == 14
    assert jax.vmap(lambda node: node)(jax.tree.map(jnp.atleast_2d, outer))


class Twin(pytree.Node):
    values: jax.Array  # [3] float32


class Child(Inner):
    """A subclass without fields of its own."""


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
    shape = jax.jit(lambda node: jnp.zeros((node.size,)))
    nodes = [Sized(values=jnp.arange(3.0)), Sized(values=jnp.arange(3.0), size=5)]
    assert [len(jax.tree.leaves(node)) for node in nodes] == [1, 1]
    assert [shape(node).shape for node in nodes] == [(3,), (5,)]
    assert jax.tree.structure(nodes[0]) != jax.tree.structure(nodes[1])
