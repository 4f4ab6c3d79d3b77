"""Slabs of rows, and the row attention of Triton interpreted on them."""

import dataclasses

import jax
import numpy as np
from native import native_oracle as oracle

from spec_jax.pallas import attention_plan as plan, row_attention_triton


HEIGHT = 16  # of every slab here
SMALL = plan.Config(split=32, block=16, programs=1)

_attend = jax.jit(
    row_attention_triton.attend,
    static_argnames=("eps", "scale", "interpret", "config"),
)


def numbers(slab) -> dict:
    return {"eps": 1e-6, "scale": slab.k_pages.shape[3] ** -0.5}


def run(slab, live, *, config=SMALL, branch=None):
    """Attended heads, and both pools after the writes."""
    outputs = _attend(
        **slab.arguments(live),
        **numbers(slab),
        interpret=True,
        config=config,
        branch=branch,
    )
    return tuple(np.asarray(output) for output in outputs)


def in_slab(slab, which):
    """A slab of full height: these rows first, and then rows of poison."""
    which = np.asarray(which, int)
    return slab.rows(np.pad(which, (0, HEIGHT - len(which)), constant_values=-1))


def window(*spans):
    """Rows `(slot, position)`: for each slot a range of positions, interleaved."""
    rows = [(s, p) for s, span in enumerate(spans) for p in range(*span)]
    return sorted(rows, key=lambda row: (row[1], row[0]))


def rows_alone(slab, *, attend=run):
    """What the rows give one call each, in order, and the pools after all."""
    pools, alone = (slab.k_pages, slab.v_pages), []
    for r in range(slab.num_rows):
        one = dataclasses.replace(slab, k_pages=pools[0], v_pages=pools[1])
        out, *pools = attend(in_slab(one, [r]), 1)
        alone.append(out[0])
    return np.stack(alone), *pools


def small_slab(rng, dtype="bfloat16", *, rows=None, **changes):
    """Eight rows of two slots, four query heads on two key/value heads."""
    sizes = {"N": 4, "K": 2, "H": 16, "page_size": 8, "prefix": (10, 62)} | changes
    rows = rows or window((10, 14), (62, 66))
    return oracle.make_slab(rng, rows, dtype=dtype, **sizes)
