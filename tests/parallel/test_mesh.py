"""A model on a mesh: the same bits on any number of devices, and of heads one by one,
as XLA attends there; loaded by `sj.load`; what a process reads, what is refused."""

import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import mesh_program
import numpy as np
import pytest
import tiny_pair
from ops import row_slabs
from script_runs import run_python
from slow_cases import slow

import spec_jax as sj
from spec_jax import testing
from spec_jax.model import load, load_shards, row_model
from spec_jax.parallel import collectives, shard


TESTS = pathlib.Path(__file__).parents[1]


def run(*arguments: str) -> dict:
    """Returns the row that the program prints, in a process of eight devices."""
    done = run_python(mesh_program.__file__, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "family", ["qwen3", *map(slow, ("q8_0", "q4_1", "qwen2", "gpt_neox"))]
)
@pytest.mark.parametrize("impl", [slow("xla"), "native"])
def test_bits_are_the_same_on_any_mesh(impl, family):
    """Compares logits and K/V of a tree and, with native kernels, of two slots' chains.

    Fails if a product, a norm or a softmax is computed in a shape that depends on the
    number of devices, if the backend orders a sum, or if its bias is not added exactly
    once. The negative controls are sums in another order, which differ by rounding, and
    a model with other norms and biases.
    """
    found = run(family, impl)
    assert found == {
        "equal": [True, False],
        "close": [True, True, False],
        "all_reduce": False,
        # Two sums and the logits of each slab, and native has two slabs.
        "all_gathers": 3 if impl == "xla" else 6,
    }


FOUR = ("1", "2", "4", "8")
COUNTS = dict.fromkeys(("draft-model", "cut", "eagle3", "dflash", "dspark"), FOUR)
COUNTS |= {"gpt_neox": FOUR, "q8_0": FOUR[:2]}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["native", "xla"])
@pytest.mark.parametrize("drafter", COUNTS)
def test_generations_are_the_same_on_any_mesh(drafter, impl):
    """Compares tokens, log-probabilities, K/V and drafts in decoding, chains and trees.
    Fails if a drafter sees other features on another mesh, or drafts other tokens. The
    negative control has sums of one segment, whose bits differ."""
    assert run("generations", drafter, impl, *COUNTS[drafter]) == {
        "equal": [True] * len(COUNTS[drafter]),
        "drafted": True,
        "other_sums": False,
    }


def of_devices(count: int, *, by_head: bool = True) -> np.ndarray:
    """Returns the output of eight heads, in `count` parts as on so many devices."""
    slab = row_slabs.small_slab(np.random.default_rng(0), "float32", N=8, K=8)
    R, parts = slab.num_rows, []
    for own in np.split(np.arange(8), count):
        arrays = {
            name: getattr(slab, name)[:, :, own] for name in ("k_pages", "v_pages")
        }
        arrays["heads"] = slab.heads.reshape(R, 3, 8, -1)[:, :, own].reshape(R, -1)
        part = dataclasses.replace(slab, **arrays)
        parts.append(row_slabs.run("xla", part, R, by_head=by_head)[0])
    return np.concatenate(parts, axis=1)


def test_heads_are_the_same_on_any_number_of_devices():
    """Fails if XLA computes heads in shapes, or loops, that their number decides."""
    whole = of_devices(1)
    for count in (2, 8):
        testing.assert_same_bits(of_devices(count), whole)
    # Negative control: without loops over heads, one of these differs in a bit.
    beside, *others = (of_devices(count, by_head=False) for count in (1, 2, 8))
    assert any((testing.bits(other) != testing.bits(beside)).any() for other in others)
    np.testing.assert_allclose(beside, whole, rtol=1e-5, atol=1e-6)


def test_a_mesh_from_the_front_door(tmp_path):
    """Compares a generation with decoding on one device; a slow test has larger meshes.
    Fails if a bias, which is also in pieces, is prepared as if it were a matrix."""
    target = mesh_program.write_neox(tmp_path)
    how = {"mesh": shard.mesh(1), "segments": 2, "gamma_max": 2, "impl": "native"}
    lm = sj.load(target, drafter="ngram", **how)
    settings = {"max_tokens": 6, "stop": ()}
    found = sj.generate(lm, "import os", gamma=2, **settings)
    assert found.tokens == sj.decode(lm, "import os", **settings).tokens
    assert found.provenance["segments"] == 2 and found.metrics["rounds"] > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_pieces_is_joined(tied, tmp_path):
    """Fails if the joined head has padding, or rows out of order."""
    changes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
    config = tiny_pair.config(tie_word_embeddings=tied, **changes)
    tiny_pair.write_model(tmp_path, config, seed=0)
    _, alone = load.load(tmp_path, impl="xla")
    layout = shard.Layout(mesh=shard.mesh(1))
    _, pieces = load.load(tmp_path, impl="xla", layout=layout)
    shapes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
    assert shapes(pieces.lm_head) != shapes(alone.head)
    joined = load_shards.with_whole_head(pieces, config, layout)
    testing.assert_same_bits(joined.head, alone.head)


