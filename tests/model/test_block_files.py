"""Files of published block drafters: read, written, changed and refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_weights
import safetensors.numpy
import test_eagle3_files as eagles
from block_cases import CASES, ORIGIN, TARGET

from spec_jax import testing
from spec_jax.model import (
    block_dialects as dialects,
    block_files,
    block_params,
    checkpoint_files as files,
    params as params_lib,
)


@pytest.fixture(scope="module")
def target_params():
    return params_lib.init(jax.random.key(9), TARGET, stddev=0.3)


def make_params(config, target_params) -> block_params.BlockParams:
    """Makes random weights, norms and biases too, so that an omitted one shows."""
    hot, size = None, config.draft_vocab_size
    if size < 96:
        hot = jnp.sort(jax.random.permutation(jax.random.key(4), 96)[:size])
    given = {"embed": target_params.embed, "lm_head": target_params.head, "hot": hot}
    made = block_params.init(jax.random.key(0), config, **given, stddev=0.3)
    keys = iter(random_weights.split(jax.random.key(1), 60))
    shared = {name: getattr(made, name) for name in ("hot", "embed", "lm_head")}

    def moved(leaf):
        noise = np.float32(0.3) * random_weights.normal(next(keys), leaf.shape)
        return jnp.asarray(np.asarray(leaf) + noise.astype(leaf.dtype))

    own = jax.tree.map(moved, made.replace(**dict.fromkeys(shared)))
    return own.replace(**shared)


def saved(folder, case, target_params, **how):
    """Saves a case's config and weights in a folder of its layout; returns both."""
    dialect, config = CASES[case]
    params = make_params(config, target_params)
    block_files.save(folder, config, params, dialect=dialect, origin=ORIGIN, **how)
    return config, params


def test_copies_of_the_target_may_be_left_out(target_params, tmp_path):
    """Fails if copies are stored, or if the loaded matrices are not the target's."""
    config, params = saved(tmp_path, "deepspec", target_params, copies=False)
    held = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(held)
    found = block_files.load(tmp_path, TARGET, target_params)
    assert found[0] == config
    testing.assert_same_bits(found[1], params)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_the_same(tmp_path, target_params, case):
    config, params = saved(tmp_path, case, target_params)
    loaded = block_files.load(tmp_path, TARGET, target_params)
    assert loaded[0] == config
    testing.assert_same_bits(loaded[1], params)
    assert loaded[1].embed is target_params.embed
    assert (loaded[1].lm_head is target_params.head) == (params.hot is None)
    raw = json.loads((tmp_path / "config.json").read_text())
    kind = "dspark" if config.has_dspark_heads else "dflash"
    assert dialects.kind_of(raw) == kind
    if case.startswith("speculators"):
        assert raw["sample_from_anchor"] is (config.slots == "anchor-first")


BAD_TENSORS = {
    "unexpected tensors: other": ("z-lab", lambda t: {"other": eagles.zeros(3)}),
    "missing tensors: markov_head.markov_w2":
        ("deepspec", lambda t: {"markov_head.markov_w2.weight": None}),
    "embed_tokens.weight is not the target's: it is a drafter for another":
        ("deepspec", lambda t: {"embed_tokens.weight": t["embed_tokens.weight"] + 1}),
    "lm_head.weight is not the target's":
        ("deepspec", lambda t: {"lm_head.weight": t["lm_head.weight"] + 1}),
    "missing tensors: lm_head.weight":
        ("speculators", lambda t: {"lm_head.weight": None}),
    "missing tensors: d2t": ("speculators", lambda t: {"d2t": None}),
    "missing tensors: candidate_selector.successor_codebook":
        ("dflash2", lambda t: {"candidate_selector.successor_codebook": None}),
    "unexpected tensors: layers.0.attention_conv.base_kernel": (
        "z-lab",
        lambda t: {"layers.0.attention_conv.base_kernel": eagles.zeros(2, 2, 48)}),
    "t2d marks 64": ("speculators", lambda t: {"t2d": ~t["t2d"]}),
}  # fmt: skip
"""Faults that are found by code for all heads are in `test_eagle3_files`."""


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_bad_tensors_are_refused(tmp_path, target_params, message):
    case, change = BAD_TENSORS[message]
    saved(tmp_path, case, target_params)
    eagles.rewrite(tmp_path, change)
    with pytest.raises(files.CheckpointError, match=message):
        block_files.load(tmp_path, TARGET, target_params)


def test_another_dtype_and_a_mask_of_its_own_are_refused(tmp_path, target_params):
    saved(tmp_path, "z-lab", target_params)
    with pytest.raises(ValueError, match="shares matrices with a target of float32"):
        block_files.load(tmp_path, TARGET, target_params, dtype="bfloat16")
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(files.CheckpointError, match="mask has an embedding of its own"):
        block_files.load(tmp_path, TARGET, target_params)


def test_variants_of_files_are_read(tmp_path, target_params):
    """Checks that SpecForge's early prefix, and a head without bias, are read."""
    _, params = saved(tmp_path, "specforge", target_params)

    def early(tensors):
        found = [name for name in tensors if "_head." in name]
        renamed = {f"logit_head.{name}": tensors[name] for name in found}
        return dict.fromkeys(found) | renamed

    eagles.rewrite(tmp_path, lambda t: {"confidence_head.proj.bias": None})
    eagles.rewrite(tmp_path, early)
    loaded = block_files.load(tmp_path, TARGET, target_params)[1]
    no_bias = jnp.zeros_like(params.confidence_bias)
    testing.assert_same_bits(loaded, params.replace(confidence_bias=no_bias))
