"""Candidate plans of the GPU kernels: what a table of timings is made of.

Each candidate can be launched (registers apart, which only the compiler knows). The
kernel's own plan is None, and comes first.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from spec_jax.model import config as config_lib
from spec_jax.ops import dispatch
from spec_jax.pallas import attention_plan, skinny_gemm_triton as triton


# block_n, block_k, chains, splits, num_warps, num_stages
_TRITON = (
    (32, 256, 2, 1, 4, 4),
    (64, 128, 1, 1, 4, 4),
    (16, 512, 1, 1, 4, 4),
    (32, 256, 2, 1, 4, 6),
    (64, 128, 1, 1, 4, 6),
    (32, 512, 2, 1, 4, 4),
    (32, 256, 2, 2, 4, 4),
    (64, 256, 1, 1, 4, 3),
    (16, 256, 2, 1, 4, 6),
    (32, 128, 2, 1, 4, 6),
    (64, 128, 1, 4, 4, 4),
    (128, 64, 1, 1, 4, 6),
    (32, 256, 4, 1, 4, 4),
    (32, 256, 2, 1, 8, 4),
    (128, 128, 1, 1, 8, 4),
    (16, 512, 4, 1, 2, 4),
)


def of_product(
    impl: str, num_columns: int, num_terms: int, *, parts: int, most: int
) -> Sequence[Any]:
    """None, and plans of weights `[N, K]` besides the kernel's own: `most` in all."""
    if impl not in dispatch.PALLAS:
        return (None,)
    own = triton.plan_for(num_columns, num_terms, parts=parts)
    names = ("block_n", "block_k", "chains", "splits", "num_warps", "num_stages")
    made = []
    for candidate in _TRITON:
        plan = triton.Plan(**dict(zip(names, candidate, strict=True)))
        # A gate's block is of one part: as many columns in all.
        width = max(plan.block_n // parts, triton.MIN_BLOCK)
        plan = dataclasses.replace(plan, block_n=width)
        # Masked blocks are right, but never the fast ones.
        if num_terms % plan.block_k or num_columns // parts % plan.block_n:
            continue
        is_new = plan != own and plan not in made
        if is_new and _fits(plan, num_terms, parts=parts):
            made.append(plan)
    return (None, *made)[:most]


def _fits(plan: triton.Plan, num_terms: int, *, parts: int) -> bool:
    try:
        triton.check_plan(plan, num_terms, parts=parts)
    except ValueError:
        return False
    return True


def of_attention(config: config_lib.Qwen3Config, *, most: int) -> Sequence[Any]:
    """None, and what differs from the kernel's own config in one thing or two."""
    own = attention_plan.default_config(config.head_dim, config.dtype, interpret=False)
    changes = (
        {"split": own.split // 2},
        {"split": own.split // 4},
        {"programs": 2 * own.programs},
        {"num_stages": 2},
        {"split": 2 * own.split},
        {"block": 2 * own.block, "num_stages": 2},
        {"block": own.block // 2, "num_stages": 4},
        {"num_stages": 4},
        {"programs": max(own.programs // 2, 1)},
        {"tile": 16},
        {"num_warps": 8},
        {"split": 2 * own.split, "programs": 2 * own.programs},
        {"num_warps": 2, "block": own.block // 2},
    )
    made = [dataclasses.replace(own, **change) for change in changes]
    return (None, *(c for c in made if c.block >= 16))[:most]


def describe(plan: Any) -> str | None:
    """Returns a plan in one line: its fields, those of one left out; None is None."""
    if plan is None:
        return None
    kept = ("block_n", "block_k", "block", "split", "tile")
    fields = dataclasses.asdict(plan).items()
    return " ".join(f"{k}={v}" for k, v in fields if v != 1 or k in kept)
