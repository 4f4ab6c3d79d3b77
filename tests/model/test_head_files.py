"""Files of published heads: read, written, changed, refused, compared with float64."""

import dataclasses
import json

import decoding
import eagle3_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import test_eagle3_head as heads
from model import head_layouts as layouts
from model.head_layouts import CASES, EAGLE, TARGET
from slow_cases import slow

from spec_jax import testing
from spec_jax.model import (
    block_dialects,
    checkpoint_files as files,
    eagle3_files,
    head_files,
    params as params_lib,
)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_the_same(tmp_path, case):
    config, params = layouts.save(tmp_path, case)
    found, loaded = layouts.load(tmp_path, case)
    assert found == config
    testing.assert_same_bits(loaded, params)
    target = layouts.target_params()
    assert loaded.embed is target.embed
    if layouts.is_block(config):
        assert (loaded.lm_head is target.head) == (params.hot is None)
        raw = json.loads((tmp_path / "config.json").read_text())
        kind = "dspark" if config.has_dspark_heads else "dflash"
        assert block_dialects.kind_of(raw) == kind
        if case.startswith("speculators"):
            assert raw["sample_from_anchor"] is (config.slots == "anchor-first")


IMPLS = [
    ("speculators eagle3", "xla"),
    ("parallel", "xla"),
    slow("deepspec eagle3", "xla"),
    slow("midlayer with a window", "xla"),
    ("deepspec eagle3", "native"),
    ("midlayer 3.1", "native"),
    ("speculators with a window", "native"),
    ("parallel of Qwen3", "native"),
    ("flat parallel", "native"),
]


