"""Configs of block drafters: bad ones are refused, published ones are read."""

import dataclasses
import json

import pytest
from block_cases import CASES, CONFIGS, DFLASH, ORIGIN, TARGET, with_heads

from spec_jax.model import (
    block_dialects as dialects,
    block_params,
    checkpoint_files as files,
    config as config_lib,
    params as params_lib,
)


def nested(**changes):
    """A change of what is under `dflash_config`."""
    return lambda raw: raw | {"dflash_config": raw["dflash_config"] | changes}


BAD_CONFIGS = {
    "architecture": (
        "z-lab",
        lambda raw: raw | {"architectures": ["DominoDraftModel"]},
        "DominoDraftModel.* no layout of DFlash or DSpark.*DFlashDraftModel.*Qwen3DS",
    ),
    "no dflash_config": (
        "z-lab",
        lambda raw: raw | {"dflash_config": None},
        "dflash_config is missing",
    ),
    "interleaved": (
        "z-lab",
        nested(rope_is_neox_style=False),
        "rope_is_neox_style=False is not supported",
    ),
    "interleaved, as others say it": (
        "z-lab",
        lambda raw: raw | {"is_neox_style": False},
        "is_neox_style=False is not supported",
    ),
    "interleaved, below and said so": (
        "z-lab",
        nested(is_neox_style=False),
        "is_neox_style=False is not supported",
    ),
    "interleaved, below what is said above": (
        "z-lab",
        lambda raw: nested(rope_is_neox_style=False)(
            raw | {"rope_is_neox_style": True}
        ),
        "rope_is_neox_style=False is not supported",
    ),
    "mask": ("z-lab", nested(mask_token_id=96), "mask_token_id=96 is outside"),
    "no mask": ("z-lab", nested(mask_token_id=None), "mask_token_id=None must be a"),
    "last tap": ("z-lab", nested(target_layer_ids=[0, 3]), r"taps=\(1, 4\) of a"),
    "taps": ("z-lab", nested(target_layer_ids="1"), "must be a list of layers"),
    "same taps": ("z-lab", nested(target_layer_ids=[1, 1]), "must be different"),
    "softcap": (
        "z-lab",
        nested(final_logit_softcapping=30.0),
        "final_logit_softcapping=30.0 is not supported",
    ),
    "multiplier": (
        "z-lab",
        nested(output_multiplier=0),
        "output_multiplier=0 is not supported",
    ),
    "attention": (
        "specforge",
        nested(attention_mode="mla"),
        "attention_mode='mla' is not supported",
    ),
    "heads": (
        "z-lab",
        nested(markov_rank=8, markov_head_type="vanilla"),
        "z-lab's layout is of DFlash",
    ),
    "contradiction": (
        "z-lab",
        lambda raw: nested(block_size=5)(raw),
        "block_size=4, and in dflash_config 5",
    ),
    "domino": ("specforge", nested(projector_type="domino"), "projector_type='domino'"),
    "window": (
        "z-lab",
        lambda raw: raw | {"layer_types": ["sliding_attention"] * 2},
        "only full_attention",
    ),
    "layers of another": (
        "deepspec",
        lambda raw: raw | {"num_target_layers": 36},
        "num_target_layers=36, the target has 4: it is a drafter for another",
    ),
    "vocabulary": (
        "deepspec",
        lambda raw: raw | {"vocab_size": 97},
        "a vocabulary of 97, the target has 48 and 96",
    ),
    "width": (
        "deepspec",
        lambda raw: raw | {"hidden_size": 64},
        "of width 64 .* head for another target",
    ),
    "block": ("deepspec", lambda raw: raw | {"block_size": 0}, "drafts no token"),
    "head": (
        "deepspec",
        lambda raw: raw | {"markov_head_type": "gru"},
        "markov_head_type='gru' is not one of vanilla, gated, rnn",
    ),
    "flag": (
        "deepspec",
        lambda raw: raw | {"enable_confidence_head": "yes"},
        "enable_confidence_head='yes' must be true or false",
    ),
    "fill-in": (
        "deepspec",
        lambda raw: raw | {"sample_from_anchor": False},
        "deepspec's slots are anchor-first",
    ),
    "unstated slots": (
        "speculators",
        lambda raw: {k: x for k, x in raw.items() if k != "sample_from_anchor"},
        "no sample_from_anchor, and both kinds",
    ),
    "flags apart": (
        "speculators",
        lambda raw: raw | {"query_zero_predicts_next": True},
        "contradict each other",
    ),
    "type": (
        "speculators",
        lambda raw: raw | {"speculators_model_type": "dflash"},
        "each with its own architecture",
    ),
    "temperatures": (
        "speculators",
        lambda raw: raw | {"confidence_temperatures": [1.0, 0.0, 1.0]},
        "must be 3 finite numbers above 0",
    ),
    "a temperature of NaN": (
        "speculators",
        lambda raw: raw | {"confidence_temperatures": [1.0, float("nan"), 1.0]},
        "must be 3 finite numbers above 0",
    ),
    "an infinite temperature": (
        "speculators",
        lambda raw: raw | {"confidence_temperatures": [1.0, float("inf"), 1.0]},
        "must be 3 finite numbers above 0",
    ),
    "block of a flag": (
        "deepspec",
        lambda raw: raw | {"block_size": True},
        "block_size=True must be a whole number",
    ),
    "no block": (
        "deepspec",
        lambda raw: {k: x for k, x in raw.items() if k != "block_size"},
        "block_size=None must be a whole number",
    ),
    "rank of text": (
        "deepspec",
        lambda raw: raw | {"markov_rank": "8"},
        "markov_rank='8' must be a whole number",
    ),
    "negative rank": (
        "deepspec",
        lambda raw: raw | {"markov_rank": -1},
        "markov_rank=-1: a head has a rank of at least 1",
    ),
    "negative mask": ("z-lab", nested(mask_token_id=-1), "mask_token_id=-1 is outside"),
    "unknown word": ("z-lab", nested(surprise=1), "surprise=1 is not supported"),
    "no taps": ("z-lab", nested(target_layer_ids=[]), r"taps=\(\) must be different"),
    "taps of text": (
        "z-lab",
        nested(target_layer_ids="1"),
        "target_layer_ids='1' must be a list of layers",
    ),
    "negative tap": ("z-lab", nested(target_layer_ids=[-2, 1]), "taps=.-1, 2. "),
    "no architecture": (
        "z-lab",
        lambda raw: raw | {"architectures": []},
        "architectures=.. is no layout of DFlash or DSpark",
    ),
    "layers of Llama": (
        "z-lab",
        lambda raw: raw | {"model_type": "llama"},
        "model_type='llama': layers are Qwen3's",
    ),
    "eps of NaN": (
        "z-lab",
        lambda raw: raw | {"rms_norm_eps": float("nan")},
        "rms_norm_eps=nan must be a positive number",
    ),
    "quantised": (
        "z-lab",
        lambda raw: raw | {"quantization_config": {"bits": 4}},
        "quantised weights are not supported",
    ),
    "shifts": (
        "speculators",
        lambda raw: raw | {"confidence_shifts": [1.0, float("inf"), 1.0]},
        "must be 3 finite numbers",
    ),
    "shifts of no numbers": (
        "specforge",
        lambda raw: raw | {"confidence_shifts": "0"},
        "confidence_shifts='0' must be numbers",
    ),
}


