"""Faults of the exact core: kernels, the model's rows, pages, acceptance, sampling.

Faults that a test plants itself, as its negative control, are not among them.
"""

from mutant import Mutant


_ATTENTION = "ops.paged_attention:paged_attention"
_ROWS = "ops/test_row_attention.py::test_a_row_is_that_row_alone_and_float64s"
_ALONE = "ops/test_row_contract.py::test_a_row_is_that_row_alone"
_BLOCKS = "native/test_blocks.py::test_sums_are_in_the_order_of_blocks"
_TILES = "pallas/test_pallas_plans.py::test_eight_bits_on_tiles"
_WALK = "paging/test_random_walk.py::test_random_walks"
_CONTRACT = "model/test_rows.py::test_verifying_equals_decoding_one_by_one"

KERNELS = (
    Mutant("a row sees one key too many", "ops.paged_attention:_seen",
           "<= positions[:, None]", "<= positions[:, None] + 1",
           f"{_ROWS}[xla-float32]"),
    Mutant("a row sees keys before its window", "ops.paged_attention:_seen",
           "seen & (key_positions[None] >= firsts[:, None])", "seen",
           "ops/test_row_attention.py::test_a_window"),
    Mutant("a row sees the keys of other slots", _ATTENTION,
           "visible = mine[:, None] &", "visible = live[:, None] &",
           f"{_ROWS}[xla-float32]"),
    Mutant("NaN in a value is swallowed", "ops.paged_attention:_accumulate",
           "jnp.where(spoiled, jnp.nan, new_weighted)", "new_weighted",
           "ops/test_row_attention.py::test_nan_and_inf_reach_what_sees_them[xla-nan]"),
    Mutant("a product is summed backwards where one row is live",
           "ops.projection:project", "y = _product(x, weights.unpacked(w))",
           "w = weights.unpacked(w)\n"
           "    alone, y = _product(x[:, ::-1], w[:, ::-1]), _product(x, w)\n"
           "    y = jnp.where(num_active == 1, alone, y)",
           f"{_CONTRACT}[float32-xla]"),
    Mutant("a row of eight bits has the scale of all rows",
           "native.blocks:quantise_rows",
           "most = jnp.abs(x).max(axis=-1, initial=0.0)",
           "most = jnp.abs(x).max(axis=(0, 2), initial=0.0)\n"
           "    most = jnp.broadcast_to(most[None], x.shape[:2])",
           f"{_ALONE}[xla-byte_project]"),
    Mutant("panels of eight bits have the scales of neighbours", "native.blocks:pack",
           "jnp.pad(halves, missing)", "jnp.pad(jnp.roll(halves, 1, 1), missing)",
           f"{_BLOCKS}[portable-q8_0-129-40-float32]"),
    Mutant("panels of four bits have minima of zero", "native.blocks:pack",
           "in jax.tree.leaves((w.scales, w.minima))",
           "in (w.scales, *([] if w.minima is None else [0 * w.minima]))",
           f"{_BLOCKS}[portable-q4_1-129-40-float32]"),
    Mutant("a product of four bits leaves out the minima", "native.blocks:product",
           "return sums + jnp.einsum(\"...,n->...n\", totals, minima)", "return sums",
           "ops/test_projection.py::test_products_of_blocks_are_those_of_float64"
           "[q4_1-xla-logits-float32]"),
    Mutant("an embedding is of four bits, too", "model.params:form_of",
           'form == "q4_1" and is_outer', "False",
           "model/test_byte_weights.py::test_what_is_saved_is_loaded_again"
           "[qwen3-q4_1]"),
    Mutant("tiles of eight bits have the scales of neighbours", "native.tiles:pack",
           "jnp.pad(w.scales, missing)", "jnp.pad(jnp.roll(w.scales, 1, 1), missing)",
           f"{_TILES}[129-40]"),
    Mutant("the second block of each pair is added first",
           "pallas.byte_gemm_triton:_add_pair", "in range(2)", "in (1, 0)",
           f"{_TILES}[129-40]"),
    Mutant("the norm's weight is multiplied before the rounding",
           "ops.rms_norm:rms_norm",
           ".astype(x.dtype)\n    return normed * jnp.broadcast_to(weight, x.shape)",
           "\n    wide_weight = jnp.broadcast_to(weight, x.shape).astype(jnp.float32)"
           "\n    return (normed * wide_weight).astype(x.dtype)",
           "ops/test_row_contract.py::test_values_are_those_of_float64[norm-xla]"),
    Mutant("NaN is swallowed by argmax", "ops.argmax:argmax",
           "jnp.argmax(logits, axis=-1)",
           "jnp.argmax(jnp.nan_to_num(logits, nan=-jnp.inf), axis=-1)",
           "ops/test_draw.py::test_it_is_numpys[xla-513]"),
    Mutant("the last of equal logits wins", "ops.argmax:argmax",
           "jnp.argmax(logits, axis=-1)",
           "logits.shape[1] - 1 - jnp.argmax(logits[:, ::-1], axis=-1)",
           "ops/test_draw.py::test_it_is_numpys[xla-513]"),
    Mutant("rows are turned by their neighbours' positions", "model.decoder:row_angles",
           "jax.lax.optimization_barrier(positions)",
           "jax.lax.optimization_barrier(jnp.roll(positions, 1))",
           f"{_CONTRACT}[float32-native]"),
    Mutant("every tile of a prompt is at its beginning",
           "model.row_model:_prefill_rows", "positions=start + jnp.arange",
           "positions=jnp.arange", f"{_CONTRACT}[float32-native]"),
    Mutant("rows that do not follow the cache are let pass",
           "paging.allocator:append_each", "| (asked & (starts != kv.length))", "",
           "model/test_row_model.py::test_rows_that_do_not_follow_are_refused"),
    Mutant("a row reads the keys of another row's slot", "native.steps:Model.run",
           "(rows.slots, (R,))", "(rows.slots[::-1], (R,))",
           "model/test_rows.py::test_rows_do_not_depend_on_their_place_or_neighbours"
           "[bfloat16-native]"),
    Mutant("two keys of a branch are exchanged", "tree:layout",
           "return start + depth, places[:, ::-1]",
           "order = jnp.arange(width)[::-1].at[-3:].set(jnp.array([2, 0, 1]))\n"
           "    return start + depth, places[:, order]",
           "model/test_tree_rows.py::test_any_order_with_parents_first[native]"),
    Mutant("a split is added before it is there", "pallas.row_jobs:_store",
           "jnp.zeros(", "jnp.ones(",
           "pallas/test_pallas_plans.py::test_default_plan_with_several_splits"),
    Mutant("the native gate leaves out the last active row", "native.calls:gate",
           "(num_active, ())", "(num_active - 1, ())",
           f"{_ALONE}[portable-gate]"),
    Mutant("native rows are written one position late", "native.calls:attend",
           '"positions": (positions, (R,))',
           '"positions": (positions + 1, (R,))',
           f"{_ROWS}[portable-float32]"),
    Mutant("a native step takes values for keys", "native.steps:Model.call",
           "[*kv.k, *kv.v]", "[*kv.v, *kv.k]",
           "native/test_native_step.py::test_a_step_is_its_operations[float32-6]"),
    Mutant("a native step writes its rows one position late", "native.steps:Model.run",
           "(rows.positions, (R,))", "(rows.positions + 1, (R,))",
           "native/test_native_step.py::test_a_step_is_its_operations[float32-6]"),
    Mutant("chains begin one position late", "engine.rows:SlotRows.run_chains",
           "starts=starts,", "starts=starts + 1,",
           "native/test_native_step.py::test_drafts_are_those_of_single_steps[float32]"),
    Mutant("chains draft where there is no page", "engine.rows:_reserve_chains",
           "jnp.clip(counts, 0, room)", "counts",
           "native/test_native_step.py::test_without_pages_a_slot_goes_as_far_as_it_can"),
    Mutant("a native move forgets the values", "ops.page_move:page_move",
           "calls.move(\n            pools,",
           "pools[: len(pools) // 2] + calls.move("
           "\n            pools[len(pools) // 2 :],",
           "ops/test_page_move.py::test_places_are_copied_in_all_pools[native-float32]"),
    Mutant("the native argmax leaves out the last active row", "native.calls:argmax",
           "(num_active, ())", "(num_active - 1, ())",
           f"{_ALONE}[portable-argmax]"),
)  # fmt: skip

