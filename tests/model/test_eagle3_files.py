"""Published EAGLE-3 heads: read, written, refused, and run against float64."""

import dataclasses
import json

import block_cases
import eagle3_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import test_eagle3_head as heads
from slow_cases import slow

from spec_jax import testing
from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    eagle3_dialects as dialects,
    eagle3_files,
    head_dialects,
    head_files,
    params as params_lib,
)


TARGET = heads.TARGET
ORIGIN = head_dialects.Origin(target=TARGET, target_name="a target")
SMALL = heads.HEAD
WHOLE = dataclasses.replace(
    SMALL, draft_vocab_size=96, has_head_norms=True, taps=(1, 2, 4, 5, 7)
)
PARALLEL = dataclasses.replace(
    SMALL, layer=dataclasses.replace(SMALL.layer, num_layers=2), mask_token_id=95
)
CASES = {
    name: (name.split()[0], dataclasses.replace(SMALL, **changes))
    for name, changes in {
        "midlayer": {},
        "midlayer 3.1": {"fc_norm": True, "norm_output": True},
        "midlayer with a window": {"window": 3},
        "midlayer that shares": {"shares_head": True},
        "speculators": {"norm_before_residual": True, "norm_before_fc": True},
        "speculators of Qwen3": {"has_head_norms": True},
        "speculators with a window": {"window": 3, "has_head_norms": True},
    }.items()
} | {
    "deepspec": ("deepspec", WHOLE),
    "deepspec with a window": ("deepspec", dataclasses.replace(WHOLE, window=2048)),
    "parallel": ("speculators", PARALLEL),
    "parallel of Qwen3": ("speculators", dataclasses.replace(
        PARALLEL, has_head_norms=True, fc_norm=True, norm_before_residual=True)),
    "flat parallel": ("midlayer", dataclasses.replace(PARALLEL, window=4)),
}  # fmt: skip


@pytest.fixture(scope="module")
def target_params():
    return params_lib.init(jax.random.key(9), TARGET, stddev=0.3)


def make_head(config, target_params, *, dtype="float32"):
    """Makes random weights on the target's embedding, and draws the draft tokens."""
    params = heads.make_params(config, dtype).replace(embed=target_params.embed)
    if params.hot is None:
        return params
    drawn = np.random.default_rng(4).permutation(96)[: config.draft_vocab_size]
    hot = jnp.asarray(np.sort(drawn), jnp.int32)
    head = target_params.head[hot] if config.shares_head else params.lm_head
    return params.replace(hot=hot, lm_head=head)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_the_same(tmp_path, target_params, case):
    dialect, config = CASES[case]
    params = make_head(config, target_params)
    eagle3_files.save(tmp_path, config, params, dialect=dialect, origin=ORIGIN)
    loaded = eagle3_files.load(tmp_path, TARGET, target_params)
    assert loaded[0] == config
    testing.assert_same_bits(loaded[1], params)
    assert loaded[1].embed is target_params.embed


IMPLS = [
    ("speculators", "xla"),
    ("parallel", "xla"),
    slow("deepspec", "xla"),
    slow("midlayer with a window", "xla"),
    ("midlayer 3.1", "native"),
    ("speculators with a window", "native"),
    ("parallel of Qwen3", "native"),
    ("flat parallel", "native"),
]


@pytest.mark.parametrize(("case", "impl"), IMPLS)
def test_parity_with_float64(tmp_path, target_params, case, impl):
    """Fails if a tensor is read as another one, or a step is left out."""
    heads.decoding.needs(impl)
    dialect, config = CASES[case]
    params = make_head(config, target_params)
    eagle3_files.save(tmp_path, config, params, dialect=dialect, origin=ORIGIN)
    head = oracle.Head(
        config=json.loads((tmp_path / "config.json").read_text()),
        tensors=safetensors.numpy.load_file(tmp_path / files.SINGLE_FILE),
        embed=np.asarray(target_params.embed),
    )
    features, tokens = heads.inputs(config, 9)
    if config.is_parallel:  # Pairs read no hidden state; `test_heads` tests masks.
        features, tokens = features[:7], tokens[:7]
    num_own = len(tokens) - 7
    expected = oracle.run(head, features[:7].astype(float), tokens, num_own=num_own)
    params = eagle3_files.load(tmp_path, TARGET, target_params, impl=impl)[1]
    ours = heads.chain_by_rows(
        params, config, impl, features[:7], tokens, num_own=num_own
    )
    for part, wide in zip(ours, expected, strict=True):
        reduction = 400 * config.layer.num_layers**2
        testing.assert_rows_close(part, wide, dtype="float32", reduction=reduction)
    # Whole sequences equal rows, see `test_eagle3_head`.
    if impl == "xla" and not config.is_parallel:
        sequence = heads._sequence(params, config, tokens[None, :7], features[None, :7])
        testing.assert_rows_close(
            sequence.logits[0], expected[1][:7], dtype="float32", reduction=300
        )
    with pytest.raises(AssertionError, match="are off"):
        testing.assert_rows_close(
            ours[1][1:], expected[1][:-1], dtype="float32", reduction=300
        )