OWNERS = {
    "z-lab": {
        "num_target_layers": 4,
        "block_size": 4,
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 0, 2]},
    },
    "specforge": {
        "num_target_layers": 4,
        "dflash_config": {
            "attention_mode": "gqa",
            "mask_token_id": 95,
            "target_layer_ids": [1, 0, 2],
            "projector_type": "dspark",
            "markov_rank": 8,
            "markov_head_type": "gated",
            "confidence_head_alpha": 1.0,
            "enable_confidence_head": True,
            "confidence_head_with_markov": False,
        },
    },
    "deepspec": {
        "num_target_layers": 4,
        "num_anchors": 32,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "deepspec dflash": {
        "num_anchors": 32,
        "markov_rank": 0,
        "enable_confidence_head": False,
    },
    "speculators": {
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": ["Qwen3ForCausalLM"],
                "name_or_path": "a target",
            },
        },
    },
}
"""What each owner's own code writes."""


@pytest.mark.parametrize("case", OWNERS)
def test_a_config_has_the_keys_of_its_owner(case):
    """Fails if a key is missing without which the owner's program refuses the file."""
    dialect, config = CASES[case]
    raw = dialects.to_dict(config, dialect, ORIGIN)
    assert {key: raw[key] for key in OWNERS[case]} == OWNERS[case]
    if config.head == "none":
        assert (
            "markov_head_type" not in raw and "confidence_head_with_markov" not in raw
        )


def test_equal_heads_are_called_mha(tmp_path):
    """Fails if SpecForge's label, without which it refuses them, is not written, or is
    taken for another computation."""
    config = with_heads("vanilla")
    layer = dataclasses.replace(config.layer, num_kv_heads=config.layer.num_heads)
    config = dataclasses.replace(config, layer=layer)
    raw = dialects.to_dict(config, "specforge", ORIGIN)
    assert raw["dflash_config"]["attention_mode"] == "mha"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert dialects.read_config(path, TARGET)[1] == config


@pytest.mark.parametrize(
    "change",
    [
        {"output_multiplier": 1.0, "input_embedding_scale": 1.0},
        {"final_logit_softcapping": 0.0, "is_causal": False, "use_swa": None},
    ],
)
def test_neutral_values_are_read(tmp_path, change):
    path = tmp_path / "config.json"
    raw = nested(**change)(dialects.to_dict(DFLASH, "z-lab", ORIGIN))
    path.write_text(json.dumps(raw | change))
    assert dialects.read_config(path, TARGET)[1] == DFLASH


