"""The size of Qwen3's programs before XLA, traced for a GPU on a CPU."""

import dataclasses
from unittest import mock

import hopper
import hopper_models as models
import jax
import pytest


def of_a_layer(build, change=lambda program: program) -> float:
    """Counts the lines that another layer adds to a traced program for the H100.

    A function that is called often is printed once.
    """
    counts = []
    for layers in (1, 3):
        program = change(build("qwen3-8b", layers=layers))
        with hopper.lowering_for(hopper.DEVICE):
            traced = jax.jit(program.fn).trace(*program.args)
        counts.append(len(str(traced.jaxpr).splitlines()))
    return (counts[1] - counts[0]) / 2


@pytest.mark.parametrize(
    ("build", "most"), [(models.plain_step, 20), (models.verify_tree, 80)]
)
def test_each_layer_is_traced_once(build, most):
    """Fails if a kernel is traced again for each of 36 layers, where a program should
    call a function for each; a tree's path is moved in each besides."""
    assert of_a_layer(build) < most


def test_layers_that_are_traced_apart_are_counted():
    """Negative control: layers that are not functions have equations of their own."""

    def apart(program):
        def step(*args):
            with mock.patch.object(jax, "jit", lambda function, **unused: function):
                return program.fn(*args)

        return dataclasses.replace(program, fn=step)

    assert of_a_layer(models.plain_step, apart) > 200