OWNERS = {
    "midlayer": ({}, (*dialects._FLAGS, "load_lm_head_from_target")),
    "midlayer that shares": ({"load_lm_head_from_target": True}, dialects._FLAGS),
    "midlayer 3.1": (
        {"fc_norm": True, "norm_output": True},
        ("norm_before_fc", "norm_before_residual")),
    "speculators": (
        {"speculators_config": block_cases.speculators("eagle3", 5),
         "norm_output": False}, ()),
    "parallel": (
        {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle",
         "speculators_config": block_cases.speculators("peagle", 5),
         "mask_token_id": 95}, ()),
    "deepspec": (
        {"num_target_layers": 8, "target_layer_ids": [0, 1, 3, 4, 6],
         "target_model_name_or_path": "a target", "ttt_length": 5,
         "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
         "layer_types": ["full_attention"], "tie_word_embeddings": False},
        (*dialects._FLAGS, "target_hidden_size", "draft_vocab_size")),
}  # fmt: skip
"""Keys that each owner's own code writes, and keys that it does not write."""


@pytest.mark.parametrize("case", OWNERS)
def test_a_config_has_the_keys_of_its_owner(case):
    """Fails if a key is missing that the owner's program needs to accept the file, or
    if a key is written that it would misread."""
    dialect, config = CASES[case]
    origin = dataclasses.replace(ORIGIN, ttt_length=5)
    raw = dialects.to_dict(config, dialect, origin)
    stated, left_out = OWNERS[case]
    assert {key: raw[key] for key in stated} == stated
    assert not set(left_out) & raw.keys()


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
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    target = dataclasses.replace(
        TARGET, hidden_size=4096, vocab_size=151936, num_layers=36
    )
    dialect, config = dialects.read_config(path, target)
    assert (dialect, config.taps) == ("midlayer", (2, 18, 33))
    names = eagle3_files._names(config, dialect, has_embed=True)
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
    origin = head_dialects.Origin(target=target)
    path.write_text(json.dumps(dialects.to_dict(config, "speculators", origin)))
    assert dialects.read_config(path, target) == ("speculators", config)


def test_llama3_rope_is_read_and_written(tmp_path):
    """Fails if a head whose layer was copied from Llama 3.1's config is refused, or has
    other angles of RoPE."""
    scaling = config_lib.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )  # fmt: skip
    layer = dataclasses.replace(SMALL.layer, scaling=scaling)
    config = dataclasses.replace(SMALL, layer=layer)
    raw = dialects.to_dict(config, "speculators", ORIGIN)
    stated = raw["transformer_layer_config"]
    assert stated["model_type"] == "llama"
    assert stated["rope_scaling"]["rope_type"] == "llama3"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert dialects.read_config(path, TARGET)[1] == config


def test_taps_are_where_each_reader_looks():
    """Fails if the taps are in only one of two places.

    llama.cpp's converter looks beside `eagle_config` and, where it finds none, silently
    takes its default layers; SGLang looks inside.
    """
    config = dataclasses.replace(SMALL, taps=(1, 3, 7))
    raw = dialects.to_dict(config, "midlayer", ORIGIN)
    assert raw[AUX] == raw["eagle_config"][AUX] == [1, 3, 7]