def test_slots_are_said_where_each_reader_looks():
    """Fails if the flag is in `dflash_config` alone: llama.cpp's converter looks beside
    it, and would take fill-in slots for anchor-first ones."""
    config = with_heads("vanilla", slots="fill-in")
    raw, key = dialects.to_dict(config, "specforge", ORIGIN), "sample_from_anchor"
    assert raw[key] is raw["dflash_config"][key] is False
    # What a layout's slots are anyhow is said nowhere.
    raw = dialects.to_dict(with_heads("vanilla"), "specforge", ORIGIN)
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
    """Fails if a layout's own slots are taken where a flag under `dflash_config`, and
    nowhere else, says that they are others."""
    raw = dialects.to_dict(config, dialect, ORIGIN)
    flag = raw.pop("sample_from_anchor")
    below = raw["dflash_config"] | {key: flag}
    if key != "sample_from_anchor":
        del below["sample_from_anchor"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw | {"dflash_config": below}))
    assert dialects.read_config(path, TARGET)[1] == config


def test_speculators_dflash_before_it_had_the_flag(tmp_path):
    """Its slots were filled in."""
    raw = dialects.to_dict(DFLASH, "speculators", ORIGIN)
    assert raw.pop("sample_from_anchor") is False
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert dialects.read_config(path, TARGET)[1] == DFLASH


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_bad_configs_are_refused(tmp_path, fault):
    case, change, message = BAD_CONFIGS[fault]
    dialect, config = CASES[case]
    path = tmp_path / "config.json"
    raw = dialects.to_dict(config, dialect, ORIGIN)
    path.write_text(json.dumps(raw))
    dialects.read_config(path, TARGET)
    path.write_text(json.dumps(change(raw)))
    with pytest.raises(files.CheckpointError, match=message):
        dialects.read_config(path, TARGET)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a JSON object"),
        ("{", "not valid JSON"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_config_are_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(files.CheckpointError, match=message):
        dialects.read_config(path, TARGET)


@pytest.mark.parametrize(
    ("dialect", "config", "message"),
    [
        (
            "other",
            DFLASH,
            "dialect='other' is not one of z-lab, deepspec, specforge",
        ),
        ("z-lab", with_heads("vanilla"), "DFlash, which has no heads"),
        ("deepspec", DFLASH, "deepspec's slots are anchor-first"),
        (
            "specforge",
            with_heads("vanilla", draft_vocab_size=32),
            "specforge has the whole vocabulary",
        ),
    ],
)
def test_a_layout_without_words_for_a_drafter(dialect, config, message):
    with pytest.raises(ValueError, match=message):
        dialects.check_config(config, dialect)


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


PUBLISHED = [
    ("released/z-lab_Qwen3-4B-DFlash-b16.config.json", "4B", 15, 1_074_854_400),
    ("specforge/qwen3-4b-dflash.json", "4B", 15, 1_074_854_400),
    ("specforge/qwen3-8b-dflash.json", "8B", 15, 2_097_252_864),
    ("specforge/qwen3-4b-dspark.json", "4B", 7, None),
    ("specforge/qwen3-8b-dspark.json", "8B", 7, None),
    ("derived_deepspec/dspark_qwen3_4b_block7.derived.json", "4B", 7, 2_786_267_138),
    ("derived_deepspec/dspark_qwen3_8b_block7.derived.json", "8B", 7, 4_742_163_458),
]


@pytest.mark.skipif(not CONFIGS.exists(), reason="no published configs here")
@pytest.mark.parametrize(("name", "size", "num_drafts", "num_bytes"), PUBLISHED)
def test_published_configs(name, size, num_drafts, num_bytes):
    """The bytes are those of the published files: fails on any wrong shape."""
    target = config_lib.read(CONFIGS / "qwen3" / f"Qwen3-{size}.config.json")
    dialect, config = dialects.read_config(CONFIGS / name, target)
    assert config.taps == (2, 10, 18, 26, 34) and config.num_drafts == num_drafts
    assert dialects.default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    shapes = block_params.shapes(config)
    if dialect != "deepspec":
        shapes = shapes.replace(embed=None, lm_head=None)
    assert num_bytes in (None, params_lib.num_bytes(shapes))


@pytest.mark.skipif(not CONFIGS.exists(), reason="no published configs here")
def test_published_configs_of_other_drafters_are_refused():
    target = config_lib.read(CONFIGS / "qwen3" / "Qwen3-8B.config.json")
    with pytest.raises(files.CheckpointError, match="no layout of DFlash or DSpark"):
        dialects.read_config(CONFIGS / "specforge/qwen3-8b-domino.json", target)
