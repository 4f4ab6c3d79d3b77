"""Configs of heads: bad ones are refused, published ones are read."""

import dataclasses
import json
import math

import pytest
from model import head_layouts as layouts
from model.head_layouts import CASES, DFLASH, EAGLE, ORIGIN, TARGET, with_heads

from spec_jax.model import (
    block_params,
    checkpoint_files as files,
    config as config_lib,
    eagle3_files,
)


def nested(**changes):
    """Returns a change of the values under `dflash_config`."""
    return {"dflash_config": changes}


def to_dict(config, dialect, origin=ORIGIN):
    """Returns the object that `config.json` holds."""
    return layouts.files_of(config).to_dict(config, dialect, origin)


def read(folder, raw, config=DFLASH):
    """Reads a config of the kind of `config` from a file that holds this object."""
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return layouts.files_of(config).FAMILY.read_config(path, TARGET)[1]


def changed(raw, change):
    """Returns a config with other values; `...` as a value removes its key."""
    raw = raw | {
        key: changed(raw[key], x) if isinstance(x, dict) and key in raw else x
        for key, x in change.items()
    }
    return {key: x for key, x in raw.items() if x is not ...}


AUX, PARALLELS = "eagle_aux_hidden_state_layer_ids", ["PEagleDraftModel"]
ABOVE_0 = "must be 3 finite numbers above 0"
BAD_CONFIGS = [
    ("z-lab", {"architectures": ["DominoDraftModel"]},
     "DominoDraftModel.* no layout of DFlash or DSpark.*DFlashDraftModel.*Qwen3DS"),
    ("z-lab", {"dflash_config": None}, "dflash_config is missing"),
    ("z-lab", {"is_neox_style": False}, "is_neox_style=False is not supported"),
    ("z-lab", nested(rope_is_neox_style=False) | {"rope_is_neox_style": True},
     "rope_is_neox_style=False is not supported"),
    ("z-lab", nested(mask_token_id=96), "mask_token_id=96 is outside"),
    ("z-lab", nested(mask_token_id=None), "mask_token_id=None must be a whole number"),
    ("z-lab", nested(target_layer_ids=[0, 7]), r"taps=\(1, 8\) of a"),
    ("z-lab", nested(target_layer_ids="1"),
     "target_layer_ids='1' must be a list of lay"),
    ("z-lab", nested(target_layer_ids=[1, 1]), "must be different"),
    ("z-lab", nested(output_multiplier=0), "output_multiplier=0 is not supported"),
    ("z-lab", nested(surprise=1), "surprise=1 is not supported"),
    ("z-lab", nested(markov_rank=8, markov_head_type="vanilla"),
     "z-lab has no heads with head='vanilla', markov_rank=8; choose another of z-lab"),
    ("z-lab", nested(conv_kernel_size=2), "conv_kernel_size=2 and conv_group_size=0"),
    ("dflash2", nested(conv_kernel_size=3), "convolutions have 2 taps"),
    ("dflash2", nested(conv_group_size=7), "conv_group_size=7 must divide the width"),
    ("dflash2", nested(selector_top_k=97), "selector_top_k=97 with head='selector' of"),
    ("dflash2", nested(selector_rank=None), "without selector_rank: state it"),
    ("dflash2", nested(markov_rank=8), "a drafter has one head"),
    ("dflash2", nested(enable_confidence_head=True), "no heads with has_confidence=Tr"),
    ("z-lab", nested(selector_rank=8, selector_top_k=5), "published together"),
    ("speculators dflash2", {"speculators_model_type": "dflash"}, "of type dflash2"),
    ("z-lab", nested(block_size=5), "block_size=4, and in dflash_config 5"),
    ("z-lab", {"layer_types": ["chunked_attention"] * 2},
     "chunked_attention.*: each layer is one of full_attention, sliding_attention"),
    ("z-lab", {"layer_types": ["sliding_attention"] * 2},
     "but use_sliding_window is false: remove the wrong one"),
    ("z-lab, windows", {"layer_types": ["sliding_attention"]}, "of 2 layers: name"),
    ("z-lab, windows", {"sliding_window": 3}, "sliding_window=3 is below the 4 rows"),
    ("z-lab, windows", {"sliding_window": 0}, "sliding_window=0 must be a posi"),
    ("z-lab, windows", {"sliding_window": "2k"}, "sliding_window='2k' must be a whole"),
    ("specforge, mixed", {"sliding_window": ..., "model_type": "dspark"},
     "sliding_window=None must be a whole number"),
    ("z-lab", nested(target_hidden_size=64),
     "target_hidden_size=64 is not the drafter's hidden_size=48"),
    ("z-lab", nested(causal=True, causal_head=False),
     "causal=True, causal_head=False contradict each other"),
    ("z-lab", nested(attention_sink_bias=True), "attention_sink_bias=True is not supp"),
    ("z-lab", {"model_type": "llama"}, "model_type='llama': layers are Qwen3's"),
    ("z-lab", {"quantization_config": {"bits": 4}},
     "quantised weights are not supported"),
    ("specforge", nested(attention_mode="mla"),
     "attention_mode='mla' is not supported"),
    ("specforge", nested(projector_type="domino"), "projector_type='domino'"),
    ("specforge", {"confidence_shifts": "0"}, "confidence_shifts='0' must be numbers"),
    ("deepspec", {"num_target_layers": 36},
     "num_target_layers=36, the target has 8: it is a drafter for another"),
    ("deepspec", {"vocab_size": 97}, "a vocabulary of 97, the target has 48 and 96"),
    ("deepspec", {"block_size": 0}, "drafts no token"),
    ("deepspec", {"block_size": ...}, "block_size=None must be a whole number"),
    ("deepspec", {"markov_head_type": "gru"},
     "markov_head_type='gru' is not one of vanilla, gated, rnn"),
    ("deepspec", {"markov_rank": -1},
     "markov_rank=-1: a head has a rank of at least 1"),
    ("deepspec", {"enable_confidence_head": "yes"},
     "enable_confidence_head='yes' must be true or false"),
    ("deepspec", {"sample_from_anchor": False}, "deepspec has no heads with slots='fi"),
    ("deepspec", {"markov_rank": 0, "conv_kernel_size": 2, "conv_group_size": 16} |
     {"selector_rank": 8, "selector_top_k": 5, "enable_confidence_head": False},
     "deepspec has no such heads: markov_head_type='selector' is not one of"),
    ("speculators", {"sample_from_anchor": ...},
     "no sample_from_anchor, and both kinds"),
    ("speculators", {"query_zero_predicts_next": True}, "contradict each other"),
    ("speculators", {"speculators_model_type": "dflash"}, "of type dspark"),
    ("speculators", {"confidence_temperatures": [1.0, 0.0, 1.0]}, ABOVE_0),
    ("speculators", {"confidence_shifts": [1.0, math.inf, 1.0]},
     "must be 3 finite numb"),
    ("midlayer", {"architectures": ["Eagle4"]},
     r"Eagle4.* no dialect of .*LlamaForCausalLMEagle3.*PEagleDraftModel"),
    ("midlayer", {"architectures": PARALLELS},
     "no mask_token_id: state the token of the masks"),
    ("midlayer", {"architectures": PARALLELS, "mask_token_id": 3, "pard_token": 4},
     "mask_token_id=3, pard_token=4 contradict each other"),
    ("midlayer", {"architectures": PARALLELS, "pard_token": 96},
     "mask_token_id=96 is outside the target's embedding of 96 rows"),
    ("midlayer",
     {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "peagle"},
     r"speculators_model_type='peagle' with architectures=\['Eagle3Dr"),
    ("midlayer", {
        "architectures": PARALLELS, "pard_token": 3, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True, "sliding_window": 4},
     "all layers of a head slide, or none"),
    ("midlayer", {"bias": True}, "bias is true: heads with biases"),
    ("midlayer", {"layer_types": "full_attention"},
     "layer_types='full_attention': each layer is one of"),
    ("midlayer", {"rope_is_neox_style": False}, "rope_is_neox_style=False is not"),
    ("midlayer", {"num_hidden_layers": 2}, "num_hidden_layers=2: only"),
    ("midlayer", {"load_lm_head_from_target": 1}, "from_target=1 must be"),
    ("speculators eagle3", {"load_lm_head_from_target": True},
     "speculators has no heads with shares_head=True"),
    ("deepspec eagle3", {"fc_norm": True}, "deepspec has no heads with fc_norm=True"),
    ("midlayer", {"fc_norm": "yes"}, "fc_norm='yes' must be true or false"),
    ("midlayer", {AUX: [2, 4, 3]},
     r"\[2, 4, 3\], and in eagle_config \[.*\]: remove the wrong one"),
    ("midlayer", {AUX: [2, 4, 8], "eagle_config": ...},
     r"taps=\(2, 4, 8\) of a target with 8 layers"),
    ("midlayer", {"vocab_size": 97},
     "a vocabulary of 97, .* a head for another target"),
    ("midlayer", {"fc_norm": True, "norm_before_fc": True},
     "norm_before_fc and fc_norm are both true"),
    ("midlayer", {"num_target_layers": 9},
     "num_target_layers=9, the target has 8: it is a drafter for another"),
    ("midlayer", {"head_dim": None, "num_attention_heads": 7},
     "no head_dim, and hidden_size=48 is no multiple of num_attention_heads=7"),
]  # fmt: skip


