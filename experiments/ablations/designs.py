"""Designs of verification by the names that a command line gives them."""

import argparse

from experiments.ablations import decode_rounds, verify_paths
from experiments.lib import cli
from spec_jax import loading
from spec_jax.engine import protocols
from spec_jax.model import row_model
from spec_jax.rules import sampling as sampling_lib


ACCEPTANCES = ("verify", "decode")
"""What decides tokens: the logits of verification, or decoding."""

PATHS = tuple(verify_paths.PATHS)
OURS = PATHS[0]

DRAFT_CACHES = ("persistent", "round")
"""Whether the draft's K/V is kept over rounds, or built again in each."""


def verifier(
    lm: loading.LanguageModel,
    *,
    path: str = OURS,
    acceptance: str = "verify",
    sampling: sampling_lib.SamplingSettings | None = None,
) -> protocols.Target | None:
    """Returns what verifies windows, for `runs.Settings`; None is the engine's own."""
    if acceptance not in ACCEPTANCES:
        raise ValueError(f"{acceptance=} is not one of {', '.join(ACCEPTANCES)}")
    verify_path = verify_paths.make(path, lm.target)
    if acceptance == "decode":
        return decode_rounds.DecodeRounds(
            model=lm.target,
            path=verify_path,
            width=lm.gamma_max + 1,
            sampling=sampling,
        )
    if path == OURS:
        return None
    return verify_paths.OneSlot(model=lm.target, path=verify_path)


def add_flags(group: argparse._ActionsContainer) -> None:
    """`--verify-path`, `--acceptance`, `--cache`, `--draft-cache`."""
    cli.add(
        group,
        f"""
        --verify-path PATH={OURS}  what verifies a window: rows, equal to decoding
            (paged-decode); the same one by one (row-loop); the batched path of prefill
            (flash); rows through the library's products (library-rows)
        --acceptance WHAT=verify  what decides tokens: verification, whose K/V is kept,
            or decoding on caches of its own
        --cache KIND=paged  pages, or one contiguous block per sequence
        --draft-cache LIFE=persistent  the draft's K/V is kept over rounds, or built
            again in each
        """,
        PATH=PATHS,
        WHAT=ACCEPTANCES,
        KIND=row_model.CACHE_KINDS,
        LIFE=DRAFT_CACHES,
    )
