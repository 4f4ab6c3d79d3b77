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

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 112, "head_dim": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
"""A width other than `heads * head_dim`. `test_families` has Qwen's YaRN, tied."""
_forward = jax.jit(sequence.forward, static_argnums=1, static_argnames="taps")
_logits = jax.jit(sequence.logits, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, ours and Hugging Face's, and the oracle's outputs for `tokens`."""

    config: config_lib.Qwen3Config
    params: object
    oracle: object
    tokens: jax.Array  # [2, 96] int32
    logits: np.ndarray  # [2, 96, V] float32
    hidden_states: list[np.ndarray]  # L + 1 of [2, 96, D]; the last is normed
    last_residual: np.ndarray  # [2, 96, D], before the final norm

    def ours(self, *, params=None, **changes) -> np.ndarray:
        """Returns our logits, with other weights or other fields of the config."""
        config = dataclasses.replace(self.config, **changes)
        return np.asarray(_logits(params or self.params, config, self.tokens))


def make_case(dtype: str, folder) -> Case:
    """Saves a model in shards, and reads it back."""
    write_oracle("Qwen3", SIZES, folder, dtype=dtype, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    # Read back, because `.to("bfloat16")` has rounded RoPE's frequencies too: the
    # oracle would be wrong. Reading leaves them in float32.
    oracle = transformers.Qwen3ForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    assert oracle.model.rotary_emb.inv_freq.dtype == torch.float32
    config, params = load_lib.load(folder)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (2, 96), dtype=np.int32)
    residuals = []
    oracle.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: residuals.append(output)
    )
    with torch.no_grad():
        outputs = oracle(torch.from_numpy(tokens).long(), output_hidden_states=True)
    return Case(
        config=config,
        params=params,
        oracle=oracle,
        tokens=jnp.asarray(tokens),
        logits=outputs.logits.float().numpy(),
        hidden_states=[state.float().numpy() for state in outputs.hidden_states],
        last_residual=residuals[0].float().numpy(),
    )


def faults(case: Case) -> dict[str, np.ndarray]:
    """Returns our logits with planted faults, each of which must be noticed."""
    params = case.params
    exchanged = [x.replace(q_norm=x.k_norm, k_norm=x.q_norm) for x in params.layers]
    return {
        "norms of heads": case.ours(params=params.replace(layers=tuple(exchanged))),
        "order of layers": case.ours(params=params.replace(layers=params.layers[::-1])),
        "rope_theta 1 % off": case.ours(rope_theta=1.01 * case.config.rope_theta),
    }


def test_logits_and_features(tmp_path):
    """Compares with Hugging Face's; the last feature is the stream before the norm."""
    case = make_case("float32", tmp_path)
    assert f32_error(case.ours(), case.logits) <= 1
    for name, wrong in faults(case).items():
        assert f32_error(wrong, case.logits) >= 10, name
    taps = tuple(range(case.config.num_layers + 1))
    outputs = _forward(case.params, case.config, case.tokens, taps=taps)
    *found, last = np.moveaxis(np.asarray(outputs.features), 2, 0)
    *expected, normed = case.hidden_states
    for ours, theirs in zip(found, expected, strict=True):
        assert f32_error(ours, theirs) <= 1
    assert f32_error(last, case.last_residual) <= 1
    assert f32_error(np.asarray(outputs.hidden), normed) <= 1
    # Negative controls: one layer further, and after the norm.
    assert f32_error(found[0], expected[1]) > 100
    assert f32_error(last, normed) > 100


def test_bfloat16(tmp_path):
    """Fails if our logits are further from exact ones, in float32, than the oracle's.

    A `rope_theta` that is 1 % off is not seen among bfloat16's roundings.
    """
    case = make_case("bfloat16", tmp_path)
    assert case.config.dtype == case.params.embed.dtype == "bfloat16"
    with torch.no_grad():
        tokens = torch.tensor(np.asarray(case.tokens)).long()
        exact = case.oracle.float()(tokens).logits.numpy()

    def error(logits):
        """Returns the relative error of a position, in the mean square."""
        gap = np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        return math.sqrt(np.mean(gap**2))

    assert 0 < error(case.logits) < 0.02
    assert error(case.ours()) <= 1.1 * error(case.logits)
    planted = faults(case)
    del planted["rope_theta 1 % off"]
    for name, wrong in planted.items():
        assert error(wrong) >= 5 * error(case.logits), name
