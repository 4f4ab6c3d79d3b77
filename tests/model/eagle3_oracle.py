"""A float64 EAGLE-3 head in NumPy, from the published description of its formats.

Works on the tensors of a file, by their published names, and on `config.json`: it
shares no code, no names and no fused weights with `spec_jax.model.eagle3`. Parts of a
layer, row by row, are those of `block_oracle`, too.
"""

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

    def of_layer(self, number: int = 0) -> str:
        is_middle = "midlayer.hidden_norm.weight" in self.tensors
        return "midlayer" if is_middle and not number else f"layers.{number}"


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


def fuse(head: Head, features):
    """Projects the features of one position to the width of the layer."""
    n = sum(name.startswith("fc_norm.") for name in head.tensors)
    if n:
        parts = np.split(features, n)
        parts = [head.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)]
        features = np.concatenate(parts)
    if head.config.get("norm_before_fc"):
        features = head.norm(features, "input_norm")
    return head["fc"] @ features


def attention(head: Head, prefix: str, x, position: int, cache):
    """Computes the attention of row `x` in a layer; `cache` holds the rotated keys and
    the values of the rows before it, and those of `x` are added."""
    keys, values = cache
    keys.append(heads_of(head, prefix, "k", x, position))
    values.append(heads_of(head, prefix, "v", x))
    slides = "sliding_attention" in (head.layer.get("layer_types") or [])
    first = max(len(keys) - head.layer["sliding_window"], 0) if slides else 0
    q = heads_of(head, prefix, "q", x, position)
    return head[f"{prefix}.o_proj"] @ attend(q, keys[first:], values[first:])


def step(head: Head, g, token: int, position: int, caches):
    """Runs one pair after the pairs in `caches`, which holds one cache a layer. Returns
    the feature of the next step and the logits."""
    e = np.asarray(head.tensors.get("embed_tokens.weight", head.embed)[token], float)
    first = head.of_layer()
    b = head.norm(g, f"{first}.hidden_norm")
    x = np.concatenate([head.norm(e, f"{first}.input_layernorm"), b])
    h = b if head.config.get("norm_before_residual") else g
    for number, cache in enumerate(caches):
        name = head.of_layer(number)
        if number:
            x = head.norm(h, f"{name}.input_layernorm")
        h = h + attention(head, f"{name}.self_attn", x, position, cache)
        normed = head.norm(h, f"{name}.post_attention_layernorm")
        h = h + mlp(head, f"{name}.mlp", normed)
    final = head.norm(h, "norm")
    feature = final if head.config.get("norm_output") else h
    return feature, head["lm_head"] @ final


def run(head: Head, features, tokens, *, num_own: int = 0):
    """Runs a chain of pairs of features `[T, taps * Dt]` and tokens `[T + num_own]`.

    The last `num_own` pairs have the head's own hidden state as their feature.

    Returns:
      Features of the next step `[T + num_own, D]`, logits, and the keys and values of
      the first layer.
    """
    caches = [([], []) for _ in range(head.layer["num_hidden_layers"])]
    hidden, logits = [], []
    for i, token in enumerate(tokens):
        g = fuse(head, features[i]) if i < len(features) else hidden[-1]
        made = step(head, g, token, i, caches)
        hidden.append(made[0])
        logits.append(made[1])
    assert len(tokens) == len(features) + num_own
    return tuple(np.stack(part) for part in (hidden, logits, *caches[0]))


def draft(head: Head, features, tokens, *, count: int, drawn=None):
    """Drafts after pairs of these features and tokens; returns `count` tokens of the
    target, and their logits `[count, Vd]`. A parallel head drafts all at once. With
    `drawn`, a chain reads these tokens before later drafts instead of its own."""
    if "mask_hidden" in head.tensors:
        mask = np.asarray(head.tensors["mask_hidden"], float).reshape(-1)
        masks = [mask] * (count - 1)
        read = [*tokens, *[head.config["mask_token_id"]] * (count - 1)]
        logits = run(head, [*features, *masks], read)[1][-count:]
        return [named(head, row) for row in logits], logits
    read, made, logits = [*tokens], [], []
    for step in range(count):
        logits.append(run(head, features, read, num_own=step)[1][-1])
        made.append(named(head, logits[-1]))
        read.append(made[-1] if drawn is None else int(drawn[step]))
    return made, np.stack(logits)


def named(head: Head, logits) -> int:
    """Returns the target's token of the highest logit."""
    best = int(logits.argmax())
    return best + int(head.tensors["d2t"][best]) if "d2t" in head.tensors else best
