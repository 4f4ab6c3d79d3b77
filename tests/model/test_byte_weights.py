"""Models with weights of eight or four bits: saved, loaded, lossless, refused."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import pytest
import tiny_pair
from slow_cases import slow, slow_but

import spec_jax as sj
from spec_jax import loading, run, testing
from spec_jax.model import (
    config as config_lib,
    fingerprint,
    gpt_neox,
    llama,
    load,
    params as params_lib,
    qwen2,
    row_model,
    save as save_lib,
)
from spec_jax.ops import weights
from spec_jax.parallel import shard


SIZES = {
    "vocab_size": 70, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "hidden_size": 48,  # a block and a half
    "intermediate_size": 64, "dtype": "bfloat16",
}  # fmt: skip
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


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.mark.parametrize("form", ["q8_0", "q4_1"])
def test_what_is_saved_is_loaded_again(config, form, tmp_path):
    """Fails if a bit is lost on the way, or if packing changes the fingerprint."""
    params = params_lib.init(jax.random.key(0), config, stddev=0.2)
    save_lib.save(tmp_path / "dense", config, params)
    found, made = load.load(tmp_path / "dense", weights=form)
    assert found == dataclasses.replace(config, weights=form)
    testing.assert_same_bits(made, params_lib.to_bytes(params, form))
    outer = made.embed, made.lm_head or made.embed
    assert [weights.form(x) for x in outer] == ["q8_0", "q8_0"]
    layers = jax.tree.leaves(made.layers, is_leaf=weights.is_weight)
    assert {weights.form(x) for x in layers if len(x.shape) == 2} == {form}
    save_lib.save(tmp_path / "bytes", found, made)
    again, read = load.load(tmp_path / "bytes")
    assert again == found
    testing.assert_same_bits(read, made)
    both = [fingerprint.of_params(x) for x in (made, params)]
    assert both[0] != both[1]
    _, packed = load.load(tmp_path / "bytes", impl="native")
    assert fingerprint.of_params(packed) == both[0]
    save_lib.save(tmp_path / "packed", found, packed)
    testing.assert_same_bits(load.load(tmp_path / "packed")[1], made)
    with pytest.raises(ValueError, match="weights='dense', but those of the folder"):
        load.load(tmp_path / "bytes", weights="dense")
    with pytest.raises(ValueError, match="the config says config.weights='dense'"):
        save_lib.save(tmp_path / "wrong", config, made)
    scales = made.embed.scales.at[3, 0].set(jnp.inf)
    spoiled = made.replace(embed=made.embed.replace(scales=scales))
    save_lib.save(tmp_path / "spoiled", found, spoiled)
    with pytest.raises(load.CheckpointError, match=r"\[3, 0\] is inf in float16"):
        load.load(tmp_path / "spoiled")


@pytest.mark.parametrize("form", ["q8_0", slow("q4_1")])
@pytest.mark.parametrize("family", slow_but(CONFIGS, "qwen3"))
def test_implementations_agree_in_every_family(family, form):
    """Fails if the native kernels and XLA read a matrix of a family differently."""
    decoding.needs("native")
    config = dataclasses.replace(CONFIGS[family], weights=form, dtype="float32")
    dense = params_lib.init(jax.random.key(0), config, stddev=0.2)
    made = params_lib.to_bytes(dense, form)

    def written(impl, params):
        rows = row_model.RowModel(config=config, impl=impl, slab=8)
        kv = rows.new_cache(capacity=16, page_size=16)
        kv, _ = rows.prefill(params, kv, list(range(1, 17)), by_rows=True)
        return jnp.stack([*kv.k, *kv.v]).astype(jnp.float32)

    native, xla = written("native", made), written("xla", made)
    away = lambda other: jnp.abs(native - other).mean() / jnp.abs(xla).max()
    near, far = away(xla), away(written("native", dense))
    assert near < 2e-4 < 2e-3 < far, (near, far)


@pytest.mark.parametrize(
    "kind", ["eagle3", *map(slow, ("draft-model", "dflash", "dspark"))]
)
def test_drafters_of_eight_bits(kind, tmp_path):
    """Fails if a drafter's matrices stay dense, if its embedding of tokens does not, or
    if the tokens are not the baseline's."""
    target, draft = tiny_pair.write(tmp_path, kind)
    # Whether a matrix is in blocks of bytes; None if it is no matrix.
    of_form = lambda w: weights.is_bytes(w) if len(w.shape) == 2 else None
    for impl in ("native", "xla"):
        how = {"draft": draft, "drafter": kind, "impl": impl, "gamma_max": 3}
        both = [sj.load(target, **how, draft_weights=form) for form in (None, "q8_0")]
        dense, made = (params_lib.map_matrices(of_form, x.drafter_params) for x in both)
        is_of_tokens = ["embed"] * (kind != "draft-model")
        for path, is_bytes in jax.tree_util.tree_leaves_with_path(made):
            name = path[-1].name
            wanted = name not in (*is_of_tokens, "confidence") and is_bytes is not None
            assert is_bytes == wanted or is_bytes is None, jax.tree_util.keystr(path)
        assert not any(jax.tree.leaves(dense)) and any(jax.tree.leaves(made))
        if impl == "native":
            report = sj.check_lossless(both[1], ["import", "x = 1"], max_tokens=12)
            assert report.equal


