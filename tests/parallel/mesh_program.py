"""The program that `test_mesh` runs in a process of eight devices; prints a JSON row.

It runs slabs of one layer with eight key/value heads: of two slots, and then of a tree,
on a cache that the first slab filled; or whole generations of two layers. All devices
and meshes of a run, and its fault, read the same files.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import random_weights
import recorded_runs
import tiny_pair

import spec_jax as sj
from spec_jax import run as run_lib, testing, tree
from spec_jax.debug import recorder
from spec_jax.engine import round as round_lib
from spec_jax.model import (
    decoder,
    load,
    params as params_lib,
    qwen2,
    row_model,
)
from spec_jax.paging import allocator
from spec_jax.parallel import collectives, shard


CONFIG = tiny_pair.config(
    vocab_size=270,  # Not a multiple of the segments.
    num_heads=16,
    num_kv_heads=8,
    head_dim=8,
    hidden_size=24,
    intermediate_size=80,
)
ROWS = 4


def write_neox(folder: pathlib.Path, seed: int = 0, **changes) -> pathlib.Path:
    """Writes a GPT-NeoX model of similar sizes, with random biases and norms, too. Half
    of the dimensions of a head are rotated."""
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "hidden_size": 64}
    same = {"vocab_size": CONFIG.vocab_size, "intermediate_size": 80}
    config = tiny_pair.neox_config(**(heads | same | changes))
    return write_biased(folder, config, seed)


def write_biased(folder: pathlib.Path, config, seed: int = 0) -> pathlib.Path:
    params = params_lib.init(jax.random.key(seed), config, stddev=0.3)
    noise = lambda x: random_weights.normal(jax.random.key(x.size), x.shape, x.dtype)
    params = jax.tree.map(lambda x: x + noise(x) if x.ndim == 1 else x, params)
    return tiny_pair.write_model(folder, config, params=params)


def write(folder: pathlib.Path, family: str) -> pathlib.Path:
    """Writes a model of a family, or one of Qwen3 whose weights become blocks."""
    if family == "gpt_neox":
        return write_neox(folder)
    if family == "qwen2":
        return write_biased(folder, qwen2.Qwen2Config(**dataclasses.asdict(CONFIG)))
    # Each segment of a sum is one block of weights.
    whole = {} if family == "qwen3" else {"head_dim": 16, "intermediate_size": 256}
    config = dataclasses.replace(CONFIG, **whole)
    return tiny_pair.write_model(folder, config, seed=0)


def model(folder: pathlib.Path, impl: str, layout: shard.Layout | None, form=None):
    """Returns the target and its weights."""
    config, params = load.load(folder, impl=impl, layout=layout, weights=form)
    target = row_model.RowModel(config=config, impl=impl, slab=ROWS, layout=layout)
    return target, params


def slabs(impl: str) -> list[decoder.Rows]:
    """Returns rows of two slots, and then a tree in the first: a node and two children.
    For XLA, which compiles slowly, it is the tree alone, on a cache of zeros."""
    slots = jnp.array([0, 0, 0, 1], jnp.int32)
    chain = decoder.Rows(
        tokens=jnp.array([7, 3, 90, 41], jnp.int32),
        slots=slots,
        positions=jnp.array([0, 1, 2, 0], jnp.int32),
        num_active=jnp.int32(4),
    )
    positions, branch = tree.layout(
        jnp.zeros((ROWS,), jnp.int32), start=jnp.int32(3), width=2
    )
    of_tree = chain.replace(
        tokens=jnp.array([5, 66, 23, 8], jnp.int32),
        slots=jnp.zeros((ROWS,), jnp.int32),
        positions=positions,
        num_active=jnp.int32(3),
        branch=branch,
    )
    return [of_tree] if impl == "xla" else [chain, of_tree]


def forward(target, *weights):
    """Returns the bits of K/V and logits, by weights, and the program's text."""
    kv = target.new_cache(2, capacity=16, page_size=8)
    for slot in (0, 1):
        kv = allocator.reserve(kv, jnp.int32(slot), jnp.int32(8))

    @jax.jit
    def run(params, kv):
        found = []
        for rows in slabs(target.impl):
            kv, outputs = target.forward_rows(params, rows, kv)
            found.append(outputs.logits[:3])
        return kv.k, kv.v, found

    compiled = run.lower(weights[0], kv).compile()
    found = [jax.tree.leaves(jax.device_get(compiled(one, kv))) for one in weights]
    return [list(map(testing.bits, each)) for each in found], compiled.as_text()


def same(a, b) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def close(a, b) -> bool:
    return all(
        np.allclose(one.view(np.float32), other.view(np.float32), rtol=1e-3, atol=1e-3)
        for one, other in zip(a, b, strict=True)
    )


def on_mesh(devices: int) -> shard.Layout:
    return shard.Layout(mesh=shard.mesh(devices))


