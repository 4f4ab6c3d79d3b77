"""The common part of the float64 oracles of heads: a layer in NumPy, row by row."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from native import native_oracle as oracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """A head's `config.json` and tensors, and the target's embedding."""

    config: Mapping  # as in the file
    tensors: Mapping[str, np.ndarray]
    embed: np.ndarray  # [V, D], of the target

    @property
    def layer(self) -> Mapping:
        return self.config.get("transformer_layer_config", self.config)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[f"{name}.weight"], np.float64)

    def norm(self, x, name: str):
        return oracle.rms_norm(x, self[name], self.layer["rms_norm_eps"], float)


def rotate(x, position, theta):
    """Rotates the two halves of one head by the angles of its position (RoPE)."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    return oracle.rotate(x, np.cos(angles), np.sin(angles), float)


def heads_of(head: Head, prefix: str, name: str, x, position=None):
    """Computes queries, keys or values of a row, `[heads, H]`; at a position, they are
    rotated, and normed before that where there are norms."""
    made = (head[f"{prefix}.{name}_proj"] @ x).reshape(-1, head.layer["head_dim"])
    if position is None:
        return made
    if f"{prefix}.{name}_norm.weight" in head.tensors:
        made = head.norm(made, f"{prefix}.{name}_norm")
    return rotate(made, position, head.layer["rope_theta"])


def attend(q, keys, values):
    """Computes attention of a row's queries `[N, H]` to keys and values `[K, H]`."""
    (N, H), K, out = q.shape, len(keys[0]), []
    for n in range(N):
        scores = np.array([key[n * K // N] @ q[n] for key in keys]) / np.sqrt(H)
        probs = oracle.softmax(scores)
        out.append(sum(p * v[n * K // N] for p, v in zip(probs, values, strict=True)))
    return np.concatenate(out)


def mlp(head: Head, prefix: str, x):
    """Computes the gated MLP of one row."""
    gate = head[f"{prefix}.gate_proj"] @ x
    inner = gate / (1 + np.exp(-gate)) * (head[f"{prefix}.up_proj"] @ x)
    return head[f"{prefix}.down_proj"] @ inner