TAPS = {"mask_token_id": 95, "target_layer_ids": [1, 0, 2]}
OWNERS = {
    "dflash2": {"architectures": ["DFlash2DraftModel"], "dflash_config": TAPS | {
        "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8,
        "selector_top_k": 5}},
    "speculators dflash2": {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2",
        "sliding_window_non_causal": False, "selector_top_k": 5},
    "z-lab": {"num_target_layers": 8, "block_size": 4, "tie_word_embeddings": False,
              "dflash_config": TAPS},
    "specforge": {"num_target_layers": 8, "dflash_config": TAPS | {
        "attention_mode": "gqa", "projector_type": "dspark", "markov_rank": 8,
        "markov_head_type": "gated", "confidence_head_alpha": 1.0,
        "enable_confidence_head": True, "confidence_head_with_markov": False}},
    "deepspec": {
        "num_target_layers": 8, "num_anchors": 32, "markov_rank": 8,
        "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True},
    "deepspec dflash": {
        "num_anchors": 32, "markov_rank": 0, "enable_confidence_head": False},
    "speculators": {"speculators_config": layouts.speculators("dspark", 3)},
    "midlayer 3.1": {"fc_norm": True, "norm_output": True},
    "speculators eagle3": {
        "speculators_config": layouts.speculators("eagle3", 5), "norm_output": False},
    "parallel": {
        "architectures": PARALLELS, "speculators_model_type": "peagle",
        "speculators_config": layouts.speculators("peagle", 5), "mask_token_id": 95},
    "deepspec eagle3": {
        "num_target_layers": 8, "target_layer_ids": [0, 1, 3, 4, 6],
        "target_model_name_or_path": "a target", "ttt_length": 5,
        "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"], "tie_word_embeddings": False},
    "midlayer": {},
    "midlayer that shares": {"load_lm_head_from_target": True},
}  # fmt: skip
"""Keys and values that each owner's own code writes."""
OF_HEADS = ("markov_head_type", "confidence_head_with_markov")
LEFT_OUT = {
    "z-lab": OF_HEADS,
    "deepspec dflash": OF_HEADS,
    "midlayer": (*eagle3_files._FLAGS, "load_lm_head_from_target"),
    "midlayer that shares": eagle3_files._FLAGS,
    "midlayer 3.1": ("norm_before_fc", "norm_before_residual"),
    "deepspec eagle3":
        (*eagle3_files._FLAGS, "target_hidden_size", "draft_vocab_size"),
}  # fmt: skip
"""Keys that it does not write."""


