"""A float64 EAGLE-3 head in NumPy, from the published description of its formats.

Works on the tensors of a file, by their published names, and on `config.json`: it
shares no code, no names and no fused weights with `spec_jax.model.eagle3`.
"""

import numpy as np
from model.float64_layer import Head as _Head, attend, mlp, rotate


class Head(_Head):
    """An EAGLE-3 head; the names of its layer depend on the dialect."""

    def of_layer(self, name: str) -> str:
        is_middle = "midlayer.hidden_norm.weight" in self.tensors
        return f"{'midlayer' if is_middle else 'layers.0'}.{name}"


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


def slides(layer) -> bool:
    """Returns whether the layer sees only a window of keys."""
    return "sliding_attention" in (layer.get("layer_types") or [])


def attention(head: Head, name, x, position: int, cache):
    """Computes the attention of row `x` in a layer; `cache` holds the rotated keys and
    the values of the rows before it, and those of `x` are added."""
    layer, H, (keys, values) = head.layer, head.layer["head_dim"], cache
    N, K = layer["num_attention_heads"], layer["num_key_value_heads"]
    q, k, v = (head[name(f"self_attn.{n}_proj")] @ x for n in "qkv")
    q, k, v = q.reshape(N, H), k.reshape(K, H), v.reshape(K, H)
    if layer["model_type"] == "qwen3":
        q = head.norm(q, name("self_attn.q_norm"))
        k = head.norm(k, name("self_attn.k_norm"))
    theta = layer["rope_theta"]
    keys.append(rotate(k, position, theta))
    values.append(v)
    first = max(len(keys) - layer["sliding_window"], 0) if slides(layer) else 0
    attended = attend(rotate(q, position, theta), keys[first:], values[first:])
    return head[name("self_attn.o_proj")] @ attended


def step(head: Head, g, token: int, position: int, caches):
    """Runs one pair after the pairs in `caches`, which holds one cache a layer.

    Returns the feature of the next step and the logits.
    """
    e = np.asarray(head.tensors.get("embed_tokens.weight", head.embed)[token], float)
    b = head.norm(g, head.of_layer("hidden_norm"))
    x = np.concatenate([head.norm(e, head.of_layer("input_layernorm")), b])
    h = b if head.config.get("norm_before_residual") else g
    for number, cache in enumerate(caches):
        name = head.of_layer
        if number:
            name = lambda part, number=number: f"layers.{number}.{part}"
            x = head.norm(h, name("input_layernorm"))
        h = h + attention(head, name, x, position, cache)
        h = h + mlp(head, name("mlp"), head.norm(h, name("post_attention_layernorm")))
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


def draft(head: Head, features, tokens, *, count: int):
    """Drafts by a parallel head after pairs of these features and tokens; returns
    `count` tokens of the target, and their logits `[count, Vd]`."""
    mask = np.asarray(head.tensors["mask_hidden"], float).reshape(-1)
    masks = [mask] * (count - 1)
    read = [*tokens, *[head.config["mask_token_id"]] * (count - 1)]
    logits = run(head, [*features, *masks], read)[1][-count:]
    chosen = logits.argmax(axis=-1)
    if "d2t" in head.tensors:
        chosen += head.tensors["d2t"][chosen]
    return chosen.tolist(), logits
