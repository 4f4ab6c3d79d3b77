"""`LanguageModel.save`: a folder that `load` and Hugging Face's loaders open; and the
fingerprint of weights: the same for the same bits, and for no others."""

import dataclasses
import json

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

import spec_jax as sj
from spec_jax import testing
from spec_jax.model import fingerprint, params as params_lib


TEXT = "naïve <|im_end|> 日本"
CHAT = [{"role": "user", "content": "hi"}]
END = "<|im_end|>"
CONFIGS = {
    "qwen3": tiny_pair.config(dtype="bfloat16"),
    "gpt_neox": tiny_pair.neox_config(rotary_size=8),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """Returns a model with two stop tokens and a template, its copy, and the folder."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_pair.write_model(folder, CONFIGS[request.param], seed=4)
    backend = tiny_pair.byte_tokenizer()
    backend.add_special_tokens([END])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(tiny_pair.TEMPLATE + "{{ eos_token }}")
    settings = {"eos_token": END, "bos_token": {"content": tiny_pair.END_OF_TEXT}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"eos_token_id": [backend.token_to_id(END), 0]}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    lm = sj.load(folder, drafter="ngram")
    copy = tmp_path_factory.mktemp("copy") / "new"
    copy.mkdir()
    (copy / "chat_template.jinja").write_text("of another model")
    lm.save(copy)
    return lm, sj.load(copy, drafter="ngram"), copy


def test_a_saved_model_is_loaded_bit_for_bit(pair):
    """Fails if saving changes weights, words, the template or stop tokens."""
    lm, again, _ = pair
    assert again.target.config == lm.target.config
    testing.assert_same_bits(again.params, lm.params)
    words, saved = lm.tokenizer, again.tokenizer
    assert saved.fingerprint == words.fingerprint
    for name in ("stop_ids", "special_tokens", "special_ids", "chat_template"):
        assert getattr(saved, name) == getattr(words, name), name
    assert saved.encode(TEXT) == words.encode(TEXT)
    assert saved.apply_chat("hi") == words.apply_chat("hi") != "hi"


def test_a_saved_model_is_hugging_faces_too(pair):
    """Fails if transformers reads another model, other ids or other stop tokens."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    lm, _, folder = pair
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words(TEXT)["input_ids"] == lm.tokenizer.encode(TEXT)
    assert words.eos_token == END
    ids = words.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ids == sj.decode(lm, CHAT, max_tokens=1).prompt_tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == list(lm.stop_ids)
    out = model.float().generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    plain = sj.decode(lm, CHAT, max_tokens=6).tokens
    assert out[0, len(ids) :].tolist()[:3] == plain[:3]


def test_models_that_cannot_be_saved(pair, tmp_path):
    """Fails if a model without a tokenizer is saved: nothing could open its folder."""
    bare = dataclasses.replace(pair[0], tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer, without which its folder can"):
        bare.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


PARAMS = params_lib.cast(decoding.TARGET_PARAMS, "bfloat16")
PARAMS = PARAMS.replace(final_norm=PARAMS.final_norm.at[0].set(0.0))
FIRST, *REST = PARAMS.layers


def test_copies_have_one_fingerprint():
    """Fails if the fingerprint depends on the identity or the place of arrays."""
    copied = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), PARAMS)
    found = fingerprint.of_params(PARAMS)
    assert found == fingerprint.of_params(copied)
    assert len(found) == 64 and set(found) <= set("0123456789abcdef")


def first_layer(**changes):
    return PARAMS.replace(layers=(FIRST.replace(**changes), *REST))


CHANGED = {
    "one bit": lambda: first_layer(
        down=FIRST.down.at[3, 5].set(jnp.nextafter(FIRST.down[3, 5], jnp.bfloat16(9)))
    ),
    "two arrays exchanged": lambda: first_layer(
        input_norm=FIRST.mlp_norm * 2, mlp_norm=FIRST.input_norm
    ),
    "layers exchanged": lambda: PARAMS.replace(layers=PARAMS.layers[::-1]),
    "a shape": lambda: first_layer(down=FIRST.down.reshape(-1)),
    "a head of its own": lambda: PARAMS.replace(lm_head=PARAMS.embed),
    "the sign of a zero": lambda: PARAMS.replace(
        final_norm=PARAMS.final_norm.at[0].set(-0.0)
    ),
    "the dtype": lambda: params_lib.cast(PARAMS, "float32"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_other_weights_have_another_fingerprint(change):
    assert fingerprint.of_params(CHANGED[change]()) != fingerprint.of_params(PARAMS)
