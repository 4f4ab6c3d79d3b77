"""Parity with Hugging Face's Qwen3 on random tiny models that it saved itself.

Every comparison has a negative control: the same check must fail on a planted fault.
A check that passes with a planted fault would not be a check.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import f32_error, write_oracle

from spec_jax.model import config as config_lib, load as load_lib, sequence


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 96
SIZES = {
    "vocab_size": 256,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHAPES = {
    "ratio2-h80": {
        "hidden_size": 128, "head_dim": 80, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "yarn": {
        "hidden_size": 96, "head_dim": 64, "tie_word_embeddings": True,
        "rope_parameters": YARN | {"rope_theta": 10_000.0},
    },
}  # fmt: skip
"""Sizes with `heads * head_dim` other than the width. The first is saved in shards."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, ours and Hugging Face's, and the oracle's outputs for `tokens`."""

    config: config_lib.Qwen3Config
    params: object
    oracle: object
    tokens: jax.Array  # [BATCH, LENGTH] int32
    logits: np.ndarray  # [BATCH, LENGTH, V] float32
    hidden_states: list[np.ndarray]  # L + 1 of [BATCH, LENGTH, D]; the last is normed
    last_residual: np.ndarray  # [BATCH, LENGTH, D], before the final norm


def make_case(name: str, dtype: str, folder) -> Case:
    saved = {"dtype": dtype, "max_shard_size": "1GB" if name == "yarn" else "100KB"}
    write_oracle("Qwen3", SIZES | SHAPES[name], folder, **saved)
    is_sharded = (folder / "model.safetensors.index.json").exists()
    assert is_sharded == (name != "yarn")
    # Read back, because `.to("bfloat16")` has rounded RoPE's frequencies too: the
    # oracle would be wrong. Reading leaves them in float32.
    oracle = transformers.Qwen3ForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    assert oracle.model.rotary_emb.inv_freq.dtype == torch.float32
    config, params = load_lib.load(folder)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (BATCH, LENGTH), dtype=np.int32)
    residuals = []
    hook = oracle.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: residuals.append(output)
    )
    with torch.no_grad():
        outputs = oracle(torch.from_numpy(tokens).long(), output_hidden_states=True)
    hook.remove()
    return Case(
        config=config,
        params=params,
        oracle=oracle,
        tokens=jnp.asarray(tokens),
        logits=outputs.logits.float().numpy(),
        hidden_states=[state.float().numpy() for state in outputs.hidden_states],
        last_residual=residuals[0].float().numpy(),
    )


@pytest.fixture(scope="module", params=SHAPES)
def case(request, tmp_path_factory) -> Case:
    """Returns a case of each shape in float32."""
    return make_case(request.param, "float32", tmp_path_factory.mktemp("case"))


def _run(params, config, tokens):
    """Returns logits, features at all indices, and the normed hidden state."""
    taps = tuple(range(config.num_layers + 1))
    outputs = sequence.forward(params, config, tokens, taps=taps)
    logits = sequence.logits(params, config, tokens)
    return logits, outputs.features, outputs.hidden


_run_compiled = jax.jit(_run, static_argnums=1)


def our_logits(case: Case, **changes) -> np.ndarray:
    """Returns our logits for `case.tokens`, with fields of the case replaced."""
    case = dataclasses.replace(case, **changes)
    return np.asarray(_run_compiled(case.params, case.config, case.tokens)[0])


def edit_layers(params, **edits):
    """Replaces fields of every layer of `params` by functions of the layer."""
    layers = tuple(
        layer.replace(**{name: edit(layer) for name, edit in edits.items()})
        for layer in params.layers
    )
    return params.replace(layers=layers)


