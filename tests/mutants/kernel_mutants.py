"""Faults of what a row goes through: attention, products, norms, argmax, the model."""

from mutant import Mutant


_ATTENTION = "spec_jax.ops.paged_attention:_xla"
_PROJECT = "spec_jax.ops.projection:project"
_CALLS = "spec_jax.native.calls:"
_TRITON = "spec_jax.pallas.skinny_gemm_triton:"
_ARGMAX = "spec_jax.pallas.argmax_triton:"

REFERENCE_FORMS = (
    Mutant(
        name="a row sees one key too many",
        where=_ATTENTION,
        old="<= positions[:, None]",
        new="<= positions[:, None] + 1",
        caught_by=("attention",),
    ),
    Mutant(
        name="a row does not see its own key",
        where=_ATTENTION,
        old="<= positions[:, None]",
        new="< positions[:, None]",
        caught_by=("attention",),
    ),
    Mutant(
        name="a row sees the keys of other slots",
        where=_ATTENTION,
        old="visible = mine[:, None] &",
        new="visible = live[:, None] &",
        caught_by=("attention",),
    ),
    Mutant(
        name="scores are not scaled",
        where=_ATTENTION,
        old="q.astype(jnp.float32) * scale",
        new="q.astype(jnp.float32)",
        caught_by=("attention",),
    ),
    Mutant(
        name="the page table is one column short",
        where="spec_jax.ops.paged_attention:_read_block",
        old="table.at[firsts // C]",
        new="table[:-1].at[firsts // C]",
        caught_by=("attention on both",),
    ),
    Mutant(
        name="NaN in a value is swallowed",
        where="spec_jax.ops.paged_attention:_accumulate",
        old="jnp.where(spoiled, jnp.nan, new_weighted)",
        new="new_weighted",
        caught_by=("NaN in values",),
    ),
    Mutant(
        name="the last term of a product is lost",
        where="spec_jax.ops.skinny_gemm:_xla",
        old="x, w, (((1,), (1,))",
        new="x[:, :-1], w[:, :-1], (((1,), (1,))",
        caught_by=("skinny product",),
    ),
    Mutant(
        name="the residual is not added",
        where=_PROJECT,
        old="return y if residual is None else residual + y",
        new="return y",
        caught_by=("product on both",),
    ),
    Mutant(
        name="a product is summed backwards where one row is live",
        where=_PROJECT,
        old="y = skinny_gemm.skinny_gemm(x, w, impl=impl).astype(out_dtype)",
        new="alone = skinny_gemm.skinny_gemm(x[:, ::-1], w[:, ::-1], impl=impl)\n"
        "    y = skinny_gemm.skinny_gemm(x, w, impl=impl)\n"
        "    y = jnp.where(num_live == 1, alone, y).astype(out_dtype)",
        caught_by=("row contract, xla",),
    ),
    Mutant(
        name="the norm leaves out eps",
        where="spec_jax.ops.rms_norm:rms_norm",
        old="mean_square + eps",
        new="mean_square",
        caught_by=("norm",),
    ),
    Mutant(
        name="the norm's weight is multiplied before the rounding",
        where="spec_jax.ops.rms_norm:rms_norm",
        old=".astype(x.dtype)\n    return normed * jnp.broadcast_to(weight, x.shape)",
        new="\n    wide_weight = jnp.broadcast_to(weight, x.shape).astype(jnp.float32)"
        "\n    return (normed * wide_weight).astype(x.dtype)",
        caught_by=("roundings of the norm",),
    ),
    Mutant(
        name="gate and up are exchanged",
        where="spec_jax.ops.swiglu:swiglu",
        old="gate, up = ",
        new="up, gate = ",
        caught_by=("gate",),
    ),
    Mutant(
        name="heads turn the other way",
        where="spec_jax.ops.rope:rotate",
        old="first * cos - second * sin, second * cos + first * sin",
        new="first * cos + second * sin, second * cos - first * sin",
        caught_by=("rotation",),
    ),
    Mutant(
        name="NaN is swallowed by argmax",
        where="spec_jax.ops.argmax:argmax",
        old="jnp.argmax(logits, axis=-1)",
        new="jnp.argmax(jnp.nan_to_num(logits, nan=-jnp.inf), axis=-1)",
        caught_by=("argmax of NaN",),
    ),
    Mutant(
        name="the last of equal logits wins",
        where="spec_jax.ops.argmax:argmax",
        old="jnp.argmax(logits, axis=-1)",
        new="logits.shape[1] - 1 - jnp.argmax(logits[:, ::-1], axis=-1)",
        caught_by=("argmax of equals",),
    ),
)

