"""Qwen3 configuration: what `config.json` says, checked, frozen and hashable.

Knows the two spellings that Hugging Face has used for RoPE (`rope_theta` and
`rope_scaling`, or `rope_parameters`) and for the dtype (`torch_dtype`, or `dtype`).
Knows nothing of weights.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from spec_jax.model import hub


ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN context extension (Peng et al. 2023, https://arxiv.org/abs/2309.00071).

    Static, as in Hugging Face: it changes short prompts too.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes and constants of a dense Qwen3 model.

    `head_dim` is stated, never derived: `num_heads * head_dim` differs from
    `hidden_size` in Qwen3-0.6B, 4B and 32B.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    yarn: YarnScaling | None = None
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_size(self) -> int:
        """Width of the concatenated heads, `N * H`."""
        return self.num_heads * self.head_dim

    def validate(self) -> "Qwen3Config":
        """Returns the config itself, or raises `ValueError` with the values."""
        sizes = dataclasses.asdict(self)
        for name in _SIZES.values():
            if type(sizes[name]) is not int or sizes[name] < 1:
                raise ValueError(f"{name}={sizes[name]!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even (RoPE halves)")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {DTYPES}")
        return self


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}


def from_dict(raw: Mapping[str, Any], *, dtype: str | None = None) -> Qwen3Config:
    """Reads the contents of a `config.json`; `dtype` takes the place of its own.

    Raises:
      ValueError: another architecture, a missing key, or a feature that dense
        Qwen3 models do not use (sliding window, attention bias, another activation).
    """
    architectures = tuple(raw.get("architectures") or ())
    if architectures != (ARCHITECTURE,) or raw.get("model_type", "qwen3") != "qwen3":
        raise ValueError(
            f"architectures={list(architectures)}, "
            f"model_type={raw.get('model_type')!r}: only dense {ARCHITECTURE} "
            "models are supported"
        )
    missing = [key for key in _SIZES if key not in raw]
    if missing:
        raise ValueError(f"missing keys: {', '.join(missing)}")
    unsupported = {
        "attention_bias": (False, None),
        "use_sliding_window": (False, None),
        "hidden_act": ("silu",),
    }
    for key, allowed in unsupported.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(f"{key}={raw[key]!r} is not supported (need {allowed[0]})")
    theta, yarn = _read_rope(raw)
    return Qwen3Config(
        **{name: raw[key] for key, name in _SIZES.items()},
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        yarn=yarn,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype or raw.get("dtype") or raw.get("torch_dtype") or "float32",
    ).validate()


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    """Both spellings of RoPE; the newer `rope_parameters` wins where it is present."""
    stated = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scaling = {key: value for key, value in stated.items() if value is not None}
    theta = scaling.pop("rope_theta", raw.get("rope_theta", 10_000.0))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise ValueError(f"rope type {kind!r} is not supported (need default or yarn)")
    scaling.setdefault(
        "original_max_position_embeddings", raw["max_position_embeddings"]
    )
    names = {field.name for field in dataclasses.fields(YarnScaling)}
    unknown = sorted(set(scaling) - names)
    if unknown or "factor" not in scaling:
        raise ValueError(f"yarn scaling needs a factor and only {sorted(names)}")
    return float(theta), YarnScaling(**scaling)


def to_dict(config: Qwen3Config) -> dict[str, Any]:
    """The `config.json` that `from_dict` reads back, in the older (4.51) spelling."""
    scaling = None
    if config.yarn is not None:
        stated = dataclasses.asdict(config.yarn)
        scaling = {"rope_type": "yarn"} | {
            key: value for key, value in stated.items() if value is not None
        }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **{key: getattr(config, name) for key, name in _SIZES.items()},
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
        "use_sliding_window": False,
    }


def read(path: pathlib.Path, *, dtype: str | None = None) -> Qwen3Config:
    """Reads a `config.json`, as `from_dict` does; every error names the file.

    Raises:
      ValueError: the file is missing, not JSON, or not a dense Qwen3 config.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = hub.hint(path.parent) or "is this a model folder?"
        raise ValueError(f"{path}: no such file; {hint}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a JSON object")
    try:
        return from_dict(raw, dtype=dtype)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