PAGES = (
    Mutant("truncation to nothing gives up the first page",
           "paging.allocator:truncate_each",
           "jnp.maximum(index.pages_for(new_len, kv.page_size), least)",
           "index.pages_for(new_len, kv.page_size)", f"{_WALK}[paged-xla]"),
    Mutant("a slot that is out of pages keeps half of what it asked for",
           "paging.allocator:_reserve", "jnp.where(fits, missing[slot], 0)",
           "jnp.minimum(missing[slot], num_free)", f"{_WALK}[paged-xla]"),
    Mutant("keys and values are written one position late", "paging.cache:write",
           '"positions": positions', '"positions": positions + 1',
           f"{_WALK}[paged-xla]"),
    Mutant("a page is handed out twice", "paging.allocator:_take",
           "left = num_free - count", "left = num_free - jnp.maximum(count - 1, 0)",
           f"{_WALK}[paged-xla]"),
    Mutant("the last page of a share is not copied", "paging.cache:copy_page",
           "elements.at[target]", "elements.at[source]", f"{_WALK}[shared-xla]"),
    Mutant("a page of others is cut", "paging.allocator:truncate_each",
           "~jax.vmap(_cuts_shared,", "True | jax.vmap(_cuts_shared,",
           f"{_WALK}[shared-xla]"),
    Mutant("truncation clears bytes", "paging.allocator:truncate_each",
           "if not kv.has_shared_pool:\n        return kv",
           "if not kv.has_shared_pool:\n"
           "        return kv.replace(k=tuple(k.at[::5].set(0) for k in kv.k))",
           f"{_WALK}[static-xla]"),
    Mutant("all slots get pages, asked or not", "paging.allocator:_reserve",
           "valid = asked & (up_to >= 0)", "valid = up_to >= 0", f"{_WALK}[paged-xla]"),
    Mutant("all slots grow, asked or not", "paging.allocator:extend_each",
           "jnp.where(asked & valid, new_len", "jnp.where(valid, new_len",
           f"{_WALK}[paged-xla]"),
    Mutant("all slots are cut, asked or not", "paging.allocator:truncate_each",
           "valid = asked & (new_len >= 0)", "valid = (new_len >= 0)",
           f"{_WALK}[paged-xla]"),
    Mutant("rows are placed as if all were asked for", "paging.allocator:append_each",
           "(starts + counts - ends)", "(starts - ends)", f"{_WALK}[paged-xla]"),
    Mutant("a kernel counts a page too many", "pallas.allocation_triton:Pages.covering",
           "is_partial.astype(jnp.int32)", "1", f"{_WALK}[paged-interpret]"),
    Mutant("a kernel places rows one position late",
           "pallas.allocation_triton:_append_each", "= start + number",
           "= start + number + 1", f"{_WALK}[paged-interpret]"),
    Mutant("a position below zero is on the last page", "ops.page_write:locate",
           "wrap_negative_indices=False", "wrap_negative_indices=True",
           "paging/test_cache.py::test_outside_the_table_is_nowhere[0--1]"),
    Mutant("a padding row is written to the last page", "ops.page_write:page_write",
           "num_active, at, num_pages", "num_active, at, -1",
           "paging/test_cache.py::test_nothing_else_is_written"),
)  # fmt: skip

