"""Qwen3 configuration: what `config.json` says, checked, frozen and hashable.

Knows the two spellings that Hugging Face has used for RoPE (`rope_theta` and
`rope_scaling`, or `rope_parameters`) and for the dtype (`torch_dtype`, or `dtype`).
Knows nothing of weights.
"""

import dataclasses
import json
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.model import hub


ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = ("float32", "bfloat16")

# Positions and token ids are int32.
MAX_SIZE = 2**31 - 1
_FLOAT32 = np.finfo(np.float32)
_REMEDY = "correct it, or download the file again"


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
        """Returns the config itself.

        Raises:
          ValueError: a value with which no model can be run; with its key in
            `config.json`, and the value.
        """
        for key, name in _SIZES.items():
            _check_size(key, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even (RoPE halves)")
        if self.dtype not in DTYPES:
            shown = reprlib.repr(self.dtype)
            raise ValueError(f"dtype={shown} is not one of {', '.join(DTYPES)}")
        if type(self.tie_word_embeddings) is not bool:
            shown = reprlib.repr(self.tie_word_embeddings)
            raise ValueError(
                f"tie_word_embeddings={shown} must be true or false; {_REMEDY}"
            )
        positive("rms_norm_eps", self.rms_norm_eps)
        positive("rope_theta", self.rope_theta)
        if self.yarn is not None:
            _check_yarn(self.yarn, self.rope_theta)
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


def positive(key: str, value: Any) -> float:
    """`value` as a float.

    Raises:
      ValueError: not a number, or not one that float32 holds as a positive number.
    """
    smallest, largest = float(_FLOAT32.tiny), float(_FLOAT32.max)
    if type(value) in (int, float) and smallest <= value <= largest:
        return float(value)
    raise ValueError(
        f"{key}={reprlib.repr(value)} must be a positive number in the range of "
        f"float32; {_REMEDY}"
    )


def check_token_ids(key: str, value: Any, vocab_size: int) -> None:
    """Passes if `value` is a token id, a list of them, or None.

    Raises:
      ValueError: another type, or an id outside `0 .. vocab_size - 1`.
    """
    ids = value if isinstance(value, list) else [value]
    in_range = all(type(token) is int and 0 <= token < vocab_size for token in ids)
    if value is not None and not in_range:
        raise ValueError(
            f"{key}={reprlib.repr(value)} must be token ids from 0 to "
            f"{vocab_size - 1}, the last of the vocabulary; {_REMEDY}"
        )


def _check_size(key: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise ValueError(
            f"{key}={reprlib.repr(value)} must be a positive integer, at most "
            f"{MAX_SIZE}; {_REMEDY}"
        )


def _check_yarn(yarn: YarnScaling, theta: float) -> None:
    """Refuses values of which `ops.rope` would make NaN, or divide by zero."""
    for name in ("factor", "beta_fast", "beta_slow"):
        positive(f"yarn {name}", getattr(yarn, name))
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if getattr(yarn, name) is not None:
            positive(f"yarn {name}", getattr(yarn, name))
    name = "original_max_position_embeddings"
    _check_size(f"yarn {name}", getattr(yarn, name))
    if type(yarn.truncate) is not bool:
        shown = reprlib.repr(yarn.truncate)
        raise ValueError(f"yarn truncate={shown} must be true or false; {_REMEDY}")
    if theta <= 1:
        raise ValueError(f"rope_theta={theta!r} must be above 1 with yarn; {_REMEDY}")


def from_dict(raw: Mapping[str, Any], *, dtype: str | None = None) -> Qwen3Config:
    """Reads the contents of a `config.json`; `dtype` takes the place of its own.

    Raises:
      ValueError: another architecture, a missing key, a feature that dense Qwen3
        models do not use (sliding window, attention bias, another activation), a
        quantised model, or a value with which no model can be run.
    """
    _check_supported(raw)
    missing = [key for key in _SIZES if key not in raw]
    if missing:
        raise ValueError(f"missing keys: {', '.join(missing)}; {_REMEDY}")
    theta, yarn = _read_rope(raw)
    config = Qwen3Config(
        **{name: raw[key] for key, name in _SIZES.items()},
        rms_norm_eps=positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        yarn=yarn,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dtype=dtype or raw.get("dtype") or raw.get("torch_dtype") or "float32",
    ).validate()
    check_token_ids("eos_token_id", raw.get("eos_token_id"), config.vocab_size)
    return config


def _check_supported(raw: Mapping[str, Any]) -> None:
    """Refuses another architecture, and features that would be left out."""
    architectures = raw.get("architectures") or []
    if architectures != [ARCHITECTURE] or raw.get("model_type", "qwen3") != "qwen3":
        raise ValueError(
            f"architectures={reprlib.repr(architectures)}, "
            f"model_type={reprlib.repr(raw.get('model_type'))}: only dense "
            f"{ARCHITECTURE} models are supported"
        )
    quantization = raw.get("quantization_config")
    if quantization is not None:
        raise ValueError(
            f"quantization_config={reprlib.repr(quantization)}: quantised weights are "
            "not supported; take the model's float32, bfloat16 or float16 checkpoint"
        )
    unsupported = {
        "attention_bias": (False, None),
        "use_sliding_window": (False, None),
        "hidden_act": ("silu",),
        "partial_rotary_factor": (1, None),
    }
    for key, allowed in unsupported.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(
                f"{key}={reprlib.repr(raw[key])} is not supported (need {allowed[0]})"
            )


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    """Both spellings of RoPE. As in Hugging Face 5, `rope_scaling` wins where it is
    stated, and then the base of `rope_parameters` is not used either.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    stated = raw.get(key) or {}
    if not isinstance(stated, dict):
        shown = reprlib.repr(stated)
        raise ValueError(f"{key}={shown} must be an object or null; {_REMEDY}")
    nested = [name for name, value in stated.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"{key} has parameters for each type of layer ({', '.join(nested)}), which "
            f"is not supported: every layer of a dense {ARCHITECTURE} has the same; "
            f"state them in {key} itself"
        )
    theta = stated.get("rope_theta", raw.get("rope_theta", 10_000.0))
    theta = positive("rope_theta", theta)
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(
            f"{key}: rope type {reprlib.repr(kind)} is not supported (need default or "
            "yarn)"
        )
    scaling = {
        name: value
        for name, value in stated.items()
        if name not in ("rope_type", "type", "rope_theta")
        and (value is not None or name == "truncate")
    }
    # The model's own statement wins, as in Hugging Face.
    length = "original_max_position_embeddings"
    if raw.get(length) is not None:
        scaling[length] = raw[length]
    scaling.setdefault(length, raw["max_position_embeddings"])
    names = {field.name for field in dataclasses.fields(YarnScaling)}
    unknown = sorted(set(scaling) - names)
    if unknown or "factor" not in scaling:
        what = f"has {', '.join(unknown)}" if unknown else "has no factor"
        raise ValueError(
            f"{key} {what}: yarn needs a factor and only {', '.join(sorted(names))}"
        )
    return theta, YarnScaling(**scaling)


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
      ValueError: the file is missing, cannot be read, is not JSON, or is not the
        config of a model that can be run.
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
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
