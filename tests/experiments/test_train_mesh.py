"""Training over several devices: what one device learns, up to the order of sums."""

import os
import pathlib
import subprocess
import sys


ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import functools, pathlib, tempfile
import jax, numpy as np
from spec_jax.model import config as config_lib, params as params_lib
from spec_jax.training import loop, losses

config = config_lib.Qwen3Config(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    dtype="float32",
)
params = params_lib.init(jax.random.key(0), config, stddev=0.3)
loss = functools.partial(losses.text_loss, config)
data = np.random.default_rng(0).integers(0, 32, (16, 13)).astype(np.int32)
made = {}
for count in (1, 8):
    run = functools.partial(loop.value_and_grad, loss, part_size=2)
    inputs = jax.jit(functools.partial(run, mesh=loop.data_mesh(count)))
    made[count] = inputs(params, data, None)
    text = inputs.lower(params, data, None).compile().as_text()
    assert ("all-reduce" in text) == (count == 8), count
error = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
worst = max(jax.tree.leaves(jax.tree.map(error, made[8], made[1])))
assert 0 <= worst < 1e-5, worst
other = jax.jit(functools.partial(loop.value_and_grad, loss, part_size=2))(
    params, data[::-1] % 31, None
)
assert max(jax.tree.leaves(jax.tree.map(error, other, made[1]))) > 1e-3
try:
    loop.data_mesh(9)
except ValueError as error:
    assert "9 devices: jax has 8 here" in str(error)
print("devices agree", len(jax.devices()))
"""


def test_eight_devices_have_the_gradients_of_one():
    """Fails if a device's sequences are lost, counted twice or not spread."""
    flags = "--xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["devices", "agree", "8"], done.stderr
