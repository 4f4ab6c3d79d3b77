"""A model on a mesh: the same bits on any number of devices, and what it refuses."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import tiny_pair

from spec_jax import loading
from spec_jax.model import row_model
from spec_jax.parallel import shard


TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = pathlib.Path(__file__).parent / "mesh_program.py"


def run(*arguments: str) -> dict:
    """What the program prints, in a process of eight devices."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("impl", ["xla", "native"])
def test_bits_are_the_same_on_any_mesh(impl):
    """Logits and K/V of chains, of a tree and of two slots.

    Fails if a product, a norm or a softmax is computed in a shape that depends on the
    number of devices, or if a sum is the backend's.
    """
    found = run(impl)
    assert found == {
        "equal": [True, True, True],
        "close": True,
        "all_reduce": False,
        "all_gathers": 6,  # Of two slabs each: two sums and the logits.
    }


def test_faults_in_the_sum_are_caught():
    """Each of them is a sum too, up to rounding."""
    right = {"ordered_sum": True}
    assert run("faults") == right | dict.fromkeys(
        ("rotated", "rounded", "reduced"), False
    )


def on_mesh(**changes):
    config = tiny_pair.config(**({"num_heads": 8, "num_kv_heads": 8} | changes))
    layout = shard.Layout(mesh=shard.mesh(1))
    return row_model.RowModel(config=config, impl="xla", slab=4, layout=layout)


def test_what_a_mesh_refuses():
    """Says the values, and what to take instead."""
    one = shard.mesh(1)
    with pytest.raises(ValueError, match="segments=6 on 1 devices: take a power of"):
        shard.Layout(mesh=one, segments=6)
    with pytest.raises(ValueError, match=r"a mesh with the axes \('data',\)"):
        shard.Layout(mesh=jax.sharding.Mesh(jax.devices()[:1], ("data",)))
    with pytest.raises(ValueError, match="99 devices: jax has .* here; for more on a"):
        shard.mesh(99)
    with pytest.raises(ValueError, match="intermediate_size=44 cannot be cut into"):
        on_mesh(intermediate_size=44)
    assert on_mesh().layout.describe() == {"devices": 1, "segments": 8}
    with pytest.raises(NotImplementedError, match="drafter 'eagle3' shares weights"):
        loading.load(drafter="eagle3", mesh=one)


def test_heads_that_do_not_divide():
    """A mesh of abstract devices: nothing runs."""

    class Three:
        axis_names, size = shard.mesh(1).axis_names, 2

    layout = shard.Layout(mesh=Three())
    layout.check_divides(num_kv_heads=2)
    with pytest.raises(ValueError, match="num_kv_heads=3 cannot be cut for 2 devices"):
        layout.check_divides(num_kv_heads=3)
