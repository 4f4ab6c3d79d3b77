"""A float64 block drafter in NumPy, from the published description of its formats.

Works on the tensors of a file, by their published names, and on `config.json`: it
shares no code, no names and no fused weights with `spec_jax.model.block_draft`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """A layout's `config.json` and tensors, and what it takes from the target."""

    config: Mapping  # as in the file
    tensors: Mapping[str, np.ndarray]
    embed: np.ndarray  # [V, D], of the target
    lm_head: np.ndarray  # [V, D], of the target

    @property
    def layer(self) -> Mapping:
        return self.config.get("transformer_layer_config", self.config)

    def said(self, key, default=None):
        return self.config.get("dflash_config", {}).get(
            key, self.config.get(key, default)
        )

    @property
    def is_anchor_first(self) -> bool:
        flag = self.said("sample_from_anchor")
        name = self.config["architectures"][0]
        return flag if flag is not None else name != "DFlashDraftModel"

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[name], np.float64)

    def norm(self, x, name: str):
        variance = np.mean(x**2, axis=-1, keepdims=True)
        weight = self[f"{name}.weight"]
        return x / np.sqrt(variance + self.layer["rms_norm_eps"]) * weight


def rotate(x, position, theta):
    """Rotates the halves of one head by its position."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def key_value(head: Head, i: int, x, position):
    """The key and the value of one position in layer `i`."""
    K, H = head.layer["num_key_value_heads"], head.layer["head_dim"]
    prefix = f"layers.{i}.self_attn"
    k = (head[f"{prefix}.k_proj.weight"] @ x).reshape(K, H)
    k = rotate(head.norm(k, f"{prefix}.k_norm"), position, head.layer["rope_theta"])
    return k, (head[f"{prefix}.v_proj.weight"] @ x).reshape(K, H)


def attend(head: Head, i: int, x, position, keys, values):
    """What one row attends to, projected."""
    N, K = (head.layer[f"num_{n}_heads"] for n in ("attention", "key_value"))
    H, prefix = head.layer["head_dim"], f"layers.{i}.self_attn"
    q = (head[f"{prefix}.q_proj.weight"] @ x).reshape(N, H)
    q = rotate(head.norm(q, f"{prefix}.q_norm"), position, head.layer["rope_theta"])
    out = []
    for n in range(N):
        scores = np.array([key[n * K // N] @ q[n] for key in keys]) / np.sqrt(H)
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        out.append(sum(p * v[n * K // N] for p, v in zip(probs, values, strict=True)))
    return head[f"{prefix}.o_proj.weight"] @ np.concatenate(out)


def backbone(head: Head, features, anchor: int):
    """Hidden states `[B, D]` and logits `[B, Vd]` of a block after `len(features)`."""
    start, size = len(features), head.said("block_size")
    contexts = [
        head.norm(head["fc.weight"] @ np.asarray(f, float), "hidden_norm")
        for f in features
    ]
    tokens = [anchor] + [head.said("mask_token_id")] * (size - 1)
    x = [np.asarray(head.embed[token], float) for token in tokens]
    for i in range(head.layer["num_hidden_layers"]):
        normed = [head.norm(row, f"layers.{i}.input_layernorm") for row in x]
        pairs = [key_value(head, i, c, j) for j, c in enumerate(contexts)]
        pairs += [key_value(head, i, n, start + k) for k, n in enumerate(normed)]
        keys, values = zip(*pairs, strict=True)
        for k, n in enumerate(normed):
            x[k] = x[k] + attend(head, i, n, start + k, keys, values)
            m = head.norm(x[k], f"layers.{i}.post_attention_layernorm")
            gate = head[f"layers.{i}.mlp.gate_proj.weight"] @ m
            up = head[f"layers.{i}.mlp.up_proj.weight"] @ m
            down = head[f"layers.{i}.mlp.down_proj.weight"]
            x[k] = x[k] + down @ (gate / (1 + np.exp(-gate)) * up)
    h = np.stack([head.norm(row, "norm") for row in x])
    own = "lm_head.weight" in head.tensors
    return h, h @ (head["lm_head.weight"] if own else np.asarray(head.lm_head, float)).T


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def draft(head: Head, features, anchor: int, drawn=None):
    """What is drafted greedily: tokens, corrected logits `[W, Vd]` and survival.

    With `drawn`, each slot is given these tokens before it.
    """
    h, U = backbone(head, features, anchor)
    rank, kind = head.said("markov_rank", 0), head.said("markov_head_type")
    state, before, survival = np.zeros(rank), anchor, 1.0
    tokens, logits, chances = [], [], []
    for k in range(len(h)):
        bias = 0.0
        e = head["markov_head.markov_w1.weight"][before] if rank else np.zeros(0)
        if rank:
            mixed = e
            if kind == "gated":
                G = head["markov_head.gate_proj.weight"]
                g = head["markov_head.gate_proj.bias"]
                mixed = sigmoid(G @ np.concatenate([h[k], e]) + g) * e
            if kind == "rnn":
                J = head["markov_head.joint_proj.weight"]
                j = head["markov_head.joint_proj.bias"]
                a, c, o = np.split(J @ np.concatenate([state, e, h[k]]) + j, 3)
                state = sigmoid(a) * state + (1 - sigmoid(a)) * np.tanh(c)
                mixed = np.tanh(o)
            bias = head["markov_head.markov_w2.weight"] @ mixed
        if k == 0 and not head.is_anchor_first:
            continue  # The slot of the anchor itself.
        if head.said("enable_confidence_head"):
            with_markov = head.said("confidence_head_with_markov")
            read = np.concatenate([h[k], e]) if with_markov else h[k]
            w = head["confidence_head.proj.weight"][0]
            scale = head.config.get("confidence_temperatures", [1.0] * len(h))
            logit = w @ read + head["confidence_head.proj.bias"][0]
            survival *= sigmoid(logit / scale[len(tokens)])
        logits.append(U[k] + bias)
        choice = int(np.argmax(logits[-1]))
        if "d2t" in head.tensors:
            choice += int(head.tensors["d2t"][choice])
        before = choice if drawn is None else int(drawn[len(tokens)])
        tokens.append(choice)
        chances.append(survival)
    return tokens, np.stack(logits), np.array(chances)
