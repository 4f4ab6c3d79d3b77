"""Families beside Qwen3: parity with Hugging Face, the row contract, whole rounds.

Each comparison has a negative control, as in `test_parity` and `test_rows`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.model import (
    load as load_lib,
    sequence,
)


PROMPT, STEPS = 24, 64

NEOX = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = NEOX | {"num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5}
LLAMA.pop("layer_norm_eps")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "parallel": ("GPTNeoX", NEOX),
    "sequential": ("GPTNeoX", NEOX | {"use_parallel_residual": False}),
    "tanh": ("GPTNeoX", NEOX | {"hidden_act": "gelu_new", "num_attention_heads": 3}),
    "all-rotated": (
        "GPTNeoX",
        NEOX
        | {"hidden_size": 80, "num_attention_heads": 1, "num_hidden_layers": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        | {"rotary_pct": 1.0, "use_parallel_residual": False},
    ),
    "llama": ("Llama", LLAMA),
    "llama3": ("Llama", LLAMA | {"rope_parameters": LLAMA3}),
}


def write_oracle(kind: str, sizes: dict, folder):
    """Hugging Face's own folder of random weights, biases and norms too."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
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
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A folder, the oracle, and its greedy tokens with their logits."""
    import torch

    folder = tmp_path_factory.mktemp(request.param)
    oracle = write_oracle(*CASES[request.param], folder)
    rng = np.random.default_rng(3)
    ids = torch.tensor(rng.integers(1, 256, (2, PROMPT)))
    with torch.no_grad():
        for _ in range(STEPS):
            best = oracle(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, best], dim=1)
        logits = oracle(ids).logits.float().numpy()
    assert len(np.unique(ids[:, PROMPT:])) > 10
    return folder, ids.numpy().astype(np.int32), logits


_logits = jax.jit(sequence.logits, static_argnums=1)


def error(params, config, tokens, theirs) -> float:
    """The largest difference, in units of the tolerance of 1e-4."""
    ours = np.asarray(_logits(params, config, jnp.asarray(tokens)))
    return np.abs(ours - theirs).max() / (1e-4 * np.abs(theirs).max())


@pytest.mark.oracle
def test_logits_and_greedy_tokens_are_hugging_faces(case):
    """Fails on another residual, GELU, order of the fused projection, or rotation."""
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
        assert error(params, other, tokens, theirs) > 1.5, other


@pytest.mark.oracle
def test_what_is_saved_is_hugging_faces(case, tmp_path):
    """Fails if the order of rows is not undone, or a constant is not written."""
    import safetensors.numpy

    folder, _, _ = case
    config, params = load_lib.load(folder)
    load_lib.save(tmp_path, config, params)
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
