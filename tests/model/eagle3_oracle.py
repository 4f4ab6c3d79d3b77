"""A float64 EAGLE-3 head in NumPy, from the published description of its formats.

Works on the tensors of a file, by their published names, and on `config.json`: it
shares no code, no names and no fused weights with `spec_jax.model.eagle3`.
"""

import numpy as np
from model.float64_layer import Head as _Head, attend, heads_of, mlp


class Head(_Head):
    """An EAGLE-3 head; the names of its layer depend on the dialect."""

    def of_layer(self, number: int = 0) -> str:
        is_middle = "midlayer.hidden_norm.weight" in self.tensors
        return "midlayer" if is_middle and not number else f"layers.{number}"


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
    """Runs one pair after the pairs in `caches`, which holds one cache a layer.

    Returns the feature of the next step and the logits.
    """
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