@pytest.mark.parametrize("case", OWNERS)
def test_a_config_has_the_keys_of_its_owner(case):
    """Fails if a key is missing that the owner's program needs to accept the file, or
    if a key is written that it would misread."""
    dialect, config = CASES[case]
    raw = to_dict(config, dialect, dataclasses.replace(ORIGIN, ttt_length=5))
    assert {key: raw[key] for key in OWNERS[case]} == OWNERS[case]
    assert not raw.keys() & set(LEFT_OUT.get(case, ()))


def test_equal_heads_are_called_mha(tmp_path):
    """Fails if the label that SpecForge requires for equal numbers of heads is not
    written, or is read as another computation."""
    config = with_heads("vanilla")
    layer = dataclasses.replace(config.layer, num_kv_heads=config.layer.num_heads)
    config = dataclasses.replace(config, layer=layer)
    raw = to_dict(config, "specforge")
    assert raw["dflash_config"]["attention_mode"] == "mha"
    assert read(tmp_path, raw) == config


SEES_ALL = block_params.LayerAttention()
SLIDES = block_params.LayerAttention(window=6, is_causal=True)
SLIDES_BY_DEFAULT = block_params.LayerAttention(window=4096, is_causal=True)
CAUSAL = (block_params.LayerAttention(is_causal=True),) * 2
SPELLINGS = [
    # Neutral values of keys that are otherwise refused.
    (nested(output_multiplier=1.0, input_embedding_scale=1.0), ()),
    ({"output_multiplier": 1.0, "input_embedding_scale": 1.0}, ()),
    (nested(target_hidden_size=48, causal_head=False), ()),
    ({"target_hidden_size": 48, "causal_head": False}, ()),
    (nested(final_logit_softcapping=0.0, is_causal=False, use_swa=None), ()),
    ({"final_logit_softcapping": 0.0, "is_causal": False, "use_swa": None}, ()),
    # vLLM's `use_swa`: all layers slide if `layer_types` names none that does.
    (nested(use_swa=True, swa_window_size=6, causal=True), (SLIDES, SLIDES)),
    (nested(use_swa=True, causal=False) | {"sliding_window": 6, "layer_types": ...},
     (block_params.LayerAttention(window=6),) * 2),
    # transformers' keys, without `layer_types` or without the default window.
    ({"layer_types": ..., "use_sliding_window": True, "max_window_layers": 1,
      "sliding_window": 6}, (SEES_ALL, SLIDES)),
    ({"layer_types": ["full_attention", "sliding_attention"],
      "use_sliding_window": True}, (SEES_ALL, SLIDES_BY_DEFAULT)),
    ({"use_sliding_window": True, "max_window_layers": 28}, ()),
    ({"layer_types": ..., "use_sliding_window": True, "sliding_window": 6}, ()),
    # JetSpec's key, and vLLM's key of the same meaning.
    (nested(causal_head=True), CAUSAL),
    ({"is_causal": True}, CAUSAL),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), SPELLINGS)