@pytest.mark.parametrize(("case", "impl"), IMPLS)
def test_parity_with_float64(tmp_path, case, impl):
    """Fails if a tensor is read as another one, or a step is left out, in rows on pages
    or in the whole sequences of training."""
    decoding.needs(impl)
    config, made = layouts.save(tmp_path, case)
    head = oracle.Head(
        config=json.loads((tmp_path / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(tmp_path / files.SINGLE_FILE),
        embed=np.asarray(layouts.target_params().embed),
    )
    features, tokens = heads.inputs(config, 9)
    if config.is_parallel:  # Pairs read no hidden state; `test_heads` tests masks.
        features, tokens = features[:7], tokens[:7]
    num_own = len(tokens) - 7
    expected = oracle.run(head, features[:7].astype(float), tokens, num_own=num_own)
    params = layouts.load(tmp_path, case, impl=impl)[1]
    ours = heads.chain_by_rows(
        params, config, impl, features[:7], tokens, num_own=num_own
    )
    for part, wide in zip(ours, expected, strict=True):
        reduction = 400 * config.layer.num_layers**2
        testing.assert_rows_close(part, wide, dtype="float32", reduction=reduction)
    near = {"dtype": "float32", "reduction": 300}
    if not config.is_parallel:
        steps = heads.sequences(made, config, features[None, :7], tokens[None], num_own)
        for name, wide in zip(("hidden", "logits"), expected[:2], strict=True):
            first = np.asarray(getattr(steps[0], name)[0])
            own = [np.asarray(getattr(step, name)[0, -1]) for step in steps[1:]]
            testing.assert_rows_close(np.concatenate([first, own]), wide, **near)
        testing.assert_rows_close(steps[0].k[0], expected[2][:7], **near)
    with pytest.raises(AssertionError, match="are off"):
        testing.assert_rows_close(ours[1][1:], expected[1][:-1], **near)


def test_a_published_parallel_head_of_8b(tmp_path):
    """Fails if SpecForge's config for Qwen3-8B is refused once it states its mask, or a
    tensor has another name or shape than in SpecForge's and speculators' own code."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    raw = sizes | {
        "architectures": ["PEagleDraftModel"], "model_type": "llama",
        "num_hidden_layers": 4, "vocab_size": 151936, "draft_vocab_size": 32000,
        "max_position_embeddings": 40960, "rope_theta": 1000000,
        "tie_word_embeddings": False, "pard_token": 151669,
    }  # fmt: skip
    target = dataclasses.replace(
        TARGET, hidden_size=4096, vocab_size=151936, num_layers=36
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    dialect, config = eagle3_files.FAMILY.read_config(path, target)
    assert (dialect, config.taps) == ("midlayer", (2, 18, 33))
    names = eagle3_files.FAMILY.tensors(config, dialect, embed=True, lm_head=True)
    shapes = dict(part for leaf in jax.tree.leaves(names) for part in leaf.parts)
    expected = {
        "mask_hidden": (1, 1, 12288),
        "fc.weight": (4096, 12288),
        "embed_tokens.weight": (151936, 4096),
        "lm_head.weight": (32000, 4096),
        "layers.0.hidden_norm.weight": (4096,),
        "layers.0.self_attn.q_proj.weight": (4096, 8192),
        "layers.1.self_attn.q_proj.weight": (4096, 4096),
        "layers.3.self_attn.k_proj.weight": (1024, 4096),
        "layers.3.mlp.down_proj.weight": (4096, 12288),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert len(shapes) == 5 + 4 * 9 + 1  # fc, mask, norm, head, embedding; hidden_norm
    origin = dataclasses.replace(layouts.ORIGIN, target=target)
    raw = eagle3_files.to_dict(config, "speculators", origin)
    path.write_text(json.dumps(raw))
    assert eagle3_files.FAMILY.read_config(path, target) == ("speculators", config)


def test_an_embedding_of_its_own_is_kept(tmp_path):
    """Fails if a head loses its own embedding; DeepSpec's must equal the target's."""
    for case in ("speculators of Qwen3", "deepspec eagle3"):
        params = layouts.make_params(CASES[case][1])
        own = params.replace(embed=params.embed + 1)
        layouts.save(tmp_path, case, params=own)
        if case == "speculators of Qwen3":
            loaded = layouts.load(tmp_path, case)[1]
            testing.assert_same_bits(loaded.embed, own.embed)
    with pytest.raises(files.CheckpointError, match="for another target"):
        layouts.load(tmp_path, case)


def test_a_rounded_embedding_is_known_by_its_copy(tmp_path):
    """Fails if a head is taken for another target's because the target has blocks."""
    layouts.save(tmp_path, "deepspec eagle3")
    rounded = params_lib.to_bytes(layouts.target_params())
    found = eagle3_files.load(tmp_path, TARGET, rounded)[1]
    assert found.embed is rounded.embed


def test_a_shared_projection_is_rows_of_the_target(tmp_path):
    """Fails if it is in the file, too, or is not the draft tokens' rows of another
    target, in the head's own dtype."""
    case = "midlayer that shares"
    _, made = layouts.save(tmp_path, case)
    held = safetensors.numpy.load_file(tmp_path / files.SINGLE_FILE)
    assert head_files.LM_HEAD not in held
    other = params_lib.init(jax.random.key(3), TARGET, stddev=0.3)
    _, found = eagle3_files.load(tmp_path, TARGET, other, dtype="bfloat16")
    rows = other.head[made.hot].astype(jnp.bfloat16)
    testing.assert_same_bits(found.lm_head, rows)


def test_copies_of_the_target_may_be_left_out(tmp_path):
    """Fails if copies are stored, or if the loaded matrices are not the target's."""
    config, params = layouts.save(tmp_path, "deepspec", copies=False)
    held = safetensors.numpy.load_file(tmp_path / files.SINGLE_FILE)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(held)
    found = layouts.load(tmp_path, "deepspec")
    assert found[0] == config
    testing.assert_same_bits(found[1], params)


def test_pickled_weights_are_refused_with_a_command_that_helps(tmp_path, monkeypatch):
    """Fails if the file that the command writes does not have the same bits."""
    torch = pytest.importorskip("torch")
    import safetensors.torch

    made = layouts.make_params(EAGLE, "bfloat16")
    config = layouts.with_dtype(EAGLE, "bfloat16")
    how = {"dialect": "midlayer", "origin": layouts.ORIGIN}
    eagle3_files.save(tmp_path, config, made, **how)
    path = tmp_path / files.SINGLE_FILE
    torch.save(safetensors.torch.load_file(path), tmp_path / head_files.PICKLED)
    path.unlink()
    words = "which is not read; in that f"
    with pytest.raises(files.CheckpointError, match=words) as e:
        layouts.load(tmp_path, "midlayer", dtype="bfloat16")
    program = str(e.value).split(' -c "')[1].removesuffix('"')
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    loaded = layouts.load(tmp_path, "midlayer", dtype="bfloat16")
    testing.assert_same_bits(loaded[1].replace(embed=None), made.replace(embed=None))


def rewrite(folder, change) -> None:
    """Replaces tensors of a file by those of `change(tensors)`; None removes one."""
    path = folder / files.SINGLE_FILE
    held = safetensors.numpy.load_file(path)
    held |= change(held)
    held = {name: x for name, x in held.items() if x is not None}
    safetensors.numpy.save_file(held, path)


def zeros(*shape):
    return np.zeros(shape, np.float32)


def moved(table, at, by):
    table = table.copy()
    table[at] += by
    return {"d2t": table}


BAD_TENSORS = [
    ("midlayer", "unexpected tensors: mask_hidden",
     lambda t: {"mask_hidden": zeros(1, 1, 144)}),
    ("midlayer", "missing tensors: fc.weight", lambda t: {"fc.weight": None}),
    ("midlayer", "missing tensors: d2t", lambda t: {"d2t": None}),
    ("midlayer", "fc.bias: heads with biases are not supported",
     lambda t: {"fc.bias": zeros(48)}),
    ("midlayer", "unexpected tensors: other", lambda t: {"other": zeros(3)}),
    ("midlayer",
     r"fc.weight has shape \[48, 96\], config.json for this target asks for \[48, 1",
     lambda t: {"fc.weight": zeros(48, 96)}),
    ("midlayer", "norm.weight is int64",
     lambda t: {"norm.weight": np.ones(48, np.int64)}),
    ("midlayer", "norm.weight.* is nan", lambda t: {"norm.weight": zeros(48) + np.nan}),
    ("midlayer",
     r"d2t\[31\]=\d+ makes draft token 31 the token \d+, of a vocabulary of 96",
     lambda t: moved(t["d2t"], 31, 90)),
    ("midlayer", r"d2t\[0\]=-\d+ makes draft token 0 the token -\d+",
     lambda t: moved(t["d2t"], 0, -90)),
    ("midlayer", "has a token twice",
     lambda t: moved(t["d2t"], 1, t["d2t"][0] - t["d2t"][1] - 1)),
    ("midlayer", "t2d marks 64 tokens, d2t names 32", lambda t: {"t2d": ~t["t2d"]}),
    ("midlayer", "t2d marks 32 tokens, d2t names 32, and they are not the same",
     lambda t: {"t2d": np.roll(t["t2d"], 1)}),
    ("midlayer that shares", "unexpected tensors: lm_head.weight",
     lambda t: {"lm_head.weight": zeros(32, 48)}),
    ("z-lab", "unexpected tensors: other", lambda t: {"other": zeros(3)}),
    ("z-lab", "unexpected tensors: layers.0.attention_conv.base_kernel",
     lambda t: {"layers.0.attention_conv.base_kernel": zeros(2, 2, 48)}),
    ("deepspec", "missing tensors: markov_head.markov_w2",
     lambda t: {"markov_head.markov_w2.weight": None}),
    ("deepspec", "embed_tokens.weight is not the target's: it is a drafter for another",
     lambda t: {"embed_tokens.weight": t["embed_tokens.weight"] + 1}),
    ("deepspec", "lm_head.weight is not the target's",
     lambda t: {"lm_head.weight": t["lm_head.weight"] + 1}),
    ("speculators", "missing tensors: lm_head.weight",
     lambda t: {"lm_head.weight": None}),
    ("speculators", "missing tensors: d2t", lambda t: {"d2t": None}),
    ("dflash2", "missing tensors: candidate_selector.successor_codebook",
     lambda t: {"candidate_selector.successor_codebook": None}),
    ("speculators", "t2d marks 64", lambda t: {"t2d": ~t["t2d"]}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "message", "change"), BAD_TENSORS)
def test_bad_tensors_are_refused(tmp_path, case, message, change):
    layouts.save(tmp_path, case)
    rewrite(tmp_path, change)
    with pytest.raises(files.CheckpointError, match=message):
        layouts.load(tmp_path, case)


def test_another_dtype_and_a_mask_of_its_own_are_refused(tmp_path):
    layouts.save(tmp_path, "z-lab")
    with pytest.raises(ValueError, match="shares matrices with a target of float32"):
        layouts.load(tmp_path, "z-lab", dtype="bfloat16")
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(files.CheckpointError, match="mask has an embedding of its own"):
        layouts.load(tmp_path, "z-lab")


def test_variants_of_files_are_read(tmp_path):
    """Checks that SpecForge's early prefix, and a head without bias, are read."""
    _, params = layouts.save(tmp_path, "specforge")

    def early(tensors):
        found = [name for name in tensors if "_head." in name]
        renamed = {f"logit_head.{name}": tensors[name] for name in found}
        return dict.fromkeys(found) | renamed

    rewrite(tmp_path, lambda t: {"confidence_head.proj.bias": None})
    rewrite(tmp_path, early)
    loaded = layouts.load(tmp_path, "specforge")[1]
    no_bias = jnp.zeros_like(params.confidence_bias)
    testing.assert_same_bits(loaded, params.replace(confidence_bias=no_bias))
