"""Does a row depend, in any bit, on the rows beside it, on this device?

Random weights in the shape of a model, by all kernels of its step: a text is read in
each of the ways of `spec_jax.testing.check_target`, row by row, in windows, beside
other sequences, moved, after drafts that were rolled back and among rows of NaN, and
logits are compared as integers. On a GPU nothing else says so of what was compiled
there. Exit status: 0 all equal, 2 a kernel failed or a bit differs, 1 the input was
unusable.
"""

import argparse
import hashlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.lib import flags, noise, records, subjects, tables
from spec_jax import testing
from spec_jax.model import row_model
from spec_jax.ops import dispatch
from spec_jax.pallas import skinny_gemm_triton as triton
from spec_jax.testing import target_kit


ROWS = 8


FLAGS = """
    device impl dtype weights isa
    --preset PRESET=tiny  the model whose shapes are taken
    --contexts N,N,...=5,300  tokens of the prompts
    [out] hashes, and one per way to read
    """
KINDS = {"PRESET": sorted(subjects.PRESETS)}
parse_args = flags.parser(__doc__, FLAGS, kinds=KINDS)


def check(model: row_model.RowModel, params: Any, context: int) -> list[dict[str, Any]]:
    """Returns a row with the hash of rows read alone, then one for each way to read."""
    rows: list[dict[str, Any]] = []
    name = f"model after {context} tokens"
    for clause, alone, found in target_kit.compared(model, params, prompt=context):
        if not rows:
            digest = hashlib.sha256(np.ascontiguousarray(alone).tobytes()).hexdigest()
            rows.append({"kind": "hash", "check": name, "sha256": digest})
        wrong = int(np.sum(testing.bits(alone) != testing.bits(found)))
        row = {"kind": "bitwise", "check": f"{name}: {clause}", "cases": len(found)}
        row |= {"elements": found.size, "differing": wrong, "equal": wrong == 0}
        rows.append(row)
    return rows


def control(impl: str) -> list[dict[str, Any]]:
    """Negative control: a plan that depends on the number of rows is seen."""
    terms = 128 if impl == "interpret" else 2048
    matrix = noise.normal(0, (64, terms), "bfloat16", stddev=terms**-0.5)
    x = noise.normal(1, (ROWS, terms), "bfloat16")
    how = {"num_active": jnp.int32(ROWS), "out_dtype": jnp.dtype("float32")}
    one, two = (
        testing.bits(triton.project(x, matrix, plan=plan, **how))
        for plan in (
            triton.Plan(block_n=16, block_k=64),
            triton.Plan(block_n=16, block_k=32, splits=terms // 64),
        )
    )
    wrong, name = int(np.sum(one != two)), "a plan by the number of rows"
    return [{"kind": "control", "check": name, "differing": wrong, "seen": wrong > 0}]


def run(args: argparse.Namespace, out: records.JsonLines) -> bool:
    """Checks each context, writes and prints the rows; returns whether all is well."""
    platform = subjects.check_device(args.device)
    impl = dispatch.resolve(args.impl)
    forms = {"dtype": args.dtype, "weights": args.weights}
    config = subjects.config_of(args.preset, **forms)
    slab = row_model.slab_for(impl, ROWS)
    model = row_model.RowModel(config=config, impl=impl, slab=slab)
    params = subjects.random_weights(config, impl=impl)
    jobs = {f"context {n}": lambda n=n: check(model, params, n) for n in args.contexts}
    if impl in dispatch.PALLAS:
        jobs = {"control": lambda: control(impl)} | jobs
    out.common = {
        "device": platform,
        "preset": args.preset,
        "dtype": config.dtype,
        "weights": config.weights,
        "impl": impl,
        "native_isa": dispatch.instruction_set(impl),
        **records.provenance(),
    }
    shown = tables.Report(out, COLUMNS)
    for name, work in jobs.items():
        shown.add(name, work)
    return not shown.failed


COLUMNS = {
    "hash": {"check": "", "sha256": ""},
    "bitwise": {"check": "", **dict.fromkeys(("cases", "elements", "differing"), ",d")},
    "control": {"check": "", "differing": ",d", "seen": ""},
}
"""Columns of the table of each kind of rows."""

main = records.script("kernels.py", parse_args, run)
