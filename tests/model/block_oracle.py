"""A float64 block drafter in NumPy, from the published description of its formats.

Works on the tensors of a file, by their published names, and on `config.json`: it
shares no code, no names and no fused weights with `spec_jax.model.block_draft`.
"""

import dataclasses

import numpy as np
from model import eagle3_oracle
from model.eagle3_oracle import attend, heads_of, mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(eagle3_oracle.Head):
    """A block drafter, with the target's output projection in case it has none."""

    lm_head: np.ndarray  # [V, D], of the target

    def said(self, key, default=None):
        return self.config.get("dflash_config", {}).get(
            key, self.config.get(key, default)
        )

    @property
    def is_anchor_first(self) -> bool:
        flag = self.said("sample_from_anchor")
        name = self.config["architectures"][0]
        return flag if flag is not None else not name.startswith("DFlash")


def key_value(head: Head, i: int, x, position):
    """Computes the key and the value of one position in layer `i`."""
    prefix = f"layers.{i}.self_attn"
    return heads_of(head, prefix, "k", x, position), heads_of(head, prefix, "v", x)


def seen(head: Head, i: int, k: int, start: int, size: int) -> list[int]:
    """Lists positions that row `k` of a block at `start` sees in layer `i`."""
    kinds = head.layer.get("layer_types") or ["full_attention"]
    slides = kinds[min(i, len(kinds) - 1)] == "sliding_attention"
    is_nested = "speculators_model_type" in head.config
    flags = [head.said(key) for key in ("is_causal", "causal", "causal_head")]
    causal = next((flag for flag in flags if flag is not None), slides)
    if is_nested:
        causal = slides and not head.config.get("sliding_window_non_causal", False)
    block = range(start, start + (k + 1 if causal else size))
    if not slides:
        return [*range(start), *block]
    window = head.layer["sliding_window"]
    if is_nested:  # Its trainer counts the window from the anchor.
        return [*range(max(start - window, 0), start), *block]
    first = max(start + k + 1 - window, 0)
    return [p for p in (*range(start), *block) if p >= first]


def mix(head: Head, name: str, normed):
    """Convolves the rows `[D]` that a sublayer reads; returns them and a function that
    convolves its outputs. Without a convolution both leave rows as they are."""
    if f"{name}.base_kernel" not in head.tensors:
        return normed, lambda rows: rows
    base = np.asarray(head.tensors[f"{name}.base_kernel"], float)
    made = [head[f"{name}.kernel_projection"] @ row for row in normed]
    size = head.said("conv_group_size")

    def side(which, rows):
        out = []
        for k, row in enumerate(rows):
            taps = np.split(np.split(made[k], 2)[which], 2)
            now, before = (base[which][t] + np.repeat(taps[t], size) for t in (0, 1))
            out.append(now * row + (before * rows[k - 1] if k else 0))
        return out

    return side(0, normed), lambda rows: side(1, rows)


def backbone(head: Head, features, anchor: int):
    """Computes hidden states `[B, D]`, logits `[B, Vd]` of a block after `features`."""
    start, size = len(features), head.said("block_size")
    contexts = [
        head.norm(head["fc"] @ np.asarray(f, float), "hidden_norm") for f in features
    ]
    tokens = [anchor] + [head.said("mask_token_id")] * (size - 1)
    x = [np.asarray(head.embed[token], float) for token in tokens]
    for i in range(head.layer["num_hidden_layers"]):
        normed = [head.norm(row, f"layers.{i}.input_layernorm") for row in x]
        pairs = [key_value(head, i, c, j) for j, c in enumerate(contexts)]
        normed, after = mix(head, f"layers.{i}.attention_conv", normed)
        pairs[start:] = [key_value(head, i, n, start + k) for k, n in enumerate(normed)]
        gives = []
        for k, n in enumerate(normed):
            q = heads_of(head, f"layers.{i}.self_attn", "q", n, start + k)
            which = seen(head, i, k, start, size)
            keys, values = zip(*(pairs[p] for p in which), strict=True)
            attended = attend(q, keys, values)
            gives.append(head[f"layers.{i}.self_attn.o_proj"] @ attended)
        x = [row + given for row, given in zip(x, after(gives), strict=True)]
        normed = [head.norm(n, f"layers.{i}.post_attention_layernorm") for n in x]
        normed, after = mix(head, f"layers.{i}.mlp_conv", normed)
        gives = after([mlp(head, f"layers.{i}.mlp", n) for n in normed])
        x = [row + given for row, given in zip(x, gives, strict=True)]
    h = np.stack([head.norm(row, "norm") for row in x])
    own = "lm_head.weight" in head.tensors
    return h, h @ (head["lm_head"] if own else np.asarray(head.lm_head, float)).T


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def selector(head: Head, before: int, h):
    """Returns the terms that a selector adds to a slot's logits, for all tokens."""
    A, B = (
        np.asarray(head.tensors[f"candidate_selector.{name}_codebook"], float)
        for name in ("predecessor", "successor")
    )
    return B @ (A[before] * (head["candidate_selector.hidden_projection"] @ h))


def draft(head: Head, features, anchor: int, drawn=None):
    """Drafts greedily; returns tokens, corrected logits `[W, Vd]` and survival. With
    `drawn`, each slot reads one of these tokens as the token before it."""
    h, U = backbone(head, features, anchor)
    rank, kind = head.said("markov_rank", 0), head.said("markov_head_type")
    state, before, survival = np.zeros(rank), anchor, 1.0
    tokens, logits, chances = [], [], []
    for k in range(len(h)):
        bias, among = 0.0, np.ones(len(U[k]), bool)
        if head.said("selector_rank"):
            bias = selector(head, before, h[k])
            among = np.argsort(np.argsort(-U[k])) < head.said("selector_top_k")
        e = head["markov_head.markov_w1"][before] if rank else np.zeros(0)
        if rank:
            mixed = e
            if kind == "gated":
                G = head["markov_head.gate_proj"]
                g = head.tensors["markov_head.gate_proj.bias"]
                mixed = sigmoid(G @ np.concatenate([h[k], e]) + g) * e
            if kind == "rnn":
                J = head["markov_head.joint_proj"]
                j = head.tensors["markov_head.joint_proj.bias"]
                a, c, o = np.split(J @ np.concatenate([state, e, h[k]]) + j, 3)
                state = sigmoid(a) * state + (1 - sigmoid(a)) * np.tanh(c)
                mixed = np.tanh(o)
            bias = head["markov_head.markov_w2"] @ mixed
        if k == 0 and not head.is_anchor_first:
            continue  # The anchor's own slot drafts nothing.
        if head.said("enable_confidence_head"):
            with_markov = head.said("confidence_head_with_markov")
            read = np.concatenate([h[k], e]) if with_markov else h[k]
            w = head["confidence_head.proj"][0]
            scale = head.config.get("confidence_temperatures", [1.0] * len(h))
            shift = head.config.get("confidence_shifts", [0.0] * len(h))
            logit = w @ read + head.tensors["confidence_head.proj.bias"][0]
            survival *= sigmoid(logit / scale[len(tokens)] + shift[len(tokens)])
        logits.append(np.where(among, U[k] + bias, -np.inf))
        choice = int(np.argmax(logits[-1]))
        if "d2t" in head.tensors:
            choice += int(head.tensors["d2t"][choice])
        before = choice if drawn is None else int(drawn[len(tokens)])
        tokens.append(choice)
        chances.append(survival)
    return tokens, np.stack(logits), np.array(chances)