def in_turn(partials):
    """Adds the sums of devices one after the other: a planted fault."""
    every = jax.lax.all_gather(collectives.tree_sum(partials), collectives.AXIS)
    return functools.reduce(jnp.add, [every[n] for n in range(every.shape[0])])


def check(folder: pathlib.Path, impl: str, form: str | None = None) -> dict:
    """Compares two meshes with each other, with one whose sums are in another order,
    with no mesh, and with no mesh and other norms and biases."""
    ([two], _), ([eight], text) = (
        forward(*model(folder, impl, on_mesh(devices), form)) for devices in (2, 8)
    )
    with mock.patch.object(collectives, "ordered_sum", in_turn):
        [other], _ = forward(*model(folder, impl, on_mesh(4), form))
    target, params = model(folder, impl, None, form)
    shifted = jax.tree.map(lambda x: x * 1.1 if x.ndim == 1 else x, params.layers)
    whole_and_wrong, _ = forward(target, params, params.replace(layers=shifted))
    return {
        "equal": [same(eight, each) for each in (two, other)],
        "close": [close(eight, each) for each in (other, *whole_and_wrong)],
        "all_reduce": "all-reduce" in text,
        "all_gathers": text.count("all-gather(") + text.count("all-gather-start("),
    }


PROMPTS = ["import os", "def f(x):"]


def rounds(lm, prompts, **settings) -> tuple[list[dict], list[list[int]]]:
    """Runs prompts together; returns hashes of each, and the drafts of all rounds."""
    run = run_lib.Run.make(lm, prompts, num_slots=len(prompts), **settings)
    watched = recorder.Recorder(target=run.scheduler.target)
    speculator = run.scheduler.speculator.replace(target=watched)
    state = watched.attach(run.scheduler.begin(*run.requests))
    step, drafts = jax.jit(round_lib.run_round), []
    while np.any(state.slots.running):
        before = state.slots.num_proposed
        state, info = step(speculator, state)
        counts = np.asarray(state.slots.num_proposed - before)
        pairs = zip(np.asarray(info.proposal.tokens), counts, strict=True)
        drafts += [tokens[:count].tolist() for tokens, count in pairs]
    return [one.hashes() for one in recorded_runs.evidence_in(state, run)], drafts


def generations(folders, drafter: str, **how) -> tuple[list, int]:
    """Returns hashes and drafts of decoding, of a batch of chains and of a tree; and
    the number of drafts."""
    target, draft = folders
    name = "draft-model" if drafter in ("cut", "gpt_neox", "q8_0") else drafter
    lm = sj.load(target, draft=draft, drafter=name, gamma_max=3,
                 cut_draft=drafter == "cut", **how)  # fmt: skip
    tree = lm.with_tree("2x2:4")
    settings = {"max_tokens": 10, "stop": ()}
    both = [sj.Sampling(temperature=0.0), sj.Sampling(temperature=0.7, seed=3)]
    found = [
        rounds(lm, PROMPTS, sampling=both, gamma=0, **settings),
        rounds(lm, PROMPTS, sampling=both, **settings),
        rounds(tree, PROMPTS[:1], **settings),
    ]
    return found, sum(len(tokens) for _, drafts in found for tokens in drafts)


def check_generations(folder: pathlib.Path, drafter: str, impl: str, *counts) -> dict:
    """Compares meshes of `counts` devices with the first, and with other sums. With
    "gpt_neox" both models are GPT-NeoX, with residuals one after the other."""
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "hidden_size": 24}
    form: dict = {}
    if drafter == "q8_0":  # Segments need whole blocks.
        heads["intermediate_size"] = 128
        form = {"weights": "q8_0", "segments": 2}
    if drafter == "gpt_neox":
        how = {"has_parallel_residual": False}
        target = write_neox(folder / "target", **how)
        draft = write_neox(folder / "draft", seed=1, **how)
    else:
        config = tiny_pair.config(num_layers=2, tie_word_embeddings=False, **heads)
        target = tiny_pair.write_model(folder / "target", config, seed=0)
        if drafter in tiny_pair.WRITE_HEAD:
            draft = tiny_pair.WRITE_HEAD[drafter](folder / "draft", target)
        else:
            other = tiny_pair.config(**heads)
            draft = tiny_pair.write_model(folder / "draft", other, seed=1)

    def found(count: int, **how):
        how = {"impl": impl, "mesh": shard.mesh(count)} | form | how
        return generations((target, draft), drafter, **how)

    made = [found(int(count)) for count in counts]
    first, drafts = made[0]
    other, _ = found(1, segments=1)
    return {
        "equal": [one == first for one, _ in made],
        "drafted": drafts > 0,
        "other_sums": other == first,
    }


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    random_weights.install()
    kind, *more = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "target"
        if kind == "generations":
            row = check_generations(folder, *more)
        else:
            form = kind if kind in ("q8_0", "q4_1") else None
            row = check(write(folder, kind), *more, form=form)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
