"""Families: parity with Hugging Face, and configs that are refused."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import test_rows as rows_lib
from slow_cases import slow_but

from spec_jax import testing
from spec_jax.model import (
    checkpoint_files as files,
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
ROPE = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0}
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
    # Its width is not `heads * head_dim`.
    "qwen3": ("Qwen3", LLAMA | {
        "hidden_size": 128, "intermediate_size": 112, "head_dim": 80}),
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
    """Returns the largest difference in units of 1e-4 of the largest number."""
    return np.abs(ours - theirs).max() / (1e-4 * np.abs(theirs).max())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A folder that Hugging Face wrote, and what its model gives for `tokens`."""

    folder: pathlib.Path
    tokens: np.ndarray  # [2, T] int32: a prompt, and what the model decodes greedily
    logits: np.ndarray  # [2, T, V]
    hidden_states: list[np.ndarray]  # L + 1 of [2, T, D]; the last is normed
    last_residual: np.ndarray  # [2, T, D], before the final norm


@pytest.fixture(
    scope="module",
    params=slow_but(CASES, "sequential-tanh", "llama3", "qwen2-yarn-tied", "qwen3"),
)
def case(request, tmp_path_factory) -> Case:
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param)
    shards = {"max_shard_size": "100KB"} if request.param == "qwen3" else {}
    oracle = write_oracle(*CASES[request.param], folder, **shards)
    assert (folder / files.INDEX_FILE).exists() == bool(shards)
    rng = np.random.default_rng(3)
    ids = torch.tensor(rng.integers(1, 256, (2, PROMPT)))
    residuals = []
    keep = lambda layer, inputs, output: residuals.append(output)
    with torch.no_grad():
        for _ in range(STEPS):
            last = oracle(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, last], dim=1)
        with oracle.base_model.layers[-1].register_forward_hook(keep):
            outputs = oracle(ids, output_hidden_states=True)
    assert len(np.unique(ids[:, PROMPT:])) > 5
    return Case(
        folder=folder,
        tokens=ids.numpy().astype(np.int32),
        logits=outputs.logits.numpy(),
        hidden_states=[state.numpy() for state in outputs.hidden_states],
        last_residual=residuals[0].numpy(),
    )


_forward = jax.jit(sequence.forward, static_argnums=1, static_argnames="taps")
_logits = jax.jit(sequence.logits, static_argnums=1)


def logits_of(params, config, tokens) -> np.ndarray:
    return np.asarray(_logits(params, config, jnp.asarray(tokens)))


def with_layers(params, changed):
    return params.replace(layers=tuple(map(changed, params.layers)))


def spoilt(params) -> list:
    """Returns weights of Qwen3 in which norms of heads, or layers, are exchanged."""
    exchanged = lambda x: x.replace(q_norm=x.k_norm, k_norm=x.q_norm)
    backwards = params.replace(layers=params.layers[::-1])
    return [with_layers(params, exchanged), backwards]


def test_logits_and_greedy_tokens_are_hugging_faces(case):
    """Fails if residual, GELU, order of the fused projection or rotation is wrong."""
    config, params = load_lib.load(case.folder)
    ours = logits_of(params, config, case.tokens)
    assert f32_error(ours, case.logits) <= 1
    np.testing.assert_array_equal(
        ours[:, PROMPT - 1 : -1].argmax(-1), case.tokens[:, PROMPT:]
    )
    changes, others = [{"rope_theta": 1.01 * config.rope_theta}], []
    if config.model_type == "gpt_neox":
        changes.append({"has_parallel_residual": not config.has_parallel_residual})
        act = "gelu" if config.hidden_act != "gelu" else "gelu_new"
        changes.append({"hidden_act": act})
    elif config.scaling is not None:
        changes.append({"scaling": None})
    if config.model_type == "qwen3":
        others = spoilt(params)
    if config.model_type == "qwen2":
        less = lambda x: x.replace(qkv_bias=0.9 * x.qkv_bias)
        others = [with_layers(params, less)]
    wrong = [(params, dataclasses.replace(config, **change)) for change in changes]
    for planted in (*wrong, *((other, config) for other in others)):
        assert f32_error(logits_of(*planted, case.tokens), case.logits) > 1, planted


def test_features_are_hugging_faces(case):
    """Fails if a feature is of another layer, or the last one is not the residual
    stream before the norm."""
    config, params = load_lib.load(case.folder)
    taps = tuple(range(config.num_layers + 1))
    outputs = _forward(params, config, jnp.asarray(case.tokens), taps=taps)
    found = np.moveaxis(np.asarray(outputs.features), 2, 0)
    *expected, normed = case.hidden_states
    for ours, theirs in zip(found, [*expected, case.last_residual], strict=True):
        assert f32_error(ours, theirs) <= 1
    assert f32_error(np.asarray(outputs.hidden), normed) <= 1
    # Negative controls: another layer, and after the norm.
    assert f32_error(found[0], case.last_residual) > 100
    assert f32_error(found[-1], normed) > 100


def test_bfloat16(tmp_path):
    """Fails if our logits are further from exact ones, in float32, than the oracle's. A
    `rope_theta` that is 1 % off is not seen among bfloat16's roundings."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_oracle(*CASES["qwen3"], tmp_path, dtype="bfloat16")
    # Read back, because `.to("bfloat16")` has rounded RoPE's frequencies too: the
    # oracle would be wrong. Reading leaves them in float32.
    oracle = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path, dtype="bfloat16", attn_implementation="eager"
    )
    assert oracle.model.rotary_emb.inv_freq.dtype == torch.float32
    config, params = load_lib.load(tmp_path)
    assert config.dtype == params.embed.dtype == "bfloat16"
    tokens = np.random.default_rng(0).integers(0, 256, (2, 96), dtype=np.int32)
    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        theirs = oracle(ids).logits.float().numpy()
        exact = oracle.float()(ids).logits.numpy()

    def error(logits):
        """Returns the relative error of a position, in the mean square."""
        gap = np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        return math.sqrt(np.mean(gap**2))

    assert 0 < error(theirs) < 0.02
    assert error(logits_of(params, config, tokens)) <= 1.1 * error(theirs)
    for wrong in spoilt(params):
        assert error(logits_of(wrong, config, tokens)) >= 5 * error(theirs)


def read_tensors(folder) -> dict[str, np.ndarray]:
    """Returns the tensors of all files in a folder."""
    held = {}
    for path in folder.glob("*.safetensors"):
        held |= safetensors.numpy.load_file(path)
    return held


def test_what_is_saved_is_hugging_faces(case, tmp_path):
    """Fails if saving does not undo the order of rows, or loses a tensor or a size."""
    config, params = load_lib.load(case.folder)
    save_lib.save(tmp_path, config, params)
    theirs, ours = read_tensors(case.folder), read_tensors(tmp_path)
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
    config, name = rows_lib.make_config("float32", family), MISSING[family]
    save_lib.save(tmp_path, config, rows_lib.make_params(config))
    tensors = read_tensors(tmp_path)
    del tensors[name]
    if family == "gpt_neox":  # Old checkpoints hold masks, which nothing reads.
        tensors["gpt_neox.layers.0.attention.masked_bias"] = np.zeros((), np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / files.SINGLE_FILE)
    with pytest.raises(load_lib.CheckpointError, match=f"missing tensors: {name}"):
        load_lib.load(tmp_path)