def test_a_shared_projection_is_rows_of_the_target(tmp_path, target_params):
    """Fails if it is in the file, too, or is not the draft tokens' rows of another
    target, in the head's own dtype."""
    dialect, config = CASES["midlayer that shares"]
    params = make_head(config, target_params)
    eagle3_files.save(tmp_path, config, params, dialect=dialect, origin=ORIGIN)
    held = safetensors.numpy.load_file(tmp_path / files.SINGLE_FILE)
    assert head_files.LM_HEAD not in held
    other = params_lib.init(jax.random.key(3), TARGET, stddev=0.3)
    _, found = eagle3_files.load(tmp_path, TARGET, other, dtype="bfloat16")
    rows = other.head[params.hot].astype(jnp.bfloat16)
    testing.assert_same_bits(found.lm_head, rows)
    rewrite(tmp_path, lambda t: {head_files.LM_HEAD: np.asarray(params.lm_head)})
    with pytest.raises(files.CheckpointError, match="unexpected tensors: lm_head"):
        eagle3_files.load(tmp_path, TARGET, target_params)


def test_an_embedding_of_its_own_is_kept(tmp_path, target_params):
    """Fails if a head loses its own embedding; DeepSpec's must equal the target's."""
    for config, dialect in ((SMALL, "speculators"), (WHOLE, "deepspec")):
        params = make_head(config, target_params)
        own = params.replace(embed=params.embed + 1)
        eagle3_files.save(tmp_path, config, own, dialect=dialect, origin=ORIGIN)
        if config is SMALL:
            loaded = eagle3_files.load(tmp_path, TARGET, target_params)[1]
            testing.assert_same_bits(loaded.embed, own.embed)
    with pytest.raises(files.CheckpointError, match="for another target"):
        eagle3_files.load(tmp_path, TARGET, target_params)


def test_pickled_weights_are_refused_with_a_command_that_helps(
    tmp_path, target_params, monkeypatch
):
    """Fails if the file that the command writes does not have the same bits."""
    torch = pytest.importorskip("torch")
    import safetensors.torch

    config = heads.with_dtype(SMALL, "bfloat16")
    params = make_head(config, target_params, dtype="bfloat16")
    eagle3_files.save(tmp_path, config, params, dialect="midlayer", origin=ORIGIN)
    path = tmp_path / files.SINGLE_FILE
    torch.save(safetensors.torch.load_file(path), tmp_path / head_files.PICKLED)
    path.unlink()
    with pytest.raises(
        files.CheckpointError, match="which is not read; in that f"
    ) as e:
        eagle3_files.load(tmp_path, TARGET, target_params, dtype="bfloat16")
    program = str(e.value).split(' -c "')[1].removesuffix('"')
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    loaded = eagle3_files.load(tmp_path, TARGET, target_params, dtype="bfloat16")
    testing.assert_same_bits(loaded[1].replace(embed=None), params.replace(embed=None))


@pytest.fixture
def folder(tmp_path, target_params):
    """Saves a good head, which tests then break; returns its folder."""
    params = make_head(SMALL, target_params)
    eagle3_files.save(tmp_path, SMALL, params, dialect="midlayer", origin=ORIGIN)
    return tmp_path


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


