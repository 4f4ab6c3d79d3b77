"""Configs of block drafters: bad ones are refused, published ones are read."""

import dataclasses
import json
import math

import block_cases
import pytest
from block_cases import CASES, DFLASH, ORIGIN, TARGET, with_heads

from spec_jax.model import (
    block_config_keys,
    block_dialects as dialects,
    block_params,
    checkpoint_files as files,
)


def nested(**changes):
    """Returns a change of the values under `dflash_config`."""
    return {"dflash_config": changes}


def read(folder, raw):
    """Reads the drafter's config from a file that holds this object."""
    path = folder / "config.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return dialects.read_config(path, TARGET)[1]


def changed(raw, change):
    """Returns a config with other values; `...` as a value removes its key."""
    raw = raw | {
        key: raw[key] | x if isinstance(x, dict) and key in raw else x
        for key, x in change.items()
    }
    return {key: x for key, x in raw.items() if x is not ...}


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
    ("z-lab", nested(target_layer_ids=[0, 3]), r"taps=\(1, 4\) of a"),
    ("z-lab", nested(target_layer_ids="1"),
     "target_layer_ids='1' must be a list of lay"),
    ("z-lab", nested(target_layer_ids=[1, 1]), "must be different"),
    ("z-lab", nested(output_multiplier=0), "output_multiplier=0 is not supported"),
    ("z-lab", nested(surprise=1), "surprise=1 is not supported"),
    ("z-lab", nested(markov_rank=8, markov_head_type="vanilla"),
     "z-lab's layout is of DF"),
    ("z-lab", nested(conv_kernel_size=2), "conv_kernel_size=2 and conv_group_size=0"),
    ("dflash2", nested(conv_kernel_size=3), "convolutions have 2 taps"),
    ("dflash2", nested(conv_group_size=7), "conv_group_size=7 must divide the width"),
    ("dflash2", nested(selector_top_k=97), "selector_top_k=97 with head='selector' of"),
    ("dflash2", nested(selector_rank=None), "without selector_rank: state it"),
    ("dflash2", nested(markov_rank=8), "a drafter has one head"),
    ("dflash2", nested(enable_confidence_head=True), "DFlash2 has no confidences"),
    ("z-lab", nested(selector_rank=8, selector_top_k=5), "published together"),
    ("speculators dflash2", {"speculators_model_type": "dflash"}, "each with its own"),
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
     "num_target_layers=36, the target has 4: it is a drafter for another"),
    ("deepspec", {"vocab_size": 97}, "a vocabulary of 97, the target has 48 and 96"),
    ("deepspec", {"block_size": 0}, "drafts no token"),
    ("deepspec", {"block_size": ...}, "block_size=None must be a whole number"),
    ("deepspec", {"markov_head_type": "gru"},
     "markov_head_type='gru' is not one of vanilla, gated, rnn"),
    ("deepspec", {"markov_rank": -1},
     "markov_rank=-1: a head has a rank of at least 1"),
    ("deepspec", {"enable_confidence_head": "yes"},
     "enable_confidence_head='yes' must be true or false"),
    ("deepspec", {"sample_from_anchor": False}, "deepspec's slots are anchor-first"),
    ("speculators", {"sample_from_anchor": ...},
     "no sample_from_anchor, and both kinds"),
    ("speculators", {"query_zero_predicts_next": True}, "contradict each other"),
    ("speculators", {"speculators_model_type": "dflash"}, "each with its own architec"),
    ("speculators", {"confidence_temperatures": [1.0, 0.0, 1.0]}, ABOVE_0),
    ("speculators", {"confidence_shifts": [1.0, math.inf, 1.0]},
     "must be 3 finite numb"),
]  # fmt: skip


TAPS = {"mask_token_id": 95, "target_layer_ids": [1, 0, 2]}
OWNERS = {
    "dflash2": {"architectures": ["DFlash2DraftModel"], "dflash_config": TAPS | {
        "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8,
        "selector_top_k": 5}},
    "speculators dflash2": {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2",
        "sliding_window_non_causal": False, "selector_top_k": 5},
    "z-lab": {"num_target_layers": 4, "block_size": 4, "tie_word_embeddings": False,
              "dflash_config": TAPS},
    "specforge": {"num_target_layers": 4, "dflash_config": TAPS | {
        "attention_mode": "gqa", "projector_type": "dspark", "markov_rank": 8,
        "markov_head_type": "gated", "confidence_head_alpha": 1.0,
        "enable_confidence_head": True, "confidence_head_with_markov": False}},
    "deepspec": {
        "num_target_layers": 4, "num_anchors": 32, "markov_rank": 8,
        "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True},
    "deepspec dflash": {
        "num_anchors": 32, "markov_rank": 0, "enable_confidence_head": False},
    "speculators": {"speculators_config": block_cases.speculators("dspark", 3)},
}  # fmt: skip
"""Keys and values that each owner's own code writes."""


@pytest.mark.parametrize("case", OWNERS)
def test_a_config_has_the_keys_of_its_owner(case):
    """Fails if a key is missing that the owner's program needs to accept the file."""
    dialect, config = CASES[case]
    raw = block_config_keys.to_dict(config, dialect, ORIGIN)
    assert {key: raw[key] for key in OWNERS[case]} == OWNERS[case]
    if config.head == "none":
        assert not {"markov_head_type", "confidence_head_with_markov"} & set(raw)


def test_equal_heads_are_called_mha(tmp_path):
    """Fails if the label that SpecForge requires for equal numbers of heads is not
    written, or is read as another computation."""
    config = with_heads("vanilla")
    layer = dataclasses.replace(config.layer, num_kv_heads=config.layer.num_heads)
    config = dataclasses.replace(config, layer=layer)
    raw = block_config_keys.to_dict(config, "specforge", ORIGIN)
    assert raw["dflash_config"]["attention_mode"] == "mha"
    assert read(tmp_path, raw) == config


@pytest.mark.parametrize(
    "change",
    [
        {"output_multiplier": 1.0, "input_embedding_scale": 1.0},
        {"target_hidden_size": 48, "causal_head": False},
        {"final_logit_softcapping": 0.0, "is_causal": False, "use_swa": None},
    ],
)
def test_neutral_values_are_read(tmp_path, change):
    raw = block_config_keys.to_dict(DFLASH, "z-lab", ORIGIN)
    assert read(tmp_path, changed(raw, nested(**change) | change)) == DFLASH


_FULL = block_params.LayerAttention()
_SLIDING = block_params.LayerAttention(window=6, is_causal=True)
SIGHTS = [
    # vLLM's `use_swa`: all layers slide if `layer_types` names none that does.
    (nested(use_swa=True, swa_window_size=6, causal=True), (_SLIDING, _SLIDING)),
    (nested(use_swa=True, causal=False) | {"sliding_window": 6, "layer_types": ...},
     (block_params.LayerAttention(window=6),) * 2),
    # transformers' keys, without `layer_types` or without the default window.
    ({"layer_types": ..., "use_sliding_window": True, "max_window_layers": 1,
      "sliding_window": 6}, (_FULL, _SLIDING)),
    ({"layer_types": ["full_attention", "sliding_attention"],
      "use_sliding_window": True},
     (_FULL, block_params.LayerAttention(window=4096, is_causal=True))),
    ({"use_sliding_window": True, "max_window_layers": 28}, ()),
    ({"layer_types": ..., "use_sliding_window": True, "sliding_window": 6}, ()),
    # JetSpec's key, and vLLM's key of the same meaning.
    (nested(causal_head=True), (block_params.LayerAttention(is_causal=True),) * 2),
    ({"is_causal": True}, (block_params.LayerAttention(is_causal=True),) * 2),
    (nested(causal_head=False), ()),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), SIGHTS)