def layout(devices: int, axis=collectives.AXIS, **segments) -> shard.Layout:
    mesh = jax.sharding.AbstractMesh((devices,), (axis,))
    return shard.Layout(mesh=mesh, **segments)


def model_of(**changes):
    config = tiny_pair.config(**({"num_heads": 8, "num_kv_heads": 8} | changes))
    return row_model.RowModel(config=config, impl="xla", slab=4, layout=layout(1))


REFUSED = {
    "segments=6 on 1 devices: take a power of": lambda: layout(1, segments=6),
    "segments=8 on 16 devices: .* such as 16": lambda: layout(16),
    "3 devices: the order of a sum .*; take 2 of them": lambda: layout(3),
    "12 devices: the order of a sum .*; take 8 of them": lambda: layout(12),
    "99 devices: jax has .* here; for more on a": lambda: shard.mesh(99),
    r"a mesh with the axes \('data',\)": lambda: layout(1, "data"),
    "num_kv_heads=6 cannot be cut for 4 .* 2 at":
        lambda: layout(4).check_divides(num_kv_heads=6),
    "intermediate_size=44 cannot be cut into": lambda: model_of(intermediate_size=44),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_mesh_refuses(words):
    """Checks that errors name the values, and what to take instead."""
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()


BEGIN = """
import json, pathlib, re, sys
import jax
import recorded_runs
import spec_jax as sj
from spec_jax.model import load
from spec_jax.parallel import shard

*folders, address, number = sys.argv[1:]
if number != "alone":
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, int(number))
"""
"""How each process of a cluster begins."""

LOADS = """
layout = None if number == "alone" else shard.Layout(mesh=shard.mesh(), segments=2)
jax.block_until_ready(jax.numpy.zeros(8))
status = pathlib.Path("/proc/self/status")
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", status.read_text())[1])
before = peak()
_, params = load.load(*folders, impl="xla", layout=layout)
print(peak() - before)
"""


def outputs(program: str, *arguments: object) -> list[str]:
    """Returns what processes 0 and 1 of a cluster print, and what one alone prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", BEGIN + program, *map(str, arguments), address]
    env = os.environ | {
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        "JAX_PLATFORMS": "cpu",
    }
    started = [
        subprocess.Popen([*command, number], env=env, stdout=subprocess.PIPE, text=True)
        for number in ("0", "1", "alone")
    ]
    texts = [one.communicate(timeout=600)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0, 0]
    # Gloo names the rank.
    return [re.sub(r"^\[Gloo\].*\n", "", text, flags=re.MULTILINE) for text in texts]


@pytest.mark.slow
def test_a_process_reads_its_own_slices(tmp_path):
    """Fails if a process ever holds a whole checkpoint."""
    config = tiny_pair.config(
        hidden_size=1024, intermediate_size=3072, num_heads=8, num_kv_heads=2,
        head_dim=64, num_layers=8,
    )  # fmt: skip
    tiny_pair.write_model(tmp_path, config, seed=0)
    total = (tmp_path / "model.safetensors").stat().st_size
    first, second, alone = map(int, outputs(LOADS, tmp_path))
    largest = 4 * 2 * config.intermediate_size * config.hidden_size
    # The bound is half of the checkpoint, three of its largest weights and a block. Two
    # are being loaded, and JAX may still hold a third, which another thread copied.
    most = total / 2 + 3 * largest + 16 * 2**20
    assert most < 0.9 * total
    assert max(first, second) < most < 0.9 * alone, (first, second, alone, total)


HASHES = """
target, draft = folders
sizes = {"gamma_max": 2, "slab": 3, "impl": "native"}
lm = sj.load(target, draft=draft, mesh=shard.mesh(), segments=2, **sizes)
prompts, drawn = ["import os", "def f(x):"], sj.Sampling(temperature=0.7, seed=1)
runs = [(lm, prompts[:1], {"gamma": 0}), (lm, prompts, {"sampling": drawn})]
runs.append((lm.with_tree("2x2:2"), prompts[:1], {}))
for model, texts, how in runs:
    found = recorded_runs.evidence_of(model, texts, max_tokens=4, stop=(), **how)
    print(json.dumps([one.hashes() for one in found]))
"""


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path):
    """Fails if a bit of plain decoding, of a sampled batch or of trees differs."""
    target, draft = tiny_pair.write(tmp_path)
    config = tiny_pair.config(num_heads=4, num_kv_heads=2)
    tiny_pair.write_model(target, config, seed=0)
    first, second, alone = outputs(HASHES, target, draft)
    assert first == second == alone and len(alone.splitlines()) == 3