BAD_TENSORS = {
    "unexpected tensors: mask_hidden": lambda t: {"mask_hidden": zeros(1, 1, 144)},
    "missing tensors: fc.weight": lambda t: {"fc.weight": None},
    "missing tensors: d2t": lambda t: {"d2t": None},
    "fc.bias: heads with biases are not supported": lambda t: {"fc.bias": zeros(48)},
    "unexpected tensors: other": lambda t: {"other": zeros(3)},
    r"fc.weight has shape \[48, 96\], config.json for this target asks for \[48, 1":
        lambda t: {"fc.weight": zeros(48, 96)},
    "norm.weight is int64": lambda t: {"norm.weight": np.ones(48, np.int64)},
    "norm.weight.* is nan": lambda t: {"norm.weight": zeros(48) + np.nan},
    r"d2t\[31\]=\d+ makes draft token 31 the token \d+, of a vocabulary of 96":
        lambda t: moved(t["d2t"], 31, 90),
    r"d2t\[0\]=-\d+ makes draft token 0 the token -\d+":
        lambda t: moved(t["d2t"], 0, -90),
    "has a token twice": lambda t: moved(t["d2t"], 1, t["d2t"][0] - t["d2t"][1] - 1),
    "t2d marks 64 tokens, d2t names 32": lambda t: {"t2d": ~t["t2d"]},
    "t2d marks 32 tokens, d2t names 32, and they are not the same":
        lambda t: {"t2d": np.roll(t["t2d"], 1)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_bad_tensors_are_refused(folder, target_params, message):
    rewrite(folder, BAD_TENSORS[message])
    with pytest.raises(files.CheckpointError, match=message):
        eagle3_files.load(folder, TARGET, target_params)


AUX, PARALLELS = "eagle_aux_hidden_state_layer_ids", ["PEagleDraftModel"]
BAD_CONFIGS = {
    r"Eagle4.* no dialect of .*LlamaForCausalLMEagle3.*PEagleDraftModel":
        {"architectures": ["Eagle4"]},
    "no mask_token_id: state the token of the masks": {"architectures": PARALLELS},
    "mask_token_id, pard_token: state the token":
        {"architectures": PARALLELS, "mask_token_id": 3, "pard_token": 4},
    "mask_token_id=96 is outside the target's embedding of 96 rows":
        {"architectures": PARALLELS, "pard_token": 96},
    r"speculators_model_type='peagle' with architectures=\['Eagle3Dr":
        {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "peagle"},
    "all layers of a head slide, or none":
        {"architectures": PARALLELS, "pard_token": 3, "num_hidden_layers": 2,
         "layer_types": ["sliding_attention", "full_attention"],
         "use_sliding_window": True, "sliding_window": 4},
    "bias is true: heads with biases": {"bias": True},
    "layer_types='full_attention': each layer is one of":
        {"layer_types": "full_attention"},
    "rope_is_neox_style=False is not": {"rope_is_neox_style": False},
    "num_hidden_layers=2: only": {"num_hidden_layers": 2},
    "load_lm_head_from_target=1 must be": {"load_lm_head_from_target": 1},
    "fc_norm='yes' must be true or false": {"fc_norm": "yes"},
    r"\[2, 4, 3\], and in eagle_config \[.*\]: remove the wrong one":
        {AUX: [2, 4, 3]},
    r"taps=\(2, 4, 8\) of a target with 8 layers":
        {AUX: [2, 4, 8], "eagle_config": {}},
    "a vocabulary of 97, .* a head for another target": {"vocab_size": 97},
    "norm_before_fc and fc_norm are both true":
        {"fc_norm": True, "norm_before_fc": True},
    "num_target_layers=9, the target has 8: it is a drafter for another":
        {"num_target_layers": 9},
    "no head_dim, and hidden_size=48 is no multiple of num_attention_heads=7":
        {"head_dim": None, "num_attention_heads": 7},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_bad_configs_are_refused(folder, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | BAD_CONFIGS[message]))
    with pytest.raises(files.CheckpointError, match=message):
        dialects.read_config(path, TARGET)


@pytest.mark.parametrize(
    ("dialect", "changes", "message"),
    [
        ("other", {}, "dialect='other' is not one of midlayer, speculators, deepspec"),
        ("midlayer", {"has_head_norms": True}, "not of midlayer"),
        ("deepspec", {}, "deepspec has norms of queries and keys"),
        ("deepspec", {"has_head_norms": True}, "deepspec has the whole vocabulary"),
        (
            "deepspec",
            {"has_head_norms": True, "draft_vocab_size": 96, "target_hidden_size": 40},
            "a head of width 48 for a target of width 40: deepspec's have the",
        ),
        ("deepspec", {"mask_token_id": 3}, "deepspec has no parallel heads"),
        ("speculators", {"shares_head": True}, "own one: of midlayer alone"),
        ("midlayer", {"shares_head": True, "mask_token_id": 3}, "of no parallel heads"),
        (
            "midlayer",
            {"shares_head": True, "target_hidden_size": 40},
            "width 48 for a target of width 40 cannot share",
        ),
    ],
)
def test_a_dialect_without_words_for_a_head(tmp_path, dialect, changes, message):
    config = dataclasses.replace(SMALL, **changes)
    with pytest.raises(ValueError, match=message):
        eagle3_files.save(
            tmp_path, config, heads.make_params(SMALL), dialect=dialect, origin=ORIGIN
        )
