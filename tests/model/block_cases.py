"""Block drafters for a tiny target, one of each layout: shared by tests."""

import dataclasses

import decoding

from spec_jax.model import block_params, head_dialects


TARGET = decoding.make_config(num_layers=4)
ORIGIN = head_dialects.Origin(target=TARGET, target_name="a target")
LAYER = decoding.make_config(num_heads=6, tie_word_embeddings=False)  # N * H is not D
DFLASH = block_params.BlockConfig(
    layer=LAYER,
    draft_vocab_size=96,
    taps=(2, 1, 3),
    block_size=4,
    slots="fill-in",
    mask_token_id=95,
).validate()


DFLASH2 = dataclasses.replace(
    DFLASH, head="selector", markov_rank=8, top_k=5, conv_group=16
).validate()


def speculators(algorithm, num_drafts):
    """What speculators' own code writes of a drafter for "a target"."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "a target"}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": verifier,
    }


def with_heads(head, **changes):
    """DSpark's sequential and confidence heads on the same backbone."""
    own = {"markov_rank": 8, "has_confidence": True, "confidence_with_markov": True}
    own |= {"slots": "anchor-first", "head": head} | changes
    return dataclasses.replace(DFLASH, **own)


def seeing(config=None, **attention):
    """A drafter whose first layer sees less, and whose second the same or, as `rest`
    says, all."""
    rest = attention.pop("rest", None)
    first = block_params.LayerAttention(**attention)
    layers = (first, block_params.LayerAttention() if rest == "all" else first)
    return dataclasses.replace(config or DFLASH, attention=layers)


CASES = {
    "z-lab": ("z-lab", DFLASH),
    "z-lab, windows": ("z-lab", seeing(window=6)),
    "z-lab, mixed": ("z-lab", seeing(window=6, is_causal=True, rest="all")),
    "jetspec": ("z-lab", seeing(is_causal=True)),
    "deepspec, windows": ("deepspec", seeing(with_heads("vanilla"), window=6)),
    "specforge, mixed": (
        "specforge",
        seeing(with_heads("gated"), window=6, is_causal=True, rest="all"),
    ),
    "speculators, windows": (
        "speculators",
        seeing(with_heads("vanilla"), window=6, is_causal=True, from_anchor=True),
    ),
    "speculators dflash, windows": ("speculators", seeing(window=6, from_anchor=True)),
    "deepspec": ("deepspec", with_heads("vanilla")),
    "dflash2": ("z-lab", DFLASH2),
    "speculators dflash2": ("speculators", DFLASH2),
    "deepspec dflash": ("deepspec", dataclasses.replace(DFLASH, slots="anchor-first")),
    "specforge": ("specforge", with_heads("gated", confidence_with_markov=False)),
    "speculators": (
        "speculators",
        with_heads(
            "rnn",
            draft_vocab_size=32,
            slots="fill-in",
            confidence_temperatures=(0.5, 1.0, 2.0),
            confidence_shifts=(0.0, -1.5, 0.5),
        ),
    ),
    "speculators dflash": ("speculators", DFLASH),
    "speculators dflash, anchor first": (
        "speculators",
        dataclasses.replace(DFLASH, slots="anchor-first"),
    ),
}
