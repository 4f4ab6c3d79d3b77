"""Faults of the exact core: kernels, the model's rows, pages, acceptance, sampling.

Faults that a test plants itself, as its negative control, are not among them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from mutant import Fault, Mutant, fields, gives, takes


_later, _earlier = (lambda x: x + 1), (lambda x: x - 1)
_zeros = lambda x: jax.tree.map(jnp.zeros_like, x)  # None stays None.
_of_neighbours = lambda x: jnp.roll(x, 1, axis=1)


def _backwards_where_alone(sound):
    def project(x, w, *, norm=None, **how):
        back = lambda array: None if array is None else array[..., ::-1]
        alone = sound(back(x), back(w), norm=back(norm), **how)
        return jnp.where(how["num_active"] == 1, alone, sound(x, w, norm=norm, **how))

    return project


def _values_for_keys(model):
    kv = model.kv.replace(k=model.kv.v, v=model.kv.k)
    return dataclasses.replace(model, kv=kv)


def _moves_keys_alone(sound):
    def move(pools, **how):
        keys = len(pools) // 2
        return (*sound(pools[:keys], **how), *pools[keys:])

    return move


def _takes_what_there_is(sound):
    def reserve(kv, up_to, asked, **most):
        there = (kv.num_owned + kv.num_free) * kv.page_size
        taken = sound(kv, jnp.minimum(up_to, there), asked, **most)
        lacks = sound(kv, up_to, asked, **most).out_of_pages
        return taken.replace(out_of_pages=lacks)

    return reserve


def _as_if_it_counted_owners(sound):
    def truncate_each(kv, *how, **asked):
        owners = jnp.ones_like(kv.free_pages)
        return sound(kv.replace(counts=owners), *how, **asked).replace(counts=None)

    return truncate_each


def _certain_outside(sound):
    def of_drafts(probs, tokens):
        is_inside = (tokens >= 0) & (tokens < probs.shape[-1])
        return jnp.where(is_inside, sound(probs, tokens), 1.0)

    return of_drafts


_ROWS = "ops/test_row_attention.py::test_a_row_is_that_row_alone_and_float64s"
_ALONE = "ops/test_row_contract.py::test_a_row_is_that_row_alone"
_BLOCKS = "native/test_native_calls.py::test_sums_are_in_the_order_of_blocks"
_TILES = "pallas/test_pallas_plans.py::test_eight_bits_on_tiles"
_WALK = "paging/test_random_walk.py::test_random_walks"
_CONTRACT = "model/test_rows.py::test_verifying_equals_decoding_one_by_one"

KERNELS = (
    Fault("a row sees one key too many", "ops.paged_attention:_seen",
          takes(positions=_later), f"{_ROWS}[xla-float32]"),
    Fault("a row sees keys before its window", "ops.paged_attention:_seen",
          takes(firsts=lambda firsts: None),
          "ops/test_row_attention.py::test_a_window"),
    Fault("a row sees what rows of other slots see", "ops.paged_attention:_accumulate",
          takes(visible=lambda seen: seen | seen.any(axis=0, keepdims=True)),
          f"{_ROWS}[xla-float32]"),
    Fault("NaN in a value is swallowed", "ops.paged_attention:_accumulate",
          takes(values=jnp.nan_to_num),
          "ops/test_row_attention.py::test_nan_and_inf_reach_what_sees_them[xla-nan]"),
    Fault("a product is summed backwards where one row is live",
          "ops.projection:project", _backwards_where_alone,
          f"{_CONTRACT}[float32-xla]"),
    Fault("a row of eight bits has the scale of all rows",
          "native.blocks:quantise_rows",
          gives(lambda made: (made[0], made[1].at[:].set(made[1].max(axis=0)))),
          f"{_ALONE}[xla-byte_project]"),
    Fault("panels of eight bits have the scales of neighbours", "native.blocks:pack",
          takes(w=fields(scales=_of_neighbours)),
          f"{_BLOCKS}[q8_0-129-40-float32-portable]"),
    Fault("panels of four bits have minima of zero", "native.blocks:pack",
          takes(w=fields(minima=_zeros)), f"{_BLOCKS}[q4_1-129-40-float32-portable]"),
    Fault("a product of four bits leaves out the minima", "native.blocks:product",
          takes(w=fields(minima=_zeros)),
          "ops/test_projection.py::test_products_of_blocks_are_those_of_float64"
          "[q4_1-xla-logits-float32]"),
    Fault("an embedding is of four bits, too", "model.params:form_of",
          takes(path=lambda path: ()),
          "model/test_byte_weights.py::test_what_is_saved_is_loaded_again[qwen3-q4_1]"),
    Fault("tiles of eight bits have the scales of neighbours", "native.tiles:pack",
          takes(w=fields(scales=_of_neighbours)), f"{_TILES}[129-40]"),
    Mutant("the second block of each pair is added first",
           "pallas.byte_gemm_triton:_add_pair", "in range(2)", "in (1, 0)",
           f"{_TILES}[129-40]"),
    Fault("the norm's weight is multiplied before the rounding",
          "ops.rms_norm:rms_norm",
          lambda sound: lambda x, weight, **how: sound(
              x.astype(jnp.float32), weight.astype(jnp.float32), **how).astype(x.dtype),
          "ops/test_row_contract.py::test_values_are_those_of_float64[norm-xla]"),
    Fault("NaN is swallowed by argmax", "ops.argmax:argmax",
          takes(logits=lambda logits: jnp.nan_to_num(logits, nan=-jnp.inf)),
          "ops/test_draw.py::test_it_is_numpys[xla-513]"),
    Fault("the last of equal logits wins", "ops.argmax:argmax",
          lambda sound: lambda logits, **how: (
              logits.shape[1] - 1 - sound(logits[:, ::-1], **how)),
          "ops/test_draw.py::test_it_is_numpys[xla-513]"),
    Fault("rows are turned by their neighbours' positions", "model.decoder:row_angles",
          takes(positions=lambda positions: jnp.roll(positions, 1)),
          f"{_CONTRACT}[float32-native]"),
    Fault("every slab of a prompt is at its beginning",
          "model.row_model:RowModel.forward_rows",
          takes(rows=fields(positions=lambda positions: positions - positions[0])),
          f"{_CONTRACT}[float32-native]"),
    Fault("rows that do not follow the cache are let pass",
          "paging.allocator:append_each",
          lambda sound: lambda kv, up_to, counts, **how: sound(
              kv, kv.length + counts, counts, **how),
          "model/test_row_model.py::test_rows_that_do_not_follow_are_refused"),
    Fault("a row reads the keys of another row's slot", "native.steps:Model.run",
          takes(rows=fields(slots=lambda slots: slots[::-1])),
          "model/test_rows.py::test_rows_do_not_depend_on_their_place_or_neighbours"
          "[bfloat16-native]"),
    Fault("two keys of a branch are exchanged", "tree:layout",
          gives(lambda made: (made[0], made[1].at[:, -2:].set(made[1][:, :-3:-1]))),
          "model/test_tree_rows.py::test_any_order_with_parents_first[native]"),
    Fault("a split is added before it is there", "pallas.row_jobs:row_jobs",
          gives(lambda jobs: jobs._replace(done=jobs.done + 1)),
          "pallas/test_pallas_plans.py::test_default_plan_with_several_splits"),
    Fault("the native gate leaves out the last active row", "native.calls:gate",
          takes(num_active=_earlier), f"{_ALONE}[portable-gate]"),
    Fault("native rows are written one position late", "native.calls:attend",
          takes(positions=_later), f"{_ROWS}[portable-float32]"),
    Fault("a native step takes values for keys", "native.steps:Model.call",
          takes(self=_values_for_keys),
          "native/test_native_step.py::test_a_step_is_its_operations[float32-6]"),
    Fault("a native step writes its rows one position late", "native.steps:Model.run",
          takes(rows=fields(positions=_later)),
          "native/test_native_step.py::test_a_step_is_its_operations[float32-6]"),
    Fault("chains begin one position late", "model.decoder:run_chains",
          takes(starts=_later),
          "native/test_native_step.py::test_drafts_are_those_of_single_steps[float32]"),
    Fault("chains draft where there is no page", "engine.rows:_reserve_chains",
          lambda sound: lambda kv, most, pending, counts: (
              sound(kv, most, pending, counts)[0], counts),
          "native/test_native_step.py::test_without_pages_a_slot_goes_as_far_as_it_can"),
    Fault("a native move forgets the values", "native.calls:move", _moves_keys_alone,
          "ops/test_page_move.py::test_places_are_copied_in_all_pools[native-float32]"),
    Fault("the native argmax leaves out the last active row", "native.calls:argmax",
          takes(num_active=_earlier), f"{_ALONE}[portable-argmax]"),
)  # fmt: skip

PAGES = (
    Fault("truncation to nothing gives up the first page",
          "paging.allocator:truncate_each", _as_if_it_counted_owners,
          f"{_WALK}[paged-xla]"),
    Fault("a slot that is out of pages takes the pages there are",
          "paging.allocator:_reserve", _takes_what_there_is, f"{_WALK}[paged-xla]"),
    Fault("keys and values are written one position late", "paging.cache:write",
          takes(positions=_later), f"{_WALK}[paged-xla]"),
    Fault("a page is handed out twice", "paging.allocator:_reserve",
          lambda sound: lambda kv, *asked, **most: sound(kv, *asked, **most).replace(
              free_pages=kv.free_pages, num_free=kv.num_free),
          f"{_WALK}[paged-xla]"),
    Fault("the last page of a share is not copied", "paging.cache:copy_page",
          lambda sound: lambda kv, source, target: kv, f"{_WALK}[shared-xla]"),
    Fault("a page of others is cut", "paging.allocator:_cuts_shared",
          gives(jnp.zeros_like), f"{_WALK}[shared-xla]"),
    Fault("truncation clears bytes", "paging.allocator:truncate_each",
          gives(fields(k=lambda pools: tuple(k.at[::5].set(0) for k in pools))),
          f"{_WALK}[static-xla]"),
    Fault("all slots get pages, asked or not", "paging.allocator:_reserve",
          takes(asked=jnp.ones_like), f"{_WALK}[paged-xla]"),
    Fault("all slots grow, asked or not", "paging.allocator:extend_each",
          takes(asked=jnp.ones_like), f"{_WALK}[paged-xla]"),
    Fault("all slots are cut, asked or not", "paging.allocator:truncate_each",
          takes(asked=jnp.ones_like), f"{_WALK}[paged-xla]"),
    Fault("rows are placed over those before them", "paging.allocator:append_each",
          gives(lambda made: (*made[:3], made[3] - made[1][made[2]])),
          f"{_WALK}[paged-xla]"),
    Fault("a kernel counts a page too many", "pallas.allocation_triton:Pages.covering",
          gives(_later), f"{_WALK}[paged-interpret]"),
    Fault("a kernel places rows one position late",
          "pallas.allocation_triton:append_each",
          gives(lambda made: (*made[:3], made[3] + 1)), f"{_WALK}[paged-interpret]"),
    Fault("a position below zero has a page", "ops.page_write:locate",
          takes(positions=jnp.abs),
          "paging/test_cache.py::test_outside_the_table_is_nowhere[0--1]"),
    Fault("a padding row is written", "ops.page_write:page_write",
          takes(num_active=_later),
          "paging/test_cache.py::test_nothing_else_is_written"),
)  # fmt: skip

_SMALL = "rules/test_acceptance.py::test_every_small_case"
_LAW = "test_the_output_has_the_targets_distribution"

RULES = (
    Fault("acceptance reads one row late", "rules.acceptance:accept_exact",
          takes(target_tokens=lambda tokens: jnp.roll(tokens, -1)), _SMALL),
    Mutant("a draft is kept after a rejected one", "rules.acceptance:accept_exact",
           "jnp.cumprod(agrees.astype(jnp.int32))", "agrees.astype(jnp.int32)", _SMALL),
    Fault("padding after the drafts is accepted", "rules.acceptance:accept_exact",
          takes(num_drafted=lambda count: count + 99), _SMALL),
    Fault("the residual is not subtracted", "rules.acceptance:residual",
          takes(draft=jnp.zeros_like),
          "rules/test_acceptance.py::test_the_law_is_the_targets[rejection-random-3-2]"),
    *(Fault(f"in a tree the residual is not subtracted: {rule}",
            "rules.acceptance:residual", takes(draft=lambda x, few=few: few * x),
            f"rules/test_laws.py::{_LAW}[{rule}-{shape}]")
      for few, rule, shape in ((0, "rejection", "2x2"), (0.5, "block", "2x2"),
                                  (0.9, "multipath", "2-1-1"))),
    Fault("a bonus is drawn from the row before",
          "rules.acceptance:rejection_probabilities",
          lambda sound: lambda tokens, draft, target, count: sound(
              tokens, draft, target.at[count].set(target[count - 1]), count),
          "rules/test_acceptance.py::test_the_law_is_the_targets[rejection-random-3-2]"),
    Fault("a rejected draft's place is drawn from the whole target",
          "rules.acceptance:rejection_probabilities",
          lambda sound: lambda tokens, draft, target, count: sound(
              tokens, draft, target, count).replace(own=target),
          "engine/test_sampled.py::"
          "test_rounds_draw_from_the_targets_law[rejection-None-1-False]"),
    Fault("a draft that was drafted past the vocabulary is certain",
          "rules.acceptance:_of_drafts", _certain_outside,
          "engine/test_liars.py::test_no_proposal_makes_the_output_wrong"
          "[rejection-True-4-native]"),
    Fault("a draft outside the vocabulary has a probability",
          "rules.acceptance:_of_drafts", _certain_outside,
          "rules/test_acceptance.py::"
          "test_a_draft_outside_the_vocabulary_is_never_kept[rejection-4]"),
    Fault("logits that are not finite are not counted",
          "engine.verification:finite_rows", gives(jnp.ones_like),
          "engine/test_liars.py::"
          "test_each_token_from_such_logits_is_counted[1-coupled]"),
    Fault("a histogram that misses a round is let pass", "analysis.metrics:require",
          lambda sound: lambda identity, *numbers, **how: (
              identity == "sum(hist) == rounds" or sound(identity, *numbers, **how)),
          "test_metrics.py::test_planted_fault_is_named[sum(hist) == rounds-fault2]"),
)  # fmt: skip

MUTANTS = (*KERNELS, *PAGES, *RULES)
