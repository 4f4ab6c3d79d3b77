"""Families: parity with Hugging Face, and configs that are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_family_rows as family_rows
from slow_cases import slow_but

from spec_jax import testing
from spec_jax.model import (
    config as config_lib,
    load as load_lib,
    save as save_lib,
    sequence,
)


PROMPT, STEPS = 24, 64

SIZES = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 200,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
NEOX = SIZES | {"layer_norm_eps": 1e-5}
LLAMA = SIZES | {"num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
CASES = {
    "sequential-tanh": ("GPTNeoX", NEOX | {
        "hidden_act": "gelu_new", "num_attention_heads": 3,
        "use_parallel_residual": False}),
    "all-rotated": ("GPTNeoX", NEOX | {
        "hidden_size": 80, "num_attention_heads": 1, "num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rotary_pct": 1.0, "hidden_act": "gelu_pytorch_tanh"}),
    "odd-rotated": ("GPTNeoX", NEOX | {"hidden_size": 80, "rotary_pct": 0.75}),
    "llama3": ("Llama", LLAMA | {"rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3", LLAMA),
    "qwen2-yarn-tied": (
        "Qwen2",
        {key: LLAMA[key] for key in LLAMA if key != "head_dim"}
        | {"num_attention_heads": 6, "tie_word_embeddings": True}
        | {"rope_parameters": YARN}),
}  # fmt: skip


def write_oracle(kind: str, sizes: dict, folder, *, dtype="float32", **saving):
    """Saves and returns Hugging Face's model with random weights, biases and norms too,
    which are all zero or one in a fresh model. They are large enough for attention to
    be far from uniform, and for the residual stream to be more than the embedding."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)  # The models are too small for more.
    config = getattr(transformers, f"{kind}Config")(
        architectures=[f"{kind}ForCausalLM"], attn_implementation="eager", **sizes
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_vector = parameter.ndim == 1
            scale = 0.3 if is_vector else 1.5 * parameter.shape[-1] ** -0.5
            is_norm = is_vector and name.endswith("weight")
            parameter.copy_(noise * scale + (1.0 if is_norm else 0.0))
    model.to(getattr(torch, dtype)).save_pretrained(folder, **saving)
    return model


def f32_error(ours, theirs) -> float:
    """Returns the largest difference in units of 1e-4 of the largest logit."""
    return np.abs(ours - theirs).max() / (1e-4 * np.abs(theirs).max())


@pytest.fixture(
    scope="module",
    params=slow_but(CASES, "sequential-tanh", "llama3", "qwen2-yarn-tied"),
)
def case(request, tmp_path_factory):
    """Returns a folder, and the oracle's greedy tokens with their logits."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param)
    oracle = write_oracle(*CASES[request.param], folder)
    rng = np.random.default_rng(3)
    ids = torch.tensor(rng.integers(1, 256, (2, PROMPT)))
    with torch.no_grad():
        for _ in range(STEPS):
            last = oracle(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, last], dim=1)
        logits = oracle(ids).logits.float().numpy()
    assert len(np.unique(ids[:, PROMPT:])) > 5
    return folder, ids.numpy().astype(np.int32), logits


_logits = jax.jit(sequence.logits, static_argnums=1)


def error(params, config, tokens, theirs) -> float:
    return f32_error(np.asarray(_logits(params, config, jnp.asarray(tokens))), theirs)


def test_logits_and_greedy_tokens_are_hugging_faces(case):
    """Fails if residual, GELU, order of the fused projection or rotation is wrong."""
    folder, tokens, theirs = case
    config, params = load_lib.load(folder)
    assert error(params, config, tokens, theirs) <= 1
    ours = np.asarray(_logits(params, config, jnp.asarray(tokens)))
    np.testing.assert_array_equal(
        ours[:, PROMPT - 1 : -1].argmax(-1), tokens[:, PROMPT:]
    )
    wrong = [dataclasses.replace(config, rope_theta=1.01 * config.rope_theta)]
    if config.model_type == "gpt_neox":
        is_parallel = not config.has_parallel_residual
        wrong.append(dataclasses.replace(config, has_parallel_residual=is_parallel))
        act = "gelu" if config.hidden_act != "gelu" else "gelu_new"
        wrong.append(dataclasses.replace(config, hidden_act=act))
    elif config.scaling is not None:
        wrong.append(dataclasses.replace(config, scaling=None))
    for other in wrong:
        assert error(params, other, tokens, theirs) > 1, other
    if config.model_type == "qwen2":
        layers = [x.replace(qkv_bias=0.9 * x.qkv_bias) for x in params.layers]
        params = params.replace(layers=tuple(layers))
        assert error(params, config, tokens, theirs) > 1


def test_what_is_saved_is_hugging_faces(case, tmp_path):
    """Fails if saving does not undo the order of rows, or loses a tensor or a size."""
    import safetensors.numpy

    folder, _, _ = case
    config, params = load_lib.load(folder)
    save_lib.save(tmp_path, config, params)
    theirs, ours = (
        safetensors.numpy.load_file(each / "model.safetensors")
        for each in (folder, tmp_path)
    )
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    again, reread = load_lib.load(tmp_path)
    assert again == config
    testing.assert_same_bits(reread, params)


RAW = NEOX | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
REFUSED = [
    ({"model_type": "gptj"}, r"the supported families are GPTNeoXForCausalLM \(gpt_ne"),
    ({"rotary_pct": 0.04}, "rotary_pct rotates 0 of the 24 dimensions"),
    ({"rotary_pct": "all"}, "rotary_pct='all' must be a positive number"),
    ({"hidden_size": 97}, "hidden_size=97 must be a multiple of num_attention_heads=4"),
    ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    ({"hidden_act": ["gelu"]}, r"hidden_act=\['gelu'\] is not supported"),
    ({"attention_bias": False}, "attention_bias=False is not supported"),
    ({"use_parallel_residual": 1}, "use_parallel_residual=1 must be true or false"),
]


RAW2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
REFUSED_OF_QWEN2 = [
    ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not"),
]


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [(RAW, *case) for case in REFUSED] + [(RAW2, *case) for case in REFUSED_OF_QWEN2],
)
def test_configs_that_are_refused(raw, change, message):
    with pytest.raises(ValueError, match=message):
        config_lib.from_dict(raw | change)


def test_old_and_new_spellings_agree():
    """Checks that both agree; float16, as Pythia is published, is read as float32."""
    old = RAW | {"rotary_pct": 0.5, "rotary_emb_base": 500, "torch_dtype": "float16"}
    new = {"rope_theta": 500, "partial_rotary_factor": 0.5, "rope_type": "default"}
    config = config_lib.from_dict(old)
    assert config == config_lib.from_dict(RAW | {"rope_parameters": new})
    assert (config.rotary_size, config.rope_theta) == (12, 500.0)
    assert config_lib.from_dict(config_lib.to_dict(config)) == config


MISSING = {
    "gpt_neox": "gpt_neox.layers.1.attention.dense.bias",
    "qwen2": "model.layers.1.self_attn.k_proj.bias",
}


@pytest.mark.parametrize("family", MISSING)
def test_a_missing_bias_is_named(family, tmp_path):
    import safetensors.numpy

    config, name = family_rows.make_config(family, "float32"), MISSING[family]
    save_lib.save(tmp_path, config, family_rows.make_params(config))
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    del tensors[name]
    if family == "gpt_neox":  # Old checkpoints hold masks, which nothing reads.
        tensors["gpt_neox.layers.0.attention.masked_bias"] = np.zeros((), np.float32)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(load_lib.CheckpointError, match=f"missing tensors: {name}"):
        load_lib.load(tmp_path)
