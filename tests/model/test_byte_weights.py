"""Models of eight bits: made as they are read, saved, loaded, lossless, refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import spec_jax as sj
from spec_jax import loading, run, testing
from spec_jax.model import (
    config as config_lib,
    families,
    fingerprint,
    gpt_neox,
    llama,
    load,
    params as params_lib,
    qwen2,
    row_model,
)
from spec_jax.ops import dispatch, weights
from spec_jax.parallel import shard


SIZES = {
    "vocab_size": 70,
    "hidden_size": 48,  # a block and a half
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
CONFIGS = {
    "qwen3": config_lib.Qwen3Config(**SIZES),
    "qwen3, untied": config_lib.Qwen3Config(**SIZES | {"tie_word_embeddings": False}),
    "qwen2": qwen2.Qwen2Config(**SIZES),
    "llama": llama.LlamaConfig(**SIZES),
    "gpt_neox": gpt_neox.GPTNeoXConfig(
        **SIZES | {"num_kv_heads": 4, "head_dim": 12, "tie_word_embeddings": False},
        rotary_size=4,
    ),
}
FORMS = ("native", "xla")


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def test_what_is_saved_is_loaded_again(config, tmp_path):
    """Fails if a bit is lost on the way, or one form has another fingerprint."""
    params = params_lib.init(jax.random.key(0), config, stddev=0.2)
    load.save(tmp_path / "dense", config, params)
    found, made = load.load(tmp_path / "dense", weights="q8_0")
    assert found == dataclasses.replace(config, weights="q8_0")
    testing.assert_same_bits(made, params_lib.to_bytes(params))
    assert weights.is_bytes(made.embed)
    load.save(tmp_path / "bytes", found, made)
    again, read = load.load(tmp_path / "bytes")
    assert again == found
    testing.assert_same_bits(read, made)
    both = [fingerprint.of_params(x) for x in (made, params)]
    assert both[0] != both[1]
    if "native" in families.of(config).IMPLS:
        _, packed = load.load(tmp_path / "bytes", impl="native")
        assert fingerprint.of_params(packed) == both[0]
        load.save(tmp_path / "packed", found, packed)
        testing.assert_same_bits(load.load(tmp_path / "packed")[1], made)
    with pytest.raises(ValueError, match="weights='dense', but those of the folder"):
        load.load(tmp_path / "bytes", weights="dense")
    with pytest.raises(ValueError, match="the config says config.weights='dense'"):
        load.save(tmp_path / "wrong", config, made)
    scales = made.embed.scales.at[3, 0].set(jnp.inf)
    spoiled = made.replace(embed=made.embed.replace(scales=scales))
    load.save(tmp_path / "spoiled", found, spoiled)
    with pytest.raises(load.CheckpointError, match=r"\[3, 0\] is inf in float16"):
        load.load(tmp_path / "spoiled")


def test_implementations_agree_in_every_family(config):
    """Fails if a matrix of a family is another one to the kernels than to XLA."""
    config = dataclasses.replace(config, weights="q8_0", dtype="float32")
    dense = params_lib.init(jax.random.key(0), config, stddev=0.2)
    made = params_lib.to_bytes(dense)
    written = {}
    for impl in FORMS:
        if impl not in families.of(config).IMPLS:
            pytest.skip(f"{config.model_type} has no {impl} kernels")
        try:
            dispatch.resolve(impl)
        except NotImplementedError as error:
            pytest.skip(str(error))
        for name, params in ((impl, made), (f"{impl}, dense", dense)):
            rows = row_model.RowModel(config=config, impl=impl, slab=8)
            kv = rows.new_cache(capacity=16, page_size=16)
            kv, _ = rows.prefill(params, kv, list(range(1, 17)), by_rows=True)
            written[name] = jnp.stack([*kv.k, *kv.v]).astype(jnp.float32)
    scale = jnp.abs(written["xla"]).max()
    away = lambda x, y: jnp.abs(written[x] - written[y]).mean() / scale
    near, far = away("native", "xla"), away("native", "native, dense")
    assert near < 2e-4 < 2e-3 < far, (near, far)


@pytest.mark.parametrize("drafter", ["draft-model", "suffix"])
def test_it_is_lossless(drafter):
    """Fails if rounds of a model of eight bits give other tokens than it alone."""
    lm = sj.load(weights="q8_0", drafter=drafter)
    assert "q8_0 and bfloat16" in lm.card()
    report = sj.check_lossless(lm, ["def add(a, b):", "import os"], max_tokens=24)
    assert report.equal and report.comparisons[0].rounds < 24, report
    dense = sj.load(drafter="ngram")
    assert run.provenance(lm) == run.provenance(dense) | {"weights": "q8_0"}


def test_refusals(tmp_path):
    """Fails if a combination without kernels is found out in the middle of a run."""
    with pytest.raises(ValueError, match="weights='q4_0' is not one of dense, q8_0"):
        sj.load(weights="q4_0")
    with pytest.raises(NotImplementedError, match="no kernels for impl='interpret'; t"):
        sj.load(weights="q8_0", impl="interpret")
    layout = shard.Layout(mesh=shard.mesh(1), segments=8)
    with pytest.raises(ValueError, match="'q8_0' are not cut over a mesh: leave out"):
        load.load(loading.EMBEDDED_TARGET, weights="q8_0", layout=layout)
