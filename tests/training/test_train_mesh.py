"""Gradients over several devices: those of one device, up to the order of sums."""

import os

import pytest
from script_runs import run_python


PROGRAM = """
import functools, pathlib, tempfile
import jax, numpy as np, random_weights, text_loss
from spec_jax.model import block_params, config as config_lib, params as params_lib
from spec_jax.training import block, loop, targets

random_weights.install()
config = config_lib.Qwen3Config(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    dtype="float32",
)
params = params_lib.init(jax.random.key(0), config, stddev=0.3)
loss = functools.partial(text_loss.text_loss, config)
data = np.random.default_rng(0).integers(0, 32, (16, 13)).astype(np.int32)
error = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))


def on_one_and_eight(loss, params, data, teacher):
    made = {}
    for count in (1, 8):
        run = functools.partial(loop.value_and_grad, loss, part_size=2)
        inputs = jax.jit(functools.partial(run, mesh=loop.data_mesh(count)))
        compiled = inputs.lower(params, data, teacher).compile()
        made[count] = compiled(params, data, teacher)
        assert ("all-reduce" in compiled.as_text()) == (count == 8), count
    worst = max(jax.tree.leaves(jax.tree.map(error, made[8], made[1])))
    assert 0 <= worst < 1e-5, worst
    return made


made = on_one_and_eight(loss, params, data, None)
head = block_params.BlockConfig(
    layer=config, draft_vocab_size=32, taps=(0,), block_size=3, slots="anchor-first",
    mask_token_id=0, head="vanilla", markov_rank=4, has_confidence=True,
    confidence_with_markov=True,
)
# Texts of other lengths, so that devices have other weights.
mask = np.arange(13) >= np.arange(16)[:, None] % 12
texts = {"tokens": data, "mask": mask} | {
    name: np.random.default_rng(1).normal(size=(16, 13, 16)).astype(np.float32)
    for name in ("features", "final")
}
draw = block.anchors_of(head, seed=0, count=4, hot=None)
on_one_and_eight(
    functools.partial(block.loss, head),
    block.init(jax.random.key(0), head, config, params, None),
    draw(texts, np.arange(16), 0),
    targets.teacher_of(params, None),
)
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


@pytest.mark.slow
def test_eight_devices_have_the_gradients_of_one():
    """Fails if sequences are lost, counted twice or not spread over the devices."""
    flags = "--xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    done = run_python("-c", PROGRAM, XLA_FLAGS=flags)
    assert done.stdout.split() == ["devices", "agree", "8"], done.stderr
