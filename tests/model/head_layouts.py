"""Heads for a tiny target, one of each published layout: shared by tests."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    block_files,
    block_params,
    eagle3_files,
    eagle3_params,
    head_dialects,
    head_params,
    params as params_lib,
)


TARGET = decoding.make_config(num_layers=8)
ORIGIN = head_dialects.Origin(target=TARGET, target_name="a target")
LAYER = decoding.make_config(num_heads=6, tie_word_embeddings=False)  # N * H is not D
EAGLE = eagle3_params.Eagle3Config(
    layer=dataclasses.replace(LAYER, num_layers=1), draft_vocab_size=32,
    target_hidden_size=48, taps=eagle3_params.default_taps(8),
).validate()  # fmt: skip
PARALLEL = dataclasses.replace(EAGLE, layer=LAYER, mask_token_id=95)
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
WHOLE = {"draft_vocab_size": 96, "has_head_norms": True, "taps": (1, 2, 4, 5, 7)}
QWEN3 = {"has_head_norms": True, "fc_norm": True, "norm_before_residual": True}
EAGLES = {
    name: (name.split()[0], dataclasses.replace(EAGLE, **changes))
    for name, changes in {
        "midlayer": {},
        "midlayer 3.1": {"fc_norm": True, "norm_output": True},
        "midlayer with a window": {"window": 3},
        "midlayer that shares": {"shares_head": True},
        "speculators eagle3": {"norm_before_residual": True, "norm_before_fc": True},
        "speculators of Qwen3": {"has_head_norms": True},
        "speculators with a window": {"window": 3, "has_head_norms": True},
        "deepspec eagle3": WHOLE,
        "deepspec with a window": WHOLE | {"window": 2048},
    }.items()
}
CASES = EAGLES | {
    "parallel": ("speculators", PARALLEL),
    "parallel of Qwen3": ("speculators", dataclasses.replace(PARALLEL, **QWEN3)),
    "flat parallel": ("midlayer", dataclasses.replace(PARALLEL, window=4)),
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
"""The layout of a head's files, and its config."""


def is_block(config) -> bool:
    return isinstance(config, block_params.BlockConfig)


@functools.cache
def target_params() -> params_lib.Params:
    return params_lib.init(jax.random.key(9), TARGET, stddev=0.3)


def make_params(config, dtype="float32", *, target=None):
    """Makes random weights on the target's matrices; norms and biases too, so that an
    omitted or swapped one shows."""
    target = target or target_params()
    given = {"embed": target.embed, "hot": None}
    if is_block(config):
        given["lm_head"] = target.head
    if config.draft_vocab_size < 96:
        hot = np.random.default_rng(4).permutation(96)[: config.draft_vocab_size]
        given["hot"] = jnp.asarray(np.sort(hot), jnp.int32)
    made = head_params.init(jax.random.key(0), config, **given, stddev=0.3)
    own = decoding.perturbed(made.replace(**dict.fromkeys(given)), 0.2)
    shared = {name: getattr(made, name) for name in given} | {"hot": None}
    if not is_block(config) and config.shares_head:
        shared["lm_head"] = target.head[given["hot"]]
    return params_lib.cast(own.replace(**shared), dtype).replace(hot=given["hot"])


def with_dtype(config, dtype):
    layer = dataclasses.replace(config.layer, dtype=dtype)
    return dataclasses.replace(config, layer=layer)


def files_of(config):
    """Returns the module that saves and loads heads of this kind."""
    return block_files if is_block(config) else eagle3_files


def save(folder, case, *, params=None, **how):
    """Saves a case in a folder of its layout; returns its config and weights."""
    dialect, config = CASES[case]
    params, how = params or make_params(config), how | {"origin": ORIGIN}
    files_of(config).save(folder, config, params, dialect=dialect, **how)
    return config, params


def load(folder, case, **how):
    """Loads the config and the weights of a case."""
    return files_of(CASES[case][1]).load(folder, TARGET, target_params(), **how)