def test_what_rows_see_is_read_in_every_spelling(tmp_path, change, expected):
    """Fails if a window or a mask is read as another, or a default is not known."""
    raw = to_dict(DFLASH, "z-lab")
    config = dataclasses.replace(DFLASH, attention=expected)
    assert read(tmp_path, changed(raw, change)) == config


def test_slots_are_said_where_each_reader_looks():
    """Fails if the flag is in `dflash_config` alone: llama.cpp's converter looks beside
    it, and would read fill-in slots as anchor-first ones."""
    config = with_heads("vanilla", slots="fill-in")
    raw, key = to_dict(config, "specforge"), "sample_from_anchor"
    assert raw[key] is raw["dflash_config"][key] is False
    # Slots that are the layout's default are stated nowhere.
    raw = to_dict(with_heads("vanilla"), "specforge")
    assert key not in raw and key not in raw["dflash_config"]


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next"])
@pytest.mark.parametrize(
    ("dialect", "config"),
    [
        ("z-lab", layouts.ANCHOR_FIRST),
        ("specforge", with_heads("vanilla", slots="fill-in")),
    ],
)
def test_either_flag_below_says_what_slots_predict(tmp_path, dialect, config, key):
    """Fails if a layout's default slots are assumed although a flag, which is under
    `dflash_config` alone, states the other ones."""
    raw = to_dict(config, dialect)
    below = {"sample_from_anchor": ...} | {key: raw["sample_from_anchor"]}
    change = {"sample_from_anchor": ..., "dflash_config": below}
    assert read(tmp_path, changed(raw, change)) == config


def test_speculators_dflash_before_it_had_the_flag(tmp_path):
    """Checks that a config without the flag has fill-in slots."""
    raw = to_dict(DFLASH, "speculators")
    assert raw.pop("sample_from_anchor") is False
    assert read(tmp_path, raw) == DFLASH