MODEL = (
    Mutant(
        name="rows are turned by their neighbours' positions",
        where="spec_jax.model.qwen3:row_angles",
        old="jax.lax.optimization_barrier(positions)",
        new="jax.lax.optimization_barrier(jnp.roll(positions, 1))",
        caught_by=("row contract, native",),
    ),
    Mutant(
        name="every tile of a prompt is at its beginning",
        where="spec_jax.model.qwen3:prefill_rows",
        old="positions=start + jnp.arange",
        new="positions=jnp.arange",
        caught_by=("row contract, native",),
    ),
    Mutant(
        name="rows that do not follow the cache are let pass",
        where="spec_jax.model.row_model:RowModel.forward",
        old="| ~follows",
        new="",
        caught_by=("rows that do not follow",),
    ),
)

NATIVE_CALLS = (
    Mutant(
        name="the native product leaves out the norm",
        where=_CALLS + "project",
        old="_shapes(norm=(norm, (K,)))",
        new="norm = jnp.zeros((0,), x.dtype)",
        caught_by=("native product",),
    ),
    Mutant(
        name="the native gate leaves out the last live row",
        where=_CALLS + "gate",
        old="x, norm, w, num_live, isa",
        new="x, norm, w, num_live - 1, isa",
        caught_by=("native gate",),
    ),
    Mutant(
        name="native keys are read from the pages of values",
        where=_CALLS + "attend",
        old="num_live,\n        k_pages,\n        v_pages,",
        new="num_live,\n        v_pages,\n        k_pages,",
        caught_by=("native attention",),
    ),
    Mutant(
        name="native rows are written one position late",
        where=_CALLS + "attend",
        old="positions,\n        num_live,\n        k_pages",
        new="positions + 1,\n        num_live,\n        k_pages",
        caught_by=("native attention",),
    ),
    Mutant(
        name="the native page table is one column short",
        where=_CALLS + "attend",
        old="page_table,\n        slots,\n        positions",
        new="page_table[:, :-1],\n        slots,\n        positions",
        caught_by=("native reach",),
    ),
    Mutant(
        name="NaN is swallowed by the native argmax",
        where=_CALLS + "argmax",
        old="output, x, num_live",
        new="output, jnp.nan_to_num(x, nan=-jnp.inf), num_live",
        caught_by=("native argmax of NaN",),
    ),
    Mutant(
        name="the native argmax leaves out the last live row",
        where=_CALLS + "argmax",
        old="output, x, num_live",
        new="output, x, num_live - 1",
        caught_by=("native argmax of live rows",),
    ),
    Mutant(
        name="the native table's rows leave out the last live one",
        where=_CALLS + "take_rows",
        old="index,\n        num_live,",
        new="index,\n        num_live - 1,",
        caught_by=("native rows of a table",),
    ),
    Mutant(
        name="a native step takes values for keys",
        where=_CALLS + "step",
        old="for pool in pools:",
        new="for pool in reversed(pools):",
        caught_by=("native step",),
    ),
    Mutant(
        name="a native step writes its rows one position late",
        where=_CALLS + "step",
        old="positions,\n        num_live,\n        page_table",
        new="positions + 1,\n        num_live,\n        page_table",
        caught_by=("native step",),
    ),
)

PALLAS = (
    Mutant(
        name="a plan is chosen by the number of rows",
        where=_TRITON + "project",
        old="plan=plan or plan_for(N, K)",
        new="plan=dataclasses.replace(plan or plan_for(N, K), block_k=16 << (R > 1))",
        caught_by=("rows of a Triton product",),
    ),
    Mutant(
        name="the last split of a sum is lost",
        where=_TRITON + "_reduce_kernel",
        old="splits = partial_refs[0].shape[0]",
        new="splits = partial_refs[0].shape[0] - 1",
        caught_by=("splits of a Triton product",),
    ),
    Mutant(
        name="NaN is swallowed by the Triton argmax",
        where=_ARGMAX + "_ordered",
        old="jnp.where(x != x, _NAN, ordered)",
        new="jnp.where(x != x, _NOTHING, ordered)",
        caught_by=("special values in a Triton argmax",),
    ),
    Mutant(
        name="logits past the end of the vocabulary are compared",
        where=_ARGMAX + "_chunk_kernel",
        old="jnp.where(inside, keys, _NOTHING)",
        new="keys",
        caught_by=("width of a Triton argmax",),
    ),
)

MUTANTS = (*REFERENCE_FORMS, *MODEL, *NATIVE_CALLS, *PALLAS)
