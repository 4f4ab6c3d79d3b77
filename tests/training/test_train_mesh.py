"""Gradients over several devices: those of one device, up to the order of sums."""

import os

import pytest
from script_runs import run_python


PROGRAM = """
import functools
import jax, numpy as np, pytest, random_weights, tiny_pair
from spec_jax.model import block_params, params as params_lib
from spec_jax.training import block, loop, targets

random_weights.install()
config = tiny_pair.config(
    vocab_size=32, hidden_size=16, intermediate_size=24, head_dim=8,
    tie_word_embeddings=True,
)
params = params_lib.init(jax.random.key(0), config, stddev=0.3)
head = block_params.BlockConfig(
    layer=config, draft_vocab_size=32, taps=(0,), block_size=3, slots="anchor-first",
    mask_token_id=0, head="vanilla", markov_rank=4, has_confidence=True,
    confidence_with_markov=True,
)
# Texts of other lengths, so that devices have other weights.
rng = np.random.default_rng(0)
texts = {
    "tokens": rng.integers(0, 32, (16, 13)).astype(np.int32),
    "mask": np.arange(13) >= np.arange(16)[:, None] % 12,
} | {
    name: rng.normal(size=(16, 13, 16)).astype(np.float32)
    for name in ("features", "final")
}
draw = block.anchors_of(head, seed=0, count=4, hot=None)
batch = draw(texts, np.arange(16), 0)
given = block.init(jax.random.key(0), head, config, params, None)
teacher, made = targets.teacher_of(params, None), {}
loss = functools.partial(block.loss, head)
for count in (1, 8):
    run = functools.partial(loop.value_and_grad, loss, part_size=2)
    inputs = jax.jit(functools.partial(run, mesh=loop.data_mesh(count)))
    compiled = inputs.lower(given, batch, teacher).compile()
    made[count] = compiled(given, batch, teacher)
    assert ("all-reduce" in compiled.as_text()) == (count == 8), count
# Negative control: the features of other texts.
made["other"] = compiled(given, batch | {"features": batch["features"][::-1]}, teacher)
error = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
errors = [
    max(jax.tree.leaves(jax.tree.map(error, made[which], made[1])))
    for which in (8, "other")
]
assert errors[0] < 1e-5 and errors[1] > 1e-3, errors
with pytest.raises(ValueError, match="9 devices: jax has 8 here"):
    loop.data_mesh(9)
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
