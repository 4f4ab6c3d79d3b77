"""Faults of the engine: rounds, slots, the queue, the drafters' caches."""

from mutant import Mutant


_ROUND = "rounds:run_round"
_COMMIT = "rounds:commit_verdict"
_KEPT = "test_rounds.py::test_tokens_and_kv_are_those_of_plain_decoding[2]"
_HYBRID = "batch/test_batch_rounds.py::test_each_slot_is_what_it_is_alone[hybrid]"

ROUNDS = (
    Mutant(
        "a window runs past the limit",
        _ROUND,
        "state.limit - n - 1",
        "state.limit - n",
        "test_rounds.py::test_max_tokens_is_met_exactly",
    ),
    Mutant(
        "the target's cache is cut one long",
        _ROUND,
        "target.truncate(cache, state.length - 1)",
        "target.truncate(cache, state.length)",
        _KEPT,
    ),
    Mutant(
        "a stop token is ignored inside a window",
        _COMMIT,
        "jnp.argmax(is_stop) + 1",
        "verdict.num_accepted + 1",
        "test_rounds.py::test_stop_tokens_anywhere_in_the_window",
    ),
    Mutant(
        "a round that is out of pages commits a token",
        _COMMIT,
        "jnp.where(starved, 0, num_kept)",
        "jnp.where(starved, 1, num_kept)",
        "test_rounds.py::test_out_of_pages_keeps_what_is_committed",
    ),
    Mutant(
        "the number of drafts is taken on trust",
        "rounds:limit_proposal",
        "jnp.clip(proposal.num_drafted, 0, gamma)",
        "proposal.num_drafted",
        "test_proposals.py::"
        "test_no_proposal_makes_the_output_wrong[native-sample-path-False]",
    ),
    Mutant(
        "a policy takes all drafts for kept",
        "rounds:teach_policy",
        "proposal.num_drafted, verdict.num_accepted)",
        "proposal.num_drafted, proposal.num_drafted)",
        "test_adaptive_rounds.py::test_the_policy_is_told_of_every_round[goodput]",
    ),
    Mutant(
        "the draft's cache keeps a rejected draft",
        "drafters.draft_model:DraftModel.commit",
        "length - 1)",
        "length)",
        "drafters/test_draft_rollback.py::test_a_rejected_draft_leaves_nothing_behind",
    ),
)

BATCH = (
    Mutant(
        "rows lie in the slots in reverse",
        "batch.rows:_pack",
        "pack(jnp.arange(B, dtype=jnp.int32)[:, None])",
        "pack(jnp.arange(B, dtype=jnp.int32)[::-1][:, None])",
        _HYBRID,
    ),
    Mutant(
        "a slot that is done commits",
        "batch.rounds:run_round",
        "jnp.where(_against(active, new), new, old)",
        "new",
        "batch/test_batch_rounds.py::test_a_slot_that_is_done_stays_as_it_is",
    ),
    Mutant(
        "rejected drafts stay in a slot's draft cache",
        "batch.draft_models:DraftModelBatch.commit",
        "jnp.minimum(memory.length, length - 1)",
        "memory.length",
        "batch/test_batch_drafters.py::test_a_commit_of_length_one_forgets_a_slot",
    ),
    Mutant(
        "a released slot keeps its pages",
        "batch.queue:_occupy",
        "target.truncate(state.cache, zeros, asked=asked)",
        "state.cache",
        "batch/test_queue.py::test_requests_wait_for_pages",
    ),
    Mutant(
        "pages that others will need are promised",
        "batch.queue:Batch._fits",
        "held + idle + self._pages(request)",
        "idle + self._pages(request)",
        "batch/test_queue.py::test_requests_wait_for_pages",
    ),
)

MUTANTS = (*ROUNDS, *BATCH)
