"""Configuration: the contents of `config.json`, checked, frozen and hashable.

Knows the two spellings that Hugging Face has used for RoPE (`rope_theta` and
`rope_scaling`, or `rope_parameters`) and for the dtype (`torch_dtype`, or `dtype`).
Knows nothing of weights. Fields of a single family are in that family's module, except
Qwen3's, which are here.
"""

import dataclasses
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from spec_jax import regular_files
from spec_jax.model import families, gguf_file, hub


DTYPES = ("float32", "bfloat16")
WEIGHTS = ("dense", "q8_0", "q4_1")
"""Forms of matrices: of the model's dtype, of eight bits, of four (`native.blocks`)."""

QUANTIZATIONS = {form: {"quant_method": f"spec_jax_{form}"} for form in WEIGHTS[1:]}
"""The `quantization_config` by which a folder states that form of its matrices."""

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

    def validate(self, theta: float) -> None:
        """Raises `ValueError` for values with which `ops.rope` gives NaN or fails.

        An `mscale` of 0 means none, as in Hugging Face.
        """
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            if getattr(self, name) is not None:
                positive(f"yarn {name}", getattr(self, name))
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) not in (None, 0):
                positive(f"yarn {name}", getattr(self, name))
        name = "original_max_position_embeddings"
        check_size(f"yarn {name}", getattr(self, name))
        check_flag("yarn truncate", self.truncate)
        if theta <= 1:
            raise _refusal("rope_theta", theta, "above 1 with yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's context extension, static: low frequencies are slowed down."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def validate(self, theta: float) -> None:
        """Raises `ValueError` for values with which `ops.rope` gives NaN or fails."""
        del theta
        for key, value in dataclasses.asdict(self).items():
            positive(f"llama3 {key}", value)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high:
            raise ValueError(
                f"llama3 low_freq_factor={low} must be below high_freq_factor={high}"
            )


Scaling = YarnScaling | Llama3Scaling
SCALINGS: Mapping[str, type[Scaling]] = {"yarn": YarnScaling, "llama3": Llama3Scaling}
"""Context extensions, by Hugging Face's `rope_type`."""


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants that a model of any family has.

    `model_type` is the family's key in `families.MODULES`, and `KEYS` has the fields
    that are read and written as they are, by their keys in `config.json`.
    """

    model_type: ClassVar[str]
    KEYS: ClassVar[dict[str, str]] = SIZES | {
        "tie_word_embeddings": "tie_word_embeddings"
    }

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    weights: str = "dense"  # of `WEIGHTS`

    @property
    def is_bytes(self) -> bool:
        """Whether matrices are blocks of eight or four bits."""
        return self.weights != "dense"

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_size(self) -> int:
        """Width of the concatenated heads, `N * H`."""
        return self.num_heads * self.head_dim

    def validate(self) -> Self:
        """Returns the config itself.

        Raises:
          ValueError: a value with which no model can be run; the message names its key
            in `config.json` and the value.
        """
        for key, name in SIZES.items():
            check_size(key, getattr(self, name))
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
        check_form("weights", self.weights)
        check_flag("tie_word_embeddings", self.tie_word_embeddings)
        positive("rope_theta", self.rope_theta)
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedConfig(ModelConfig):
    """A dense model with RMSNorm and a gated MLP, as Qwen3, Qwen2 and Llama.

    Attributes:
      has_head_norms: whether queries and keys are normed.
      has_biases: whether queries, keys and values have biases.
    """

    KEYS = ModelConfig.KEYS | {"rms_norm_eps": "rms_norm_eps"}
    has_head_norms: ClassVar[bool] = False
    has_biases: ClassVar[bool] = False

    rms_norm_eps: float = 1e-6
    scaling: Scaling | None = None

    def validate(self) -> Self:
        """Implements `ModelConfig.validate`."""
        super().validate()
        positive("rms_norm_eps", self.rms_norm_eps)
        if self.scaling is not None:
            self.scaling.validate(self.rope_theta)
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(GatedConfig):
    """A dense Qwen3 model.

    `head_dim` is stated, never derived: `num_heads * head_dim` differs from
    `hidden_size` in Qwen3-0.6B, 4B and 32B.
    """

    model_type = "qwen3"
    has_head_norms = True

    rope_theta: float = 1_000_000.0


def _refusal(key: str, value: Any, need: str) -> ValueError:
    shown = reprlib.repr(value)
    return ValueError(f"{key}={shown} must be {need}; {_REMEDY}")


def positive(key: str, value: Any) -> float:
    """Returns `value` as a float.

    Raises:
      ValueError: not a number, or not a positive normal number of float32.
    """
    smallest, largest = float(_FLOAT32.tiny), float(_FLOAT32.max)
    if type(value) in (int, float) and smallest <= value <= largest:
        return float(value)
    raise _refusal(key, value, "a positive number in the range of float32")


def check_token_ids(key: str, value: Any, vocab_size: int) -> None:
    """Passes if `value` is a token id, a list of them, or None.

    Raises:
      ValueError: another type, or an id outside `0 .. vocab_size - 1`.
    """
    ids = value if isinstance(value, list) else [value]
    in_range = all(type(token) is int and 0 <= token < vocab_size for token in ids)
    if value is not None and not in_range:
        last = f"{vocab_size - 1}, the last of the vocabulary"
        raise _refusal(key, value, f"token ids from 0 to {last}")


def check_size(key: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is an integer from 1 to `MAX_SIZE`."""
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise _refusal(key, value, f"a positive integer, at most {MAX_SIZE}")


def check_flag(key: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is true or false."""
    if type(value) is not bool:
        raise _refusal(key, value, "true or false")


def check_form(name: str, weights: str) -> None:
    """Raises `ValueError` unless `weights` is one of `WEIGHTS`."""
    if weights not in WEIGHTS:
        shown = reprlib.repr(weights)
        raise ValueError(f"{name}={shown} is not one of {', '.join(WEIGHTS)}")


def from_dict(
    raw: Mapping[str, Any], *, dtype: str | None = None, weights: str | None = None
) -> ModelConfig:
    """Reads the contents of a `config.json`; `dtype` takes the place of its own.

    Args:
      weights: one of `WEIGHTS`; None: the form that the file states.

    Raises:
      ValueError: another family, a missing key, a feature that the models of the family
        do not use (such as a sliding window), a quantised model, or a value with which
        no model can be run.
    """
    family = families.named(raw)
    quantization = raw.get("quantization_config")
    own = [form for form, mark in QUANTIZATIONS.items() if mark == quantization]
    if quantization is not None and not own:
        raise ValueError(
            f"quantization_config={reprlib.repr(quantization)}: quantised weights are "
            "not supported; take the model's float32, bfloat16 or float16 checkpoint"
        )
    if own and weights not in (None, *own):
        raise ValueError(
            f"weights={reprlib.repr(weights)}, but those of the folder are {own[0]}: "
            "take the folder that they were made of"
        )
    config = family.read_config(raw, dtype=dtype)
    weights = weights or "".join(own) or "dense"
    config = dataclasses.replace(config, weights=weights).validate()
    check_token_ids("eos_token_id", raw.get("eos_token_id"), config.vocab_size)
    return config


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Writes the `config.json` that `from_dict` reads, in the older (4.51) spelling."""
    architecture, _ = families.MODULES[config.model_type]
    names = {"architectures": [architecture], "model_type": config.model_type}
    made = names | families.of(config).write_config(config)
    mark = QUANTIZATIONS.get(config.weights)
    return made | ({"quantization_config": mark} if mark else {})


Config = TypeVar("Config", bound=ModelConfig)


def read_fields(kind: type[Config], raw: Mapping[str, Any], **own: Any) -> Config:
    """Reads a config of this kind: the fields of its `KEYS`, and its `own`.

    Raises:
      ValueError: sizes that are missing.
    """
    keys = {key: name for key, name in kind.KEYS.items() if name not in own}
    missing = [key for key in keys if key in SIZES and key not in raw]
    if missing:
        raise ValueError(f"missing keys: {', '.join(missing)}; {_REMEDY}")
    return kind(**{keys[key]: raw[key] for key in keys if key in raw}, **own)


def write_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the values that `read_fields` reads, and the dtype."""
    stated = {key: getattr(config, name) for key, name in config.KEYS.items()}
    return stated | {"torch_dtype": config.dtype}


def read_dtype(raw: Mapping[str, Any], dtype: str | None) -> Any:
    """Returns `dtype`, else what either spelling of the key says, else float32."""
    return dtype or raw.get("dtype") or raw.get("torch_dtype") or "float32"


def check_features(raw: Mapping[str, Any], allowed: Mapping[str, tuple]) -> None:
    """Raises `ValueError` if a key is present with a value that is not allowed."""
    for key, values in allowed.items():
        if key in raw and raw[key] not in values:
            raise ValueError(
                f"{key}={reprlib.repr(raw[key])} is not supported (need {values[0]})"
            )


def read_rope(
    raw: Mapping[str, Any], *, kinds: tuple[str, ...], default_theta: float = 10_000.0
) -> tuple[float, str, dict[str, Any]]:
    """Reads the base, the type and the other constants of both spellings of RoPE.

    As in Hugging Face 5, `rope_scaling` wins where it is stated, and then the base of
    `rope_parameters` is not used either.

    Raises:
      ValueError: not an object, one for each type of layer, or a type not in `kinds`.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    stated = raw.get(key) or {}
    if not isinstance(stated, dict):
        raise _refusal(key, stated, "an object or null")
    nested = [name for name, value in stated.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"{key} has parameters for each type of layer ({', '.join(nested)}), which "
            f"is not supported: every layer of a dense model has the same; "
            f"state them in {key} itself"
        )
    theta = stated.get("rope_theta", raw.get("rope_theta", default_theta))
    theta = positive("rope_theta", theta)
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in kinds:
        raise ValueError(
            f"{key}: rope type {reprlib.repr(kind)} is not supported (need "
            f"{' or '.join(kinds)})"
        )
    scaling = {
        name: value
        for name, value in stated.items()
        if name not in ("rope_type", "type", "rope_theta")
        and (value is not None or name == "truncate")
    }
    return theta, kind, scaling


def read_scaled_rope(raw: Mapping[str, Any]) -> tuple[float, Scaling | None]:
    """Reads the base of RoPE and the constants of a scaled one.

    Raises:
      ValueError: as `read_rope`; an unknown constant, or a missing one.
    """
    theta, kind, stated = read_rope(raw, kinds=("default", *SCALINGS))
    if kind == "default":
        return theta, None
    # The model's own statement wins, as in Hugging Face.
    length = "original_max_position_embeddings"
    if raw.get(length) is not None:
        stated[length] = raw[length]
    stated.setdefault(length, raw["max_position_embeddings"])
    fields = dataclasses.fields(SCALINGS[kind])
    names = {field.name: field.default for field in fields}
    unknown = sorted(set(stated) - set(names))
    needed = [name for name in names if names[name] is dataclasses.MISSING]
    missing = [name for name in needed if name not in stated]
    if unknown or missing:
        key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        what = "has " + ", ".join(unknown) if unknown else f"has no {missing[0]}"
        raise ValueError(
            f"{key} {what}: {kind} needs a factor and only {', '.join(sorted(names))}"
        )
    return theta, SCALINGS[kind](**stated)


def write_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    """Returns the `rope_scaling` that `read_scaled_rope` reads back."""
    if scaling is None:
        return None
    (kind,) = (kind for kind, made in SCALINGS.items() if type(scaling) is made)
    stated = dataclasses.asdict(scaling)
    given = {key: value for key, value in stated.items() if value is not None}
    return {"rope_type": kind} | given


def read(
    path: pathlib.Path, *, dtype: str | None = None, weights: str | None = None
) -> ModelConfig:
    """Reads a `config.json`, as `from_dict` does; every error names the file.

    Raises:
      ValueError: the file is missing, cannot be read, is not JSON, or is not the
        config of a model that can be run.
    """
    try:
        raw = read_object(path)
    except FileNotFoundError:
        hint = hub.hint(path.parent) or "is this a model folder?"
        raise ValueError(f"{path}: no such file; {hint}") from None
    try:
        return from_dict(raw, dtype=dtype, weights=weights)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads the JSON object of a file, or `gguf_file.document` if it is in a GGUF file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file cannot be read or holds something else; names the file.
    """
    if gguf_file.is_file(path.parent):
        return gguf_file.document(path)
    return regular_files.read_object(path)
