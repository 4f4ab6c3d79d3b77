"""Reads and writes published folders of DFlash, DSpark and DFlash2.

Knows the tensors' names; `block_dialects` knows the four layouts of `config.json`.
"""

from spec_jax.model import (
    block_config_keys,
    block_dialects as dialects,
    block_params,
    head_files,
    params as params_lib,
)


_NAMES = {
    **head_files.NAMES,
    **params_lib.layer_names("layers.{0}."),
    "hidden_norm": "hidden_norm",
    "markov.embed": "markov_head.markov_w1",
    "markov.out": "markov_head.markov_w2",
    "confidence": "confidence_head.proj",
    "confidence_bias": "confidence_head.proj.bias",
    **{
        f"layers.{x}_conv.{field}": f"layers.{{0}}.{x}_conv.{name}"
        for x in ("attention", "mlp")
        for field, name in (("base", "base_kernel"), ("kernels", "kernel_projection"))
    },
}
_SELECTOR = {
    "markov.embed": "candidate_selector.predecessor_codebook",
    "markov.out": "candidate_selector.successor_codebook",
    "markov.mix": "candidate_selector.hidden_projection",
}
_MIXES = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}


def _parts(
    config: block_params.BlockConfig, dialect: str, shapes: block_params.BlockParams
) -> block_params.BlockParams:
    """Implements `head_files.Family.names`: all layouts have the same."""
    del dialect
    mix = _MIXES.get(config.head, "")
    names = _NAMES | {"markov.mix": mix, "markov.mix_bias": f"{mix}.bias"}
    names |= _SELECTOR if config.head == "selector" else {}
    return params_lib.parts(shapes, names, config.layer)


FAMILY = head_files.Family(
    dialects=dialects,
    to_dict=block_config_keys.to_dict,
    names=_parts,
    copies=("deepspec",),
    is_targets=True,
    zeros=("confidence_bias",),
)
load, save = FAMILY.load, FAMILY.save
