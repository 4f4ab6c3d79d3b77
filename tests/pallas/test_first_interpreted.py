"""The first program of a process that interprets a kernel is compiled once."""

import jax
import pytest
from script_runs import run_python


PROGRAM = """
import sys
{before}
import jax, jax.numpy as jnp
from spec_jax.pallas import rms_norm_triton

traced = []

@jax.jit
def double(x):
    traced.append(len(x))
    return 2 * x

@jax.jit
def normed(x):
    one = jnp.ones((x.shape[1],), x.dtype)
    return rms_norm_triton.rms_norm(
        x, one, num_active=jnp.int32(2), eps=1e-6, interpret=True
    )

x = jnp.ones((2, 16))
double(x)
normed(x)
double(x)
normed(x)
print("traced", len(traced))
"""

# What `spec_jax.pallas` would import is taken for imported, until it is wanted.
WITHOUT = """
import types
name = "jax.experimental.pallas.fuser"
sys.modules[name] = types.ModuleType(name)
import jax.experimental.pallas
jax.experimental.pallas.fuser = sys.modules[name]
import spec_jax.pallas
del sys.modules[name], jax.experimental.pallas.fuser
"""


@pytest.mark.parametrize("cured", [True, False])
def test_nothing_is_compiled_twice(cured):
    """Fails if the first kernel that is interpreted forgets what was compiled.

    Without the import of `spec_jax.pallas`, the negative control, it does, from jax
    0.11 on.
    """
    done = run_python("-c", PROGRAM.format(before="" if cured else WITHOUT))
    times = 1 if cured or jax.__version_info__ < (0, 11) else 2
    assert f"traced {times}" in done.stdout, done.stdout + done.stderr
