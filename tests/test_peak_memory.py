"""The peak memory of a prompt, measured in a process of its own."""

import json

from script_runs import run_python


MIB = 2**20

PREFILL = """
import json, resource, jax, numpy as np, tiny_pair
from spec_jax.model import params as params_lib, row_model

config = tiny_pair.config(
    vocab_size=96, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=1,
    num_kv_heads=1, head_dim=16, max_position_embeddings=65_536)
model = row_model.RowModel(config=config, impl="native", slab=8)
params = params_lib.prepare(params_lib.init(jax.random.key(0), config), "native")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def prefill(count):
    kv = model.new_cache(capacity=count + 16, page_size=16)
    tokens = np.random.default_rng(0).integers(0, 96, count).tolist()
    kv, _ = model.prefill(params, kv, tokens)
    assert int(kv.length[0]) == count
    return jax.block_until_ready(kv)

prefill(64)
before = peak()
kv = prefill(32_768)
stored = sum(x.nbytes for x in jax.tree.leaves(kv))
print(json.dumps([before, peak(), stored]))
"""


def test_a_prompt_of_32k_tokens_needs_no_square_of_memory():
    """Fails if all attention scores are in memory at once: they take four gigabytes."""
    done = run_python("-c", PREFILL)
    assert done.returncode == 0, done.stderr
    before, after, stored = json.loads(done.stdout)
    assert after - before < 3 * stored + 64 * MIB < 0.05 * 4 * 32_768**2
