"""Faults of batches: slots that get, keep or change what is another's."""

from mutant import Mutant


_BATCH = "spec_jax.batch."
_ROWS = _BATCH + "rows:"
_ROUND = _BATCH + "rounds:run_round"
_GAMMAS = _BATCH + "rounds:_gammas"
_COMMIT = _BATCH + "rounds:_commit_slot"
_QUEUE = _BATCH + "queue:"
_DRAFT = _BATCH + "draft_models:"
_ALLOCATOR = "spec_jax.paging.allocator:"

PACKING = (
    Mutant(
        name="rows lie in the slots in reverse",
        where=_ROWS + "_pack",
        old="pack(jnp.arange(B, dtype=jnp.int32)[:, None])",
        new="pack(jnp.arange(B, dtype=jnp.int32)[::-1][:, None])",
        caught_by=("rows of slots", "slots of a hybrid"),
    ),
    Mutant(
        name="rows stand at their neighbour's positions",
        where=_ROWS + "_pack",
        old="pack(starts[:, None] + offsets)",
        new="pack(jnp.roll(starts, 1)[:, None] + offsets)",
        caught_by=("rows of slots",),
    ),
    Mutant(
        name="every tile is the first one",
        where=_ROWS + "RowBatch.next_tokens",
        old="_tile_of(rows, number * tile, tile)",
        new="_tile_of(rows, number * 0, tile)",
        caught_by=("rows of several tiles",),
    ),
    Mutant(
        name="the last tile is left out",
        where=_ROWS + "RowBatch.next_tokens",
        old="-(-rows.num_live // tile)",
        new="rows.num_live // tile",
        caught_by=("rows of several tiles",),
    ),
    Mutant(
        name="a starved slot is run all the same",
        where=_ROWS + "RowBatch.next_tokens",
        old="jnp.where(self.is_starved(kv), 0, num_live)",
        new="num_live",
        caught_by=("a slot without a page",),
    ),
    Mutant(
        name="all slots draw by the settings of the first",
        where=_ROWS + "RowBatch._choose",
        old="leaf[rows.slots]",
        new="leaf[rows.slots * 0]",
        caught_by=("rows of slots", "slots of a hybrid"),
    ),
    Mutant(
        name="a slot draws with the noise of the position before",
        where=_ROWS + "RowBatch._choose",
        old="rows.positions + 1",
        new="rows.positions",
        caught_by=("rows of slots",),
    ),
)

ROUNDS = (
    Mutant(
        name="a slot that is done takes rows",
        where=_ROUND,
        old="jnp.where(active, proposal.num_drafted + 1, 0)",
        new="proposal.num_drafted + 1",
        caught_by=("a slot that is done",),
    ),
    Mutant(
        name="a slot that is done commits",
        where=_ROUND,
        old="jnp.where(_against(active, new), new, old)",
        new="new",
        caught_by=("a slot that is done", "slots of a hybrid"),
    ),
    Mutant(
        name="a slot that is done is asked for drafts",
        where=_GAMMAS,
        old="jnp.where(slots.done, 0, jnp.clip(gamma, 0, gamma_max))",
        new="jnp.clip(gamma, 0, gamma_max)",
        caught_by=("a slot that is done",),
    ),
    Mutant(
        name="a slot drafts past its limit",
        where=_GAMMAS,
        old="slots.limit - slots.length - 1",
        new="slots.limit - slots.length",
        caught_by=("slots of a hybrid",),
    ),
    Mutant(
        name="a slot drafts by its neighbour's policy",
        where=_GAMMAS,
        old="jax.vmap(gamma_policy.choose)(slots.policy)",
        new="jnp.roll(jax.vmap(gamma_policy.choose)(slots.policy), 1)",
        caught_by=("policies of slots",),
    ),
    Mutant(
        name="a slot's policy learns nothing",
        where=_COMMIT,
        old="gamma=gamma, starved=starved",
        new="gamma=gamma, starved=jnp.bool_(True)",
        caught_by=("policies of slots",),
    ),
    Mutant(
        name="a starved slot commits",
        where=_ROUND,
        old="active & target.is_starved(cache)",
        new="active & False",
        caught_by=("a slot that finds no page",),
    ),
)