@pytest.mark.parametrize(("case", "change", "message"), BAD_CONFIGS)
def test_bad_configs_are_refused(tmp_path, case, change, message):
    dialect, config = CASES[case]
    raw = to_dict(config, dialect)
    assert read(tmp_path, raw, config) == config
    with pytest.raises(files.CheckpointError, match=message):
        read(tmp_path, changed(raw, change), config)


def test_llama3_rope_is_read_and_written(tmp_path):
    """Fails if a head whose layer was copied from Llama 3.1's config is refused, or has
    other angles of RoPE."""
    scaling = config_lib.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )  # fmt: skip
    layer = dataclasses.replace(EAGLE.layer, scaling=scaling)
    config = dataclasses.replace(EAGLE, layer=layer)
    raw = to_dict(config, "speculators")
    stated = raw["transformer_layer_config"]
    assert stated["model_type"] == "llama"
    assert stated["rope_scaling"]["rope_type"] == "llama3"
    assert read(tmp_path, raw, EAGLE) == config


def test_taps_are_where_each_reader_looks():
    """Fails if the taps are in only one of two places. llama.cpp's converter looks
    beside `eagle_config` and, where it finds none, silently takes its default layers;
    SGLang looks inside."""
    raw = to_dict(dataclasses.replace(EAGLE, taps=(1, 3, 7)), "midlayer")
    assert raw[AUX] == raw["eagle_config"][AUX] == [1, 3, 7]


WHOLE = {"has_head_norms": True, "draft_vocab_size": 96}
UNSAID = [
    (EAGLE, "other", {}, "dialect='other' is not one of midlayer, speculators, deep"),
    (EAGLE, "midlayer", {"has_head_norms": True}, "no heads with has_head_norms=True"),
    (EAGLE, "deepspec", {}, "draft_vocab_size=32, has_head_norms=False; choose"),
    (EAGLE, "deepspec", {"mask_token_id": 3}, "mask_token_id=3"),
    (EAGLE, "speculators", {"shares_head": True}, "no heads with shares_head=True"),
    (EAGLE, "midlayer", {"shares_head": True, "mask_token_id": 3}, "shares_head=True"),
    (EAGLE, "midlayer", {"layer": dataclasses.replace(EAGLE.layer, hidden_size=40)}
     | {"target_hidden_size": 40}, "features of width 40 .* the target has 48"),
    (dataclasses.replace(EAGLE, **WHOLE), "deepspec",
     {"layer": dataclasses.replace(EAGLE.layer, hidden_size=40)},
     "no heads with target_hidden_size=48"),
    (EAGLE, "midlayer", {"shares_head": True, "target_hidden_size": 40},
     "width 48 for a target of width 40 cannot share"),
    (DFLASH, "z-lab", {"slots": "anchor"}, "slots='anchor' is not one of fill-in"),
    (DFLASH, "z-lab", {"block_size": 1}, "drafts no token"),
    (DFLASH, "z-lab", {"draft_vocab_size": 97}, "draft_vocab_size=97 must be from 1"),
    (DFLASH, "z-lab", {"head": "rnn"}, "head='rnn' with markov_rank=0"),
    (DFLASH, "z-lab", {"confidence_with_markov": True}, "no head that embeds the toke"),
    (layouts.seeing(window=6, is_causal=True), "speculators", {}, "from_anchor=False"),
    (layouts.seeing(window=6, from_anchor=True), "z-lab", {}, "from_anchor=True"),
    (layouts.seeing(is_causal=True), "speculators", {}, "is_causal=True"),
    (layouts.seeing(is_causal=True, rest="all"), "z-lab", {}, "is_causal=True"),
    (layouts.seeing(window=6), "z-lab", {"attention": (SLIDES, SLIDES_BY_DEFAULT)},
     "attention="),
    (layouts.DFLASH2, "specforge", {}, "specforge has no such heads: markov_head_type"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "dialect", "changes", "message"), UNSAID)
def test_heads_that_no_file_describes(tmp_path, head, dialect, changes, message):
    """Fails if a head is saved that no drafter has, or its layout has no words for."""
    config, how = dataclasses.replace(head, **changes), {"origin": ORIGIN}
    kind, params = layouts.files_of(head), layouts.make_params(head)
    with pytest.raises(ValueError, match=message):
        kind.save(tmp_path, config, params, dialect=dialect, **how)
    assert not [*tmp_path.iterdir()]
