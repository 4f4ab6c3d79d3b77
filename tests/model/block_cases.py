"""Block drafters for a tiny target, one of each layout: shared by tests."""

import dataclasses

import decoding

from spec_jax.model import block_params, head_dialects


TARGET = decoding.make_config(num_layers=4)
ORIGIN = head_dialects.Origin(target=TARGET, target_name="a target")
LAYER = decoding.make_config(num_heads=6, tie_word_embeddings=False)  # N * H is not D
DFLASH = block_params.BlockConfig(
    layer=LAYER, draft_vocab_size=96, taps=(2, 1, 3), block_size=4, slots="fill-in",
    mask_token_id=95,
).validate()  # fmt: skip
DFLASH2 = dataclasses.replace(
    DFLASH, head="selector", markov_rank=8, top_k=5, conv_group=16
).validate()


def speculators(algorithm, num_drafts):
    """Returns the `speculators_config` that speculators' code writes for "a target"."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_drafts}
    method |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "a target"}
    how = {"default_proposal_method": "greedy", "proposal_methods": [method]}
    return {"algorithm": algorithm, "verifier": verifier} | how


def with_heads(head, **changes):
    """Returns `DFLASH` with DSpark's sequential and confidence heads."""
    own = {"markov_rank": 8, "has_confidence": True, "confidence_with_markov": True}
    own |= {"slots": "anchor-first", "head": head} | changes
    return dataclasses.replace(DFLASH, **own)


def seeing(config=None, **attention):
    """Returns a drafter whose first layer has this attention; the second has the same
    or, with `rest="all"`, sees all keys."""
    rest = attention.pop("rest", None)
    first = block_params.LayerAttention(**attention)
    layers = (first, block_params.LayerAttention() if rest == "all" else first)
    return dataclasses.replace(config or DFLASH, attention=layers)


ANCHOR_FIRST = dataclasses.replace(DFLASH, slots="anchor-first")
SCALED = {"confidence_temperatures": (0.5, 1.0, 2.0)}
SCALED |= {"confidence_shifts": (0.0, -1.5, 0.5)}
SPECULATORS = with_heads("rnn", draft_vocab_size=32, slots="fill-in", **SCALED)
FROM_ANCHOR = {"window": 6, "from_anchor": True}
MIXED = {"window": 6, "is_causal": True, "rest": "all"}
CASES = {
    "z-lab": ("z-lab", DFLASH),
    "z-lab, windows": ("z-lab", seeing(window=6)),
    "z-lab, mixed": ("z-lab", seeing(**MIXED)),
    "jetspec": ("z-lab", seeing(is_causal=True)),
    "deepspec, windows": ("deepspec", seeing(with_heads("vanilla"), window=6)),
    "specforge, mixed": ("specforge", seeing(with_heads("gated"), **MIXED)),
    "speculators, windows": (
        "speculators", seeing(with_heads("vanilla"), is_causal=True, **FROM_ANCHOR)),
    "speculators dflash, windows": ("speculators", seeing(**FROM_ANCHOR)),
    "deepspec": ("deepspec", with_heads("vanilla")),
    "dflash2": ("z-lab", DFLASH2),
    "speculators dflash2": ("speculators", DFLASH2),
    "deepspec dflash": ("deepspec", ANCHOR_FIRST),
    "specforge": ("specforge", with_heads("gated", confidence_with_markov=False)),
    "speculators": ("speculators", SPECULATORS),
    "speculators dflash": ("speculators", DFLASH),
    "speculators dflash, anchor first": ("speculators", ANCHOR_FIRST),
}  # fmt: skip