DRAFTS = (
    Mutant(
        name="a slot's first row drafts, caught up or not",
        where=_DRAFT + "DraftModelBatch.propose",
        old="jnp.maximum(num_live - 1, 0)",
        new="0",
        caught_by=("slots of a hybrid",),
    ),
    Mutant(
        name="rejected drafts stay in a slot's draft cache",
        where=_DRAFT + "DraftModelBatch.commit",
        old="jnp.minimum(memory.length, length - 1)",
        new="memory.length",
        caught_by=("slots of a hybrid", "a commit of length one"),
    ),
    Mutant(
        name="a slot without a page in the draft cache drafts on",
        where=_DRAFT + "DraftModelBatch.propose",
        old="drafts = wanted & has_room &",
        new="drafts = wanted &",
        caught_by=("drafts without room",),
    ),
    Mutant(
        name="the draft model is asked where a lookup is sure",
        where=_DRAFT + "HybridBatch.propose",
        old="gamma=jnp.where(found.is_sure, 0, gamma)",
        new="gamma=gamma",
        caught_by=("slots of a hybrid",),
    ),
    Mutant(
        name="every trace is that of slot 0",
        where=_BATCH + "lookups:_put",
        old="all_.at[slot].set(x)",
        new="all_.at[0].set(x)",
        caught_by=("traces of an oracle", "policies of slots"),
    ),
)

QUEUE = (
    Mutant(
        name="a slot keeps the gamma of whoever was there",
        where=_QUEUE + "_occupy",
        old="state.gamma.at[slot].set(gamma)",
        new="state.gamma",
        caught_by=("slots of a hybrid",),
    ),
    Mutant(
        name="a released slot keeps its pages",
        where=_QUEUE + "_occupy",
        old="target.truncate(state.cache, zeros, asked=asked)",
        new="state.cache",
        caught_by=("requests that wait", "more requests than slots"),
    ),
    Mutant(
        name="a released slot keeps the draft model's pages",
        where=_QUEUE + "_occupy",
        old="drafter.commit(draft_params, state.memory, zeros + 1, asked=asked)",
        new="state.memory",
        caught_by=("requests that wait",),
    ),
    Mutant(
        name="only the slot that is taken gives its pages back",
        where=_QUEUE + "_occupy",
        old="state.slots.done |",
        new="",
        caught_by=("pages of all that ended",),
    ),
    Mutant(
        name="pages of empty slots are promised",
        where=_QUEUE + "Batch.check",
        old="self.num_pages - others",
        new="self.num_pages",
        caught_by=("a request that never fits",),
    ),
    Mutant(
        name="pages that others will need are promised",
        where=_QUEUE + "Batch._fits",
        old="held + idle + self._pages(request)",
        new="idle + self._pages(request)",
        caught_by=("requests that wait",),
    ),
    Mutant(
        name="a result is lost where another slot starves",
        where=_QUEUE + "Batch.run",
        old="slots.done & ~slots.starved",
        new="slots.done & ~slots.starved.any()",
        caught_by=("a slot that starves",),
    ),
)

PAGES = (
    Mutant(
        name="a slot that starves takes what there is",
        where=_ALLOCATOR + "reserve_each",
        old="jnp.where(fits, missing[slot], 0)",
        new="jnp.minimum(missing[slot], num_free)",
        caught_by=("each slot",),
    ),
    Mutant(
        name="the last slot is served first",
        where=_ALLOCATOR + "reserve_each",
        old="slot = jnp.argmax(missing > 0)",
        new="slot = kv.num_slots - 1 - jnp.argmax(missing[::-1] > 0)",
        caught_by=("each slot",),
    ),
    Mutant(
        name="a slot that found its pages still starves",
        where=_ALLOCATOR + "reserve_each",
        old="jnp.where(valid, False, kv.out_of_pages)",
        new="kv.out_of_pages",
        caught_by=("each slot",),
    ),
    Mutant(
        name="all slots are extended",
        where=_ALLOCATOR + "extend_each",
        old="jnp.where(asked & valid,",
        new="jnp.where(valid,",
        caught_by=("each slot",),
    ),
    Mutant(
        name="all slots are truncated",
        where=_ALLOCATOR + "truncate_each",
        old="valid = asked & kv.registered",
        new="valid = kv.registered",
        caught_by=("each slot",),
    ),
    Mutant(
        name="truncated slots keep their pages",
        where=_ALLOCATOR + "truncate_each",
        old="if not kv.pages_change_hands:",
        new="if kv.pages_change_hands:",
        caught_by=("each slot",),
    ),
)

MUTANTS = (*PACKING, *ROUNDS, *DRAFTS, *QUEUE, *PAGES)