def test_what_rows_see_is_read_in_every_spelling(tmp_path, change, expected):
    """Fails if a window or a mask is read as another, or a default is not known."""
    raw = block_config_keys.to_dict(DFLASH, "z-lab", ORIGIN)
    assert read(tmp_path, changed(raw, change)).attention == expected


UNSAID = {
    "counted from each row: speculators'": (
        "speculators", {"window": 6, "is_causal": True}),
    "counted from the anchor: speculators'": (
        "z-lab", {"window": 6, "from_anchor": True}),
    "speculators has no word for it; choose z-lab": (
        "speculators", {"is_causal": True}),
    r"causal layers \[True, False\] of windows \[0, 0\]": (
        "z-lab", {"is_causal": True, "rest": "all"}),
}  # fmt: skip


@pytest.mark.parametrize("message", UNSAID)
def test_layouts_without_words_for_what_rows_see(message):
    dialect, attention = UNSAID[message]
    config = block_cases.seeing(**attention)
    with pytest.raises(ValueError, match=message):
        dialects.check_config(config, dialect)


def test_slots_are_said_where_each_reader_looks():
    """Fails if the flag is in `dflash_config` alone: llama.cpp's converter looks beside
    it, and would read fill-in slots as anchor-first ones."""
    config = with_heads("vanilla", slots="fill-in")
    raw, key = (
        block_config_keys.to_dict(config, "specforge", ORIGIN),
        "sample_from_anchor",
    )
    assert raw[key] is raw["dflash_config"][key] is False
    # Slots that are the layout's default are stated nowhere.
    raw = block_config_keys.to_dict(with_heads("vanilla"), "specforge", ORIGIN)
    assert key not in raw and key not in raw["dflash_config"]


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next"])
@pytest.mark.parametrize(
    ("dialect", "config"),
    [
        ("z-lab", dataclasses.replace(DFLASH, slots="anchor-first")),
        ("specforge", with_heads("vanilla", slots="fill-in")),
    ],
)
def test_either_flag_below_says_what_slots_predict(tmp_path, dialect, config, key):
    """Fails if a layout's default slots are assumed although a flag, which is under
    `dflash_config` alone, states the other ones."""
    raw = block_config_keys.to_dict(config, dialect, ORIGIN)
    flag = raw.pop("sample_from_anchor")
    below = raw["dflash_config"] | {key: flag}
    if key != "sample_from_anchor":
        del below["sample_from_anchor"]
    assert read(tmp_path, raw | {"dflash_config": below}) == config


def test_speculators_dflash_before_it_had_the_flag(tmp_path):
    """Checks that a config without the flag has fill-in slots."""
    raw = block_config_keys.to_dict(DFLASH, "speculators", ORIGIN)
    assert raw.pop("sample_from_anchor") is False
    assert read(tmp_path, raw) == DFLASH


@pytest.mark.parametrize(("case", "change", "message"), BAD_CONFIGS)
def test_bad_configs_are_refused(tmp_path, case, change, message):
    dialect, config = CASES[case]
    raw = block_config_keys.to_dict(config, dialect, ORIGIN)
    assert read(tmp_path, raw) == config
    with pytest.raises(files.CheckpointError, match=message):
        read(tmp_path, changed(raw, change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": "anchor"}, "slots='anchor' is not one of fill-in, anchor-first"),
        ({"block_size": 1}, "drafts no token"),
        ({"draft_vocab_size": 97}, "draft_vocab_size=97 must be from 1"),
        ({"head": "rnn"}, "head='rnn' with markov_rank=0"),
        ({"confidence_with_markov": True}, "no head that embeds the token before"),
    ],
)
def test_configs_of_no_drafter_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DFLASH, **changes).validate()
