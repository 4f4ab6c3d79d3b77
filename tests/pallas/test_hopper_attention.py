"""The row attention compiled for an H100, at the shapes of Qwen3 and at odd ones."""

import re

import hopper
import jax
import jax.numpy as jnp
import pytest
from slow_cases import slow

from spec_jax.pallas import row_attention_triton


QWEN3 = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}  # (N, K, H)


def layer(
    N, K, H, *, page_size=16, context=32_768, dtype="bfloat16", branch=0
) -> hopper.Program:
    """Builds the row attention of one layer and one slot, with donated pools."""
    shape, R = jax.ShapeDtypeStruct, 16
    width = context // page_size
    pool = shape((width + 8, page_size, K, H), dtype)
    inputs = {
        "heads": shape((R, (N + 2 * K) * H), dtype),
        "q_norm": shape((H,), dtype),
        "k_norm": shape((H,), dtype),
        "cos": shape((R, H // 2), dtype),
        "sin": shape((R, H // 2), dtype),
        "page_table": shape((1, width), jnp.int32),
        "slots": shape((R,), jnp.int32),
        "positions": shape((R,), jnp.int32),
        "num_active": shape((), jnp.int32),
    }
    if branch:
        inputs["branch"] = shape((R, branch), jnp.int32)

    def attend(pools, inputs):
        how = {"eps": 1e-6, "scale": H**-0.5, "interpret": False}
        k, v = pools
        return row_attention_triton.attend(k_pages=k, v_pages=v, **how, **inputs)

    return hopper.Program(fn=attend, args=((pool, pool), inputs), donate=(0,))


@pytest.mark.parametrize("model", ["8B", slow("0.6B")])
def test_qwen3(compiler, model):
    """Fails if a kernel spills, is too large, or runs one block where two would fit.

    Fails if loads do not overlap products, or tensor cores do not multiply.
    """
    report = compiler(layer, *QWEN3[model])
    report.assert_fits()
    kernel, launch = report.kernel("paged_attention"), report.launch("paged_attention")
    assert launch.shared_bytes <= 80_000
    assert hopper.blocks_per_multiprocessor(kernel, launch) == 2
    # The grid has as many as are resident at once: it does not grow with the context.
    assert launch.grid[0] * launch.grid[1] <= 264
    # Two blocks of keys and two of values in flight, four bytes a lane and 128 lanes.
    assert kernel.count("HMMA.16816.F32.BF16") == 64
    assert kernel.count("LDGSTS") >= 48
    # A job is counted after all of it is stored, and the last program reads none of it
    # from a cache that is older.
    (counted,) = (n for n, line in enumerate(kernel.sass) if "ATOM" in line)
    assert "MEMBAR" in "".join(kernel.sass[counted - 4 : counted])
    assert "CCTL.IVALL" in kernel.sass[counted + 1]
    for name in ("row_jobs", "paged_attention"):
        assert report.kernel(name).count("PREEXIT") == 1


@pytest.mark.parametrize(
    ("heads", "changes"),
    [
        slow((14, 2, 80), {"page_size": 64}),
        ((8, 4, 256), {"dtype": "float32", "context": 4096}),
    ],
)
def test_other_heads(compiler, heads, changes):
    """Fails if the plan of other head sizes, groups and dtypes does not fit."""
    report = compiler(layer, *heads, **changes)
    report.assert_fits()
    kernel, launch = report.kernel("paged_attention"), report.launch("paged_attention")
    # Wide float32 heads take eight warps, of which there is room for one block.
    blocks = 1 if launch.threads > 128 else 2
    assert hopper.blocks_per_multiprocessor(kernel, launch) >= blocks


def test_a_tree_computes_as_a_chain(compiler):
    """Fails if the kernel for trees has other arithmetic than the plain one."""
    arithmetic = []
    for branch in (0, 16):
        report = compiler(layer, *QWEN3["8B"], branch=branch)
        report.assert_fits()
        code = "\n".join(report.kernel("paged_attention").sass)
        opcodes = re.findall(r"\b(?:HMMA|FADD|FMUL|FFMA|MUFU|F2FP|FMNMX)\S*", code)
        arithmetic.append(sorted(opcodes))
    assert arithmetic[0] == arithmetic[1] and len(arithmetic[0]) > 100
