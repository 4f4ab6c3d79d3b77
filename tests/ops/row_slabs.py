"""Slabs of rows over pages, and the row attention of each implementation on them."""

import dataclasses
import functools

import jax
import numpy as np
from native import native_oracle as oracle

from spec_jax import testing
from spec_jax.model import decoder
from spec_jax.native import calls
from spec_jax.ops import row_attention
from spec_jax.pallas import attention_plan as plan, row_attention_triton


HEIGHT = 16  # of every slab here
SMALL = plan.Config(split=32, block=16, programs=1)


@functools.cache
def _compiled(impl):
    static = ["eps", "scale"]
    if impl == "interpret":
        static.append("config")
        attend = row_attention_triton.attend
    elif impl == "xla":
        static.append("by_head")
        attend = _by_xla
    else:
        attend = functools.partial(calls.attend, isa=impl)
    return jax.jit(attend, static_argnames=static)


def _by_xla(*, heads, q_norm, k_norm, k_pages, v_pages, page_table, cos, sin, **how):
    names = {"slots", "positions", "num_active", "branch", "firsts"}
    at = {name: how.pop(name) for name in names & set(how)}
    rows = decoder.Rows(tokens=at["slots"], **at)
    given = heads, q_norm, k_norm, (k_pages, v_pages, page_table), rows, (cos, sin)
    return row_attention.row_attention(*given, impl="xla", **how)


def numbers(slab) -> dict:
    return {"eps": 1e-6, "scale": slab.k_pages.shape[3] ** -0.5}


def run(impl, slab, live, *, config=SMALL, branch=None, window=None, **how):
    """Returns attended heads, and both pools after writes; rows see `window` keys."""
    how |= numbers(slab) | {"branch": branch}
    if window is not None:
        how["firsts"] = slab.positions - np.int32(window - 1)
    if impl == "interpret":
        how["config"] = config
    outputs = _compiled(impl)(**slab.arguments(live), **how)
    return tuple(np.asarray(output) for output in outputs)


def in_slab(slab, which):
    """Returns a slab of full height: these rows first, then poisoned rows."""
    which = np.asarray(which, int)
    return slab.rows(np.pad(which, (0, HEIGHT - len(which)), constant_values=-1))


def window(*spans):
    """Lists rows `(slot, position)`, a range of positions a slot, interleaved."""
    rows = [(s, p) for s, span in enumerate(spans) for p in range(*span)]
    return sorted(rows, key=lambda row: (row[1], row[0]))


def small_slab(rng, dtype="bfloat16", *, rows=None, **changes):
    """Makes eight rows of two slots, four query heads on two key/value heads."""
    sizes = {"N": 4, "K": 2, "H": 16, "page_size": 8, "prefix": (10, 62)} | changes
    rows = rows or window((10, 14), (62, 66))
    return oracle.make_slab(rng, rows, dtype=dtype, **sizes)


def rows_alone(slab, attend):
    """Attends row by row, each in its own call; returns heads, and pools at the end."""
    pools, alone = (slab.k_pages, slab.v_pages), []
    for r in range(slab.num_rows):
        one = dataclasses.replace(slab, k_pages=pools[0], v_pages=pools[1])
        out, *pools = attend(in_slab(one, [r]), 1)
        alone.append(out[0])
    return np.stack(alone), *pools


def assert_row_contract(slab, attend):
    """Asserts that rows give the same bits alone and together, at any place. Returns
    the results of `rows_alone`."""
    R = slab.num_rows
    alone, *pools = rows_alone(slab, attend)
    assert np.isfinite(alone.astype(np.float32)).all()
    for live in (0, 1, 5, R - 1):
        out, *_ = attend(in_slab(slab, range(live)), live)
        testing.assert_same_bits(out[:live], alone[:live], what=f"{live} live")
    for order in (np.arange(R), np.arange(R)[::-1], np.roll(np.arange(R), 5)):
        out, *after = attend(in_slab(slab, order), R)
        testing.assert_same_bits(out[:R], alone[order], what=f"{order}")
        testing.assert_same_bits(after, list(pools))
    return alone, *pools
