"""Candidate plans of the GPU kernels: what a table of timings is made of.

Each candidate can be launched (registers apart, which only the compiler knows), and
the plan that the kernel itself chooses comes first.
"""

import dataclasses

from spec_jax.pallas import (
    attention_plan,
    skinny_gemm_mosaic as mosaic,
    skinny_gemm_triton as triton,
)


_TRITON = (
    triton.Plan(block_n=32, block_k=256, chains=2, num_stages=4),
    triton.Plan(block_n=64, block_k=128, num_stages=4),
    triton.Plan(block_n=16, block_k=512, num_stages=4),
    triton.Plan(block_n=32, block_k=256, chains=2, num_stages=6),
    triton.Plan(block_n=64, block_k=128, num_stages=6),
    triton.Plan(block_n=32, block_k=512, chains=2, num_stages=4),
    triton.Plan(block_n=32, block_k=256, chains=2, splits=2, num_stages=4),
    triton.Plan(block_n=64, block_k=256, num_stages=3),
    triton.Plan(block_n=16, block_k=256, chains=2, num_stages=6),
    triton.Plan(block_n=32, block_k=128, chains=2, num_stages=6),
    triton.Plan(block_n=64, block_k=128, splits=4, num_stages=4),
    triton.Plan(block_n=128, block_k=64, num_stages=6),
    triton.Plan(block_n=32, block_k=256, chains=4, num_stages=4),
    triton.Plan(block_n=32, block_k=256, chains=2, num_warps=8, num_stages=4),
    triton.Plan(block_n=128, block_k=128, num_warps=8, num_stages=4),
    triton.Plan(block_n=16, block_k=512, chains=4, num_warps=2, num_stages=4),
)

_MOSAIC = (
    mosaic.Plan(block_n=64, block_k=128, splits=1, stages=6),
    mosaic.Plan(block_n=64, block_k=128, splits=2, stages=8),
    mosaic.Plan(block_n=128, block_k=128, splits=1, stages=5),
    mosaic.Plan(block_n=64, block_k=64, splits=4, stages=8),
)


def triton_plans(
    num_columns: int, num_terms: int, *, parts: int, most: int
) -> list[triton.Plan]:
    """At most `most` plans of weights `[N, K]`, the kernel's own first."""
    own = triton.plan_for(num_columns, num_terms, parts=parts)
    made = [own]
    for plan in _TRITON:
        # A gate's block is of one part: as many columns in all.
        width = plan.block_n // parts
        plan = dataclasses.replace(plan, block_n=max(width, triton.MIN_BLOCK))
        if plan not in made and _is_usable(plan, num_columns, num_terms, parts):
            made.append(plan)
    return made[:most]


def _is_usable(plan: triton.Plan, num_columns, num_terms, parts) -> bool:
    if num_terms % plan.block_k or num_columns // parts % plan.block_n:
        return False  # Masked blocks are right, but never the fast ones.
    try:
        triton.check_plan(plan, num_terms, parts=parts)
    except ValueError:
        return False
    return True


def mosaic_plans(num_columns: int, num_terms: int, *, most: int) -> list[mosaic.Plan]:
    """As `triton_plans`; empty for weights that are not whole blocks."""
    made = []
    for plan in (mosaic.plan_for(num_columns, num_terms), *_MOSAIC):
        try:
            mosaic.check_plan(plan, num_columns, num_terms)
        except ValueError:
            continue
        if plan not in made:
            made.append(plan)
    return made[:most]


def attention_configs(
    head_dim: int, dtype: str, *, interpret: bool, most: int
) -> list[attention_plan.Config]:
    """The kernel's own config, and what differs from it in one thing or two."""
    own = attention_plan.default_config(head_dim, dtype, interpret=interpret)
    changes = (
        {"programs": 2 * own.programs},
        {"num_stages": 2},
        {"split": 2 * own.split},
        {"block": 2 * own.block, "num_stages": 2},
        {"split": own.split // 2},
        {"block": own.block // 2, "num_stages": 4},
        {"num_stages": 4},
        {"programs": max(own.programs // 2, 1)},
        {"tile": 16},
        {"num_warps": 8},
        {"split": 2 * own.split, "programs": 2 * own.programs},
        {"num_warps": 2, "block": own.block // 2},
    )
    configs = [own]
    for change in changes:
        config = dataclasses.replace(own, **change)
        if config not in configs and config.block >= 16:
            configs.append(config)
    return configs[:most]


def describe(plan) -> str:
    """A plan in one line: its fields, those of one left out."""
    fields = dataclasses.asdict(plan).items()
    kept = ("block_n", "block_k", "block", "split", "tile")
    return " ".join(f"{k}={v}" for k, v in fields if v != 1 or k in kept)