def faults(case: Case) -> dict[str, dict]:
    """Returns planted faults, as changes of the case; each must be noticed."""
    config, params = case.config, case.params
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    interleaved = np.arange(H).reshape(2, -1).T.reshape(-1)

    def regroup(layer):
        """Moves query heads by one group, so that they read other key/value heads."""
        q = layer.qkv[: N * H].reshape(K, N // K, H, -1)
        q = jnp.roll(q, 1, axis=0).reshape(N * H, -1)
        return jnp.concatenate([q, layer.qkv[N * H :]])

    edits = {
        "q_norm skipped": {"q_norm": lambda x: jnp.ones_like(x.q_norm)},
        "q_norm and k_norm exchanged": {
            "q_norm": lambda x: x.k_norm, "k_norm": lambda x: x.q_norm},
        "gate and up exchanged": {
            "gate_up": lambda x: jnp.roll(x.gate_up, len(x.gate_up) // 2, 0)},
        "norms of a layer exchanged": {
            "input_norm": lambda x: x.mlp_norm, "mlp_norm": lambda x: x.input_norm},
        "norm weight of the rotated pairs": {"k_norm": lambda x: x.k_norm[interleaved]},
        "heads in the wrong groups": {"qkv": regroup},
    }  # fmt: skip
    planted = {name: edit_layers(params, **edit) for name, edit in edits.items()}
    planted["layers in reverse"] = params.replace(layers=params.layers[::-1])
    moved = jnp.roll(params.head, 1, axis=1)
    planted["head not the embedding's"] = params.replace(lm_head=moved)
    changes = {name: {"params": params} for name, params in planted.items()}
    others = {"rope_theta 1 % off": {"rope_theta": 1.01 * config.rope_theta}}
    if config.scaling is not None:
        unscaled = dataclasses.replace(config.scaling, attention_factor=1.0)
        others["YaRN left out"] = {"scaling": None}
        others["YaRN without its scale"] = {"scaling": unscaled}
    for name, other in others.items():
        changes[name] = {"config": dataclasses.replace(config, **other)}
    return changes


def test_logits(case):
    """Fails if logits differ, or if one of `faults` does not change them by far."""
    assert f32_error(our_logits(case), case.logits) <= 1
    assert f32_error(np.zeros_like(case.logits), case.logits) > 100
    errors = {
        name: f32_error(our_logits(case, **change), case.logits)
        for name, change in faults(case).items()
    }
    unnoticed = {name: error for name, error in errors.items() if error < 10}
    assert not unnoticed


def test_features(case):
    """Compares indices with Hugging Face's; the last is the stream before the norm."""
    L = case.config.num_layers
    _, features, hidden = _run_compiled(case.params, case.config, case.tokens)
    features = np.asarray(features)
    expected = [*case.hidden_states[:L], case.last_residual]
    for k in range(L + 1):
        assert f32_error(features[:, :, k], expected[k]) <= 1, k
        # Negative control: off by one layer.
        other = expected[k + 1 if k < L else k - 1]
        assert f32_error(features[:, :, k], other) > 100, k
    assert f32_error(np.asarray(hidden), case.hidden_states[L]) <= 1
    assert f32_error(features[:, :, L], case.hidden_states[L]) > 100


def row_errors(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Returns the relative error in norm at each position: `[BATCH, LENGTH]`."""
    difference = np.linalg.norm(ours - theirs, axis=-1)
    return difference / np.linalg.norm(theirs, axis=-1)


def rms(errors: np.ndarray) -> float:
    """Returns the root of the mean square."""
    return math.sqrt(np.mean(errors.astype(np.float64) ** 2))


def bf16_tolerance(num_layers: int) -> float:
    """Returns how far correct bfloat16 models may be apart, in the mean over positions.

    Both sides round to bfloat16 after each operation, but not the same numbers: they
    sum in other orders, and ours keeps scores and logits in float32. One rounding has
    a relative error of at most u = 2**-8, and u / sqrt(3) in the mean square. Along the
    longest path a layer has about 20: norm 2, projection 1, head norm 2, RoPE 3, scores
    1, probabilities 1, values 1, output 1, sum 1; norm 2, gate and up 1, silu 1,
    product 1, down 1, sum 1. The final norm and the head add 3. Squares of independent
    errors add up, for both sides: sqrt(2 * (20 L + 3)) * u / sqrt(3), which is 2.1 %
    for two layers. Measured: 1.3 to 1.5 %, for 23 models.
    """
    roundings = 20 * num_layers + 3
    return math.sqrt(2 * roundings / 3) * 2.0**-8


def test_bfloat16(tmp_path):
    """Fails if errors exceed bfloat16's noise, or planted faults do not by many times.

    A `rope_theta` that is 1 % off does not exceed it on a hundred positions: only the
    float32 test sees that fault.
    """
    case = make_case("ratio2-h80", "bfloat16", tmp_path)
    assert case.config.dtype == case.params.embed.dtype == "bfloat16"
    tolerance = bf16_tolerance(case.config.num_layers)
    ours = our_logits(case)
    errors = row_errors(ours, case.logits)
    assert rms(errors) <= tolerance
    assert errors.max() <= 3 * tolerance
    planted = faults(case)
    del planted["rope_theta 1 % off"]
    wrong = {name: our_logits(case, **change) for name, change in planted.items()}
    wrong["zeros"] = np.zeros_like(ours)
    seen = {name: rms(row_errors(w, case.logits)) for name, w in wrong.items()}
    assert not {name: error for name, error in seen.items() if error < 5 * tolerance}
    # Our logits are as near to exact ones, in float32, as the oracle's.
    with torch.no_grad():
        tokens = torch.tensor(np.asarray(case.tokens)).long()
        exact = case.oracle.float()(tokens).logits.numpy()
    assert rms(row_errors(ours, exact)) <= 1.1 * rms(row_errors(case.logits, exact))
