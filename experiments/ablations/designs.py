"""Designs of verification by the names that a command line gives them."""

import argparse

from experiments.ablations import decode_rounds, verify_paths
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
    """Returns what verifies windows, for `runs.Settings`; None is the engine's own.

    Raises:
      ValueError: no path, or no acceptance, of that name.
    """
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
    group.add_argument(
        "--verify-path",
        choices=PATHS,
        default=OURS,
        help="what verifies a window: rows, equal to decoding (paged-decode); the "
        "same one by one (row-loop); the batched path of prefill (flash); rows "
        "through the library's products (library-rows) (default: %(default)s)",
    )
    group.add_argument(
        "--acceptance",
        choices=ACCEPTANCES,
        default="verify",
        help="what decides tokens: verification, whose K/V is kept, or decoding on "
        "caches of its own (default: %(default)s)",
    )
    group.add_argument(
        "--cache",
        choices=row_model.CACHE_KINDS,
        default="paged",
        help="pages, or one contiguous block per sequence (default: %(default)s)",
    )
    group.add_argument(
        "--draft-cache",
        choices=DRAFT_CACHES,
        default="persistent",
        help="the draft's K/V is kept over rounds, or built again in each "
        "(default: %(default)s)",
    )