_SMALL = "rules/test_acceptance.py::test_every_small_case"
_LAW = "test_the_output_has_the_targets_distribution"

RULES = (
    Mutant("acceptance reads one row late", "rules.acceptance:accept_exact",
           "draft_tokens == target_tokens[:-1]", "draft_tokens == target_tokens[1:]",
           _SMALL),
    Mutant("a draft is kept after a rejected one", "rules.acceptance:accept_exact",
           "jnp.cumprod(agrees.astype(jnp.int32))", "agrees.astype(jnp.int32)", _SMALL),
    Mutant("padding after the drafts is accepted", "rules.acceptance:accept_exact",
           "is_real & (draft_tokens == target_tokens[:-1])",
           "draft_tokens == target_tokens[:-1]", _SMALL),
    Mutant("the residual is not subtracted", "rules.acceptance:residual",
           "target - draft", "target",
           "rules/test_acceptance.py::test_the_law_is_the_targets[rejection-random-3-2]"),
    *(Mutant(f"in a tree the residual is not subtracted: {rule}",
             "rules.acceptance:residual", "target - draft", f"target - {few} * draft",
             f"rules/test_tree_law.py::{_LAW}[{rule}-{shape}]")
      for few, rule, shape in ((0, "rejection", "2x2"), (0.5, "block", "2x2"),
                                  (0.9, "multipath", "2-1-1"))),
    Mutant("a bonus is drawn from the row before",
           "rules.acceptance:rejection_probabilities", "residual(target_probs,",
           "residual(target_probs.at[num_drafted].set(target_probs[num_drafted - 1]),",
           "rules/test_acceptance.py::test_the_law_is_the_targets[rejection-random-3-2]"),
    Mutant("a rejected draft's place is drawn from the whole target",
           "rules.acceptance:rejection_probabilities",
           "own=residual(target_probs, draft_probs)", "own=target_probs",
           "engine/test_sampled.py::"
           "test_rounds_draw_from_the_targets_law[rejection-None-1-False]"),
    Mutant("a draft that was drafted past the vocabulary is certain",
           "rules.acceptance:_of_drafts", "fill_value=0", "fill_value=2",
           "engine/test_liars.py::test_no_proposal_makes_the_output_wrong"
           "[rejection-True-4-native]"),
    Mutant("a draft outside the vocabulary has a probability",
           "rules.acceptance:_of_drafts", "fill_value=0", "fill_value=1",
           "rules/test_acceptance.py::"
           "test_a_draft_outside_the_vocabulary_is_never_kept[rejection-4]"),
    Mutant("logits that are not finite are not counted",
           "engine.verification:finite_rows", "jnp.isfinite(top[:, 0])",
           "jnp.isfinite(top[:, 0]) | True", "engine/test_liars.py::"
           "test_each_token_from_such_logits_is_counted[1-coupled]"),
    Mutant("a histogram that misses a round is let pass", "analysis.metrics:identities",
           "[sum(c.accepted_hist), c.rounds]", "[c.rounds, c.rounds]",
           "test_metrics.py::test_planted_fault_is_named[sum(hist) == rounds-fault2]"),
)  # fmt: skip

MUTANTS = (*KERNELS, *PAGES, *RULES)