@pytest.mark.parametrize("form", ["q8_0", "q4_1"])
def test_a_folder_with_copies_of_a_dense_target(form, tmp_path):
    """Fails if a copy of the target's dense matrix is refused, or another is not."""
    target, head = tiny_pair.write(tmp_path, "dspark")
    lm = sj.load(target, draft=head, drafter="dspark", weights=form)
    assert lm.drafter_params.embed is lm.params.embed
    config, params = load.load(target)
    save_lib.save(target, config, params.replace(embed=params.embed.at[7, 3].mul(2)))
    with pytest.raises(
        load.CheckpointError, match="embed_tokens.weight is not the tar"
    ):
        sj.load(target, draft=head, drafter="dspark", weights=form)


def load_pair(tmp_path, impl, form="q8_0", **how):
    target, draft = tiny_pair.write(tmp_path)
    how |= {"draft": draft, "drafter": "draft-model", "dtype": "bfloat16"}
    forms = {"weights": form, "draft_weights": form}
    return sj.load(target, **how, **forms, impl=impl, gamma_max=2)


def test_it_is_prepared_for_a_gpu(tmp_path):
    """Fails if weights are not laid out in tiles once, if a bit is lost, or if prompts
    are not prefilled by rows."""
    lm, native = (load_pair(tmp_path, impl) for impl in ("interpret", "native"))
    for params in (lm.params, lm.drafter_params):
        assert isinstance(params.layers[0].down, weights.Tiles)
    assert lm.target.prefills_by_rows
    assert fingerprint.of_params(lm.params) == fingerprint.of_params(native.params)
    again = weights.prepare(lm.params.embed, "native")
    testing.assert_same_bits(again, native.params.embed)


@pytest.mark.parametrize(
    ("impl", "form", "tree"),
    [
        ("native", "q8_0", None),
        slow("native", "q8_0", "2x2:4"),
        slow("native", "q4_1", None),
        slow("native", "q4_1", "2x2:4"),
        slow("interpret", "q8_0", None),
    ],
)
def test_it_is_lossless_on_each_kernel(impl, form, tree, tmp_path):
    """Fails if rounds give other tokens than the baseline; "interpret" reads tiles."""
    decoding.needs(impl)
    lm = load_pair(tmp_path, impl, form, tree=tree)
    said = {"q8_0": "q8_0 and bf", "q4_1": "q4_1, q8_0 of the vocabulary, and bf"}
    assert said[form] in lm.card() and run.provenance(lm)["weights"] == form
    assert sj.check_lossless(lm, ["import"], max_tokens=6).equal


def test_refusals(tmp_path):
    """Fails if a combination without kernels, or a bad file, is not refused at once."""
    params = params_lib.init(jax.random.key(0), CONFIGS["qwen3"])
    eight, four = (params_lib.to_bytes(params, form) for form in ("q8_0", "q4_1"))
    of_eight, of_four = (
        dataclasses.replace(CONFIGS["qwen3"], weights=form) for form in ("q8_0", "q4_1")
    )
    save_lib.save(tmp_path / "blocks", of_eight, eight)
    down = four.layers[1].down
    down = down.replace(minima=down.minima.at[2, 1].set(jnp.nan))
    spoiled = four.layers[0], four.layers[1].replace(down=down)
    save_lib.save(tmp_path / "spoiled", of_four, four.replace(layers=spoiled))
    mesh, target = shard.mesh(1), loading.EMBEDDED_TARGET
    eighths = shard.Layout(mesh=mesh, segments=8)
    on_gpu = {"impl": "interpret", "layout": eighths}
    for words, call in {
        "weights='q4_0' is not one of dense, q8_0, q": lambda: sj.load(weights="q4_0"),
        "draft_weights='q4_0' is not one of dense, q":
            lambda: sj.load(draft_weights="q4_0"),
        r"segments=8 is \d+ a segment, and blocks of weights='q4_1' have 32: take":
            lambda: load.load(target, weights="q4_1", layout=eighths),
        "'q8_0' are not cut over a mesh of GPUs: lea":
            lambda: load.load(target, weights="q8_0", **on_gpu),
        "'q4_1' have no kernels on a GPU: take weigh":
            lambda: load.load(target, weights="q4_1", impl="interpret"),
        "blocks in files are not cut over a mesh: lo":
            lambda: load.load(tmp_path / "blocks",
                              layout=shard.Layout(mesh=mesh, segments=1)),
        "config.weights='q4_1', the weights are other":
            lambda: save_lib.save(tmp_path / "wrong", of_four, eight),
        r"down.*\[2, 1\] is nan in float16": lambda: load.load(tmp_path / "spoiled"),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(NotImplementedError, match="no kernels on a GPU"):
        params_lib.prepare_matrices(params, "interpret", form="q4_1")
