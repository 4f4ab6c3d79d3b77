"""Faults of the engine: rounds, slots, the scheduler, decoding, the drafters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from mutant import Fault, Mutant, fields, gives, item, returns, takes

from spec_jax.drafters import suffix_match
from spec_jax.engine import rows as rows_lib, state as states


_later, _earlier = (lambda x: x + 1), (lambda x: x - 1)
_much = lambda x: x + 1000
_nothing = lambda x: None
_zeros = lambda x: 0 * x
_numbers = lambda x: jnp.arange(x.size, dtype=jnp.int32)
_of_next = lambda x: jnp.roll(x, -1, axis=1)
_of_last = lambda x: jnp.roll(x, 1, axis=1)


def _keeps(more):
    """Returns a fault of a truncation: it keeps more rows, where there are more."""
    return lambda sound: (
        lambda self, kv, new_len, **asked: sound(
            self, kv, jnp.clip(new_len + more, 0, kv.length), **asked
        )
    )


def _one_more(sound):
    def accept_exact(drafts, own, num_drafted):
        more = sound(drafts, own, num_drafted).num_accepted + 1
        return sound(own[:-1], own, jnp.minimum(more, num_drafted))

    return accept_exact


def _kept_as_they_are_without_one(sound):
    def update(self, state, *, num_accepted, **told):
        new = sound(self, state, num_accepted=num_accepted, **told)
        return new.replace(kept=jnp.where(num_accepted > 0, new.kept, state.kept))

    return update


def _rows_of_the_first(sound):
    def over_tiles(forward, kv, rows, *given, tile):
        first = lambda x: jnp.resize(x[:tile], x.shape) if x.ndim else x
        return sound(forward, kv, jax.tree.map(first, rows), *given, tile=tile)

    return over_tiles


def _without_far_nodes(sound):
    def layout(parents, *, start, width):
        positions, branch = sound(parents, start=start, width=width)
        tile, places = rows_lib.NATIVE_TILE, branch - start
        columns = jnp.arange(parents.shape[0])[:, None]
        is_far = (places > 0) & (places // tile < columns // tile)
        return positions, jnp.where(is_far, branch - 1, branch)

    return layout


def _its_entries_from_the_row_before(sound):
    def keep_path(self, cache, path, num_kept, *, start):
        early = sound(self, cache, path - 1, num_kept, start=start)
        right = sound(self, cache, path, num_kept, start=start)
        return early.replace(cache=right.cache)

    return keep_path


def _with_parents(change):
    """Returns a change of a `draw.Run`, which it gives other parents."""
    return lambda run: (
        lambda memory, tokens, parents, *level: run(
            memory, tokens, change(parents), *level
        )
    )


_STREAM = "engine/test_sampled.py::test_the_stream_is_that_of_decoding"
_ROUND = "engine/test_round.py::"
_KV = _ROUND + "test_tokens_and_kv_are_those_of_decoding"
_ROUNDS = _KV + "[native-static-3]"

ROUNDS = (
    Fault("a window runs past the limit", "engine.round:_gamma",
          takes(slots=fields(limit=_later)),
          _ROUND + "test_max_tokens_is_met_exactly[1]"),
    Mutant("a stop token is ignored inside a window", "engine.commit:commit_slot",
           "jnp.argmax(is_stop) + 1", "outcome.num_accepted + 1",
           _ROUND + "test_stop_tokens_anywhere_in_the_window[1]"),
    Fault("a round that is out of pages commits", "engine.commit:_counts",
          takes(info=fields(out_of_pages=jnp.zeros_like)),
          _ROUND + "test_a_slot_that_finds_no_page_ends_and_the_others_go_on[1]"),
    Fault("a slot that ended commits", "engine.commit:_counts",
          takes(slot=fields(status=_zeros)),  # `Status.RUNNING`
          _ROUND + "test_a_slot_that_ended_stays_as_it_is"),
    Fault("a draft more than was accepted is committed",
          "rules.acceptance:accept_exact", _one_more, _ROUNDS),
    Fault("the first token of a round is lost", "rules.acceptance:accept_exact",
          gives(fields(tokens=lambda x: jnp.roll(x, -1))), _ROUNDS),
    *(Fault(f"a rejected row stays, or a kept one goes: {more}",
            "engine.rows:SlotRows.truncate", _keeps(more), _ROUNDS)
      for more in (-1, 1, 1000)),
    Fault("a target's own token is drawn with the noise of the token before",
          "engine.verification:target_tokens",
          takes(verified=fields(positions=_earlier)), _STREAM + "[native-1]"),
    Fault("slots draw by the settings of the first",
          "engine.verification:target_tokens", takes(verified=fields(slots=_zeros)),
          _STREAM + "[native-3]"),
    Fault("decoding draws with the noise of another seed",
          "engine.baseline:_next_token", takes(sampling=fields(seed=_later)),
          _STREAM + "[native-1]"),
    Fault("decoding that is out of room commits a token", "engine.baseline:run_step",
          gives(lambda state: state.replace(length=jnp.where(
              state.status == int(states.Status.OUT_OF_PAGES),
              state.length + 1, state.length))),
          "engine/test_baseline.py::test_a_full_static_cache_keeps_what_is_committed"),
)  # fmt: skip

_LAW = "rules/test_laws.py::"
_POLICIES = "engine/test_policies.py::"

SCHEDULES = (
    Fault("a schedule looks past the first fall", "gamma.schedule:schedule",
          takes(stops_early=lambda stops: False),
          _LAW + "test_the_papers_example_is_exact_with_the_stop_alone[rejection]"),
    Fault("survival is that of the draft before",
          "drafters.draft_slots:SlotDraftModel.propose",
          gives(item(1, fields(survival=lambda x: x if x is None else _of_last(x)))),
          _POLICIES + "test_survival_is_the_product_of_what_was_most_probable"),
    Fault("all drafts are verified, whatever the schedule says",
          "gamma.schedule:Schedule.trim", returns("num_drafted"),
          _POLICIES + "test_a_scheduled_batch_is_as_decoded"),
    Fault("a policy is told that all drafts were kept", "engine.commit:update_policy",
          takes(info=lambda info: info.replace(outcome=info.outcome.replace(
              num_accepted=info.proposal.num_drafted))),
          _POLICIES + "test_a_policy_is_told_of_every_round_of_its_slot[goodput]"),
    Fault("a round without a kept draft lets no kept ones fade",
          "gamma.goodput:Goodput.update", _kept_as_they_are_without_one,
          "test_gamma.py::"
          "test_whatever_happens_choices_and_states_stay_in_range[goodput]"),
    Fault("a schedule is not told what a round brought", "engine.commit:settle",
          returns("slots"), _POLICIES
          + "test_slots_that_are_refilled_know_that_drafting_does_not_pay"),
    Fault("drafting costs a schedule nothing", "gamma.schedule:Schedule.settle",
          takes(state=fields(draft_s=_zeros)), "test_schedule.py::"
          "test_drafts_that_pay_are_always_made_and_again_where_they_come_to_pay"),
)  # fmt: skip

_TREES = "engine/test_trees.py::"
_BUDGET = _TREES + "test_tokens_are_those_of_decoding_at_each_budget[256-native]"
_STOPS = "test_front_door_stops.py::test_ends_are_one_however_a_text_is_written"
_SCHEDULER = "engine.scheduler:Scheduler"
_PAGES = "engine/test_scheduler.py::test_requests_wait_for_pages"

SLOTS = (
    Fault("rows are one position late", "paging.allocator:append_each",
          gives(item(3, _later)), _ROUNDS),
    Fault("rows are those of a neighbour", "paging.allocator:append_each",
          gives(lambda made: item(2, lambda x: (x + 1) % made[1].size)(made)), _ROUNDS),
    Fault("slots find the rows of a neighbour", "engine.windows:places",
          gives(item(1, lambda at: jnp.roll(at, 1, axis=0))), _ROUNDS),
    *(Fault(name, "engine.windows:over_tiles", _rows_of_the_first, test)
      for name, test in {
          "each tile is the first one again": _KV + "[xla-paged-3]",
          "later native tiles are the first one again": _BUDGET}.items()),
    Fault("a forbidden draft is proposed", "engine.processing:cut",
          returns("proposal"), "engine/test_processing.py::"
          "test_no_draft_is_proposed_in_vain[ngram-grammar-0.0-None]"),
    Fault("the token that completes a stop text is left out",
          "model.stop_texts:Ends.__call__",
          gives(lambda kept: kept and max(kept - 1, 1)), _STOPS + "[chains]"),
    Fault("nothing is held back of a stop text that has begun",
          "model.stop_texts:Search._beginning", gives(lambda text: b""),
          _STOPS + "[stream]"),
    Fault("a prompt shares a token that differs", "engine.held:Held._alike",
          lambda sound: lambda self, wanted, held: min(
              sound(self, wanted, held) + 1, len(wanted), len(held)),
          "test_samples.py::test_samples_are_those_of_decoding[native-a prefix]"),
    Fault("a head shares the pair of a token that differs", "drafters.slots:begin",
          takes(length=_later),
          "test_samples.py::test_owners_are_counted_through_a_queue[head-1]"),
    Fault("a slot that is refilled keeps its pages", "engine.admission:occupy",
          lambda sound: lambda target, drafter, params, state, slot, **how: sound(
              target, drafter, params, state, slot, **how).replace(cache=state.cache),
          _PAGES),
    Fault("pages that others will need are promised", _SCHEDULER + "._fits",
          takes(running=lambda slots: {}), _PAGES),
    Fault("what is cut behind a stop text is not counted", "engine.ends:apply",
          lambda sound: lambda state, slots, *given: item(
              1, fields(num_cut=lambda cut: slots.num_cut))(
                  sound(state, slots, *given)),
          "test_front_door_stops.py::test_what_is_decoded_in_vain"),
    Fault("a slot goes on behind a stop text", "engine.ends:_stopped",
          returns("state"), _STOPS + "[stream]"),
    Mutant("the stop text that is complete last counts", "model.stop_texts:Search.push",
           "min(ends)", "max(ends)",
           _STOPS + "[plain]"),
)  # fmt: skip

_MODEL = "drafters/test_draft_model.py::"
_MODEL_TREE = _MODEL + "test_a_tree_leaves_the_rows_of_its_text_alone[path0]"
_CHOICE = "drafters/test_choice.py::"

DRAFTERS = (
    Fault("rejected drafts stay in a slot's draft cache",
          "drafters.draft_slots:SlotDraftModel.commit", returns("memory"),
          _MODEL + "test_a_commit_of_length_one_forgets_a_slot"),
    Fault("a row of a draft model's tree stays", "engine.rows:SlotRows.truncate",
          _keeps(1), _MODEL_TREE),
    Fault("the last match is taken for the first",
          "drafters.ngram:PromptLookup.propose",
          takes(self=lambda self: dataclasses.replace(self, match="last")),
          "drafters/test_lookups.py::"
          "test_drafts_are_those_of_a_search[first-stop_ids1]"),
    Fault("a match reaches over generations", "drafters.suffix:_corpus",
          takes(tokens=lambda x: x[np.argsort(x != suffix_match.NONE, kind="stable")]),
          "drafters/test_lookups.py::test_counts_are_those_of_a_suffix_tree[1]"),
    Fault("a hybrid asks the draft model where statistics are sure",
          "drafters.hybrid:SlotHybrid.propose",
          lambda sound: lambda self, params, memory, **asked: (
              self._draft.propose(params.draft, memory, **asked)[0],
              sound(self, params, memory, **asked)[1]),
          _CHOICE + "test_the_draft_model_is_asked_only_where_statistics_are_not_sure"),
    Fault("what stands behind a text says what a choice has kept",
          "drafters.knowledge:learn", takes(length=_much),
          _CHOICE + "test_tokens_that_are_not_committed_teach_nothing"),
    Fault("a choice looks at the noise of the round",
          "drafters.choice:SlotChoice.propose",
          lambda sound: lambda *given, gamma, sampling, **text: sound(
              *given, gamma=gamma * (sampling.seed % 2).astype(jnp.int32),
              sampling=sampling, **text),
          _CHOICE + "test_no_draw_of_the_round_decides_who_drafts"),
    Fault("every prompt is taken into the first slot's memory",
          "drafters.each:Each.prefill", takes(slot=_zeros),
          "drafters/test_each.py::test_slots_have_memories_and_settings_of_their_own[3]"),
    Fault("an oracle drafts past the end of its trace",
          "drafters.oracle:Oracle.propose", takes(memory=fields(length=_much)),
          "drafters/test_each.py::test_it_proposes_the_trace"),
)  # fmt: skip

_HEADS = "drafters/test_heads.py::"
_ORACLE = _HEADS + "test_drafts_are_the_oracles"
_CHILDREN = _HEADS + "test_children_are_the_oracles"
_NATIVE = "native/test_native_children.py::"
_ONE_BY_ONE = _NATIVE + "test_slots_are_gone_over_as_one_by_one"
_TRAINING = "drafters/test_head_training.py::"
_TRANSLATED = (
    "drafters/test_translated.py::test_rounds_are_those_of_the_draft_in_the_targets_"
    "vocabulary[0.0-None]"
)

BLOCKS = (
    Fault("context goes through the norm of a block's rows",
          "model.block_draft:append_context", takes(params=lambda params:
              params.replace(hidden_norm=params.layers[0].input_norm)),
          _ORACLE + "[dflash-xla]"),
    Fault("rows of a block do not see those after them",
          "ops.row_attention:row_attention", takes(block=_nothing),
          _ORACLE + "[dspark-xla]"),
    Fault("a draft is given the ids of another tokenizer",
          "model.translated:TranslatedModel.forward_rows",
          takes(params=fields(read=_numbers)), _TRANSLATED),
    Fault("a draft's logits stay in its own order",
          "model.translated:TranslatedModel.forward_rows",
          takes(params=fields(drafted=_numbers)), _TRANSLATED),
    Fault("slots are read by the other convention", "model.block_heads:candidates",
          takes(logits=_of_last), _ORACLE + "[dflash-xla]"),
    # A slot's confidence knows the token before, and so that of the next slot its own.
    Fault("a confidence knows the token itself", "model.block_heads:survival",
          takes(confidence=_of_next), _ORACLE + "[dspark-xla]"),
    Fault("a confidence of native kernels knows the token itself",
          "model.block_heads:run_slots", gives(item(1, _of_next)),
          _ONE_BY_ONE + "[all]"),
    Fault("a recurrent head reads the hidden states of another block",
          "native.block_steps:slot_chains",
          takes(hidden=lambda x: None if x is None else x[::-1]),
          _ONE_BY_ONE + "[passed, filtered]"),
    Fault("a token is drawn from other probabilities than are stated",
          "drafters.draw:Draw.put", takes(logits=lambda x: 0.9 * x), _HEADS
          + "test_independent_draws_are_from_the_probabilities_they_state[dspark-xla]"),
    Fault("the context of a prompt is one position late",
          "drafters.features:SlotReader.prefill",
          takes(features=lambda x: jnp.roll(x, -1, axis=0)), _ORACLE + "[dspark-xla]"),
    Fault("a level of a block's tree is of the slot before",
          "drafters.tree_search:level_of", gives(_earlier), _CHILDREN + "[rnn]"),
    Fault("every row of a block's tree has the state of the root",
          "drafters.draw:grow", takes(run=_with_parents(_zeros)), _CHILDREN + "[rnn]"),
    Mutant("masks of a parallel head begin a row late",
           "drafters.peagle:SlotParallel._run_round", "columns < waiting",
           "columns <= waiting", _ORACLE + "[peagle-xla]"),
    Fault("pairs of a parallel head go with their own tokens",
          "drafters.peagle:SlotParallel._run_round", takes(tokens=_of_last),
          _ORACLE + "[peagle-xla]"),
    Fault("a convolution sees the block before", "model.block_draft:_around",
          takes(own=_later), _ORACLE + "[dflash2-xla]"),
    *(Fault(name, "model.sequence:attend_blocks",
            takes(is_context=lambda sees: sees | jnp.roll(sees, 1, axis=-1)),
            _TRAINING + f"test_training_computes_what_is_drafted[{kind}]")
      for name, kind in {
          "in training a mask sees the pair after its anchor": "peagle",
          "in training a block sees its anchor's feature": "dspark"}.items()),
    Mutant("confidence trains the drafts that it judges", "training.block:loss",
           "jax.lax.stop_gradient(1.0 - l1 / 2)", "1.0 - l1 / 2",
           _TRAINING + "test_what_a_term_trains"),
)  # fmt: skip

_TREE_ROUNDS = _TREES + "test_tokens_and_kv_are_those_of_decoding[native-paged-1-deep]"

TREES = (
    Mutant("a child of another node is kept", "rules.tree_acceptance:walk",
           "is_real & (parents == at) & goes_on", "is_real & goes_on", _TREE_ROUNDS),
    Fault("a path goes on past the limit", "rules.tree_acceptance:walk",
          takes(wanted=_much), _TREES + "test_max_tokens_is_met_exactly[1]"),
    Fault("the K/V of a path are moved one position early", "ops.page_move:page_move",
          takes(targets=_earlier), _TREE_ROUNDS),
    Fault("rows see those nodes alone that are in their own tile", "tree:layout",
          _without_far_nodes, _BUDGET),
    Fault("nodes are positions", "tree:layout",
          gives(lambda made: (made[1][:, -1], made[1])), _TREE_ROUNDS),
    Fault("a slot's nodes have no pages of their own", _SCHEDULER + "._pages",
          gives(_earlier), _TREES + "test_a_small_pool_is_shared"),
    Fault("ranks are counted by depth", "engine.commit:_kept_ranks",
          takes(info=fields(outcome=fields(path=_nothing))),
          _TREES + "test_counters_by_depth_and_rank"),
    Mutant("a child's score is its own alone", "drafters.tree_search:_expand_level",
           "_at(search.score, search.frontier)[:, :, None] + own", "own",
           "drafters/test_tree_search.py::test_nodes_are_those_of_eagle[6]"),
)  # fmt: skip

_PAIRS = _ORACLE + "[eagle3-native]"

SHOWN = (
    Fault("entries of a tree's rows are moved from the row before",
          "debug.recorder:Recorder.keep_path", _its_entries_from_the_row_before,
          _TREES + "test_what_was_recorded_is_what_decoding_saw"),
    Fault("a feature is handed out one position early", "engine.round:_features",
          takes(verified=fields(at=_of_last)),
          _TREES + "test_features_are_those_of_decoding[chain]"),
    Fault("features of rejected rows are handed out", "engine.round:_features",
          takes(outcome=fields(path=_nothing)),
          _TREES + "test_features_are_those_of_decoding[tree]"),
    Fault("a feature is read one position late",
          "drafters.feature_ring:FeatureRing.read", takes(start=_later), _PAIRS),
    Fault("features are those of the next layer", "model.decoder:forward_rows",
          takes(taps=lambda taps: tuple(tap + 1 for tap in taps)),
          _TREES + "test_rows_have_the_features_of_the_sequence[xla]"),
)  # fmt: skip

_XLAS = _NATIVE + "test_children_are_those_of_xla[warm-all]"

HEADS = (
    Fault("a head's normed feature comes before its normed token",
          "model.qwen3:run_layer", takes(residual=fields(normed=lambda x:
              jnp.roll(x, x.shape[1] // 2, axis=1))),
          "model/test_head_files.py::test_parity_with_float64[speculators eagle3-xla]"),
    Fault("rows of a head's chain are turned one position further",
          "model.decoder:chain_angles", takes(starts=_later), _PAIRS),
    Fault("a pair has the token of its feature's position",
          "drafters.slots:take_in", takes(ahead=_earlier), _PAIRS),
    Fault("a row of a tree has the hidden state of its own column",
          "drafters.draw:grow", takes(run=_with_parents(
              lambda x: jnp.broadcast_to(_numbers(x[0]), x.shape))),
          _CHILDREN + "[eagle3]"),
    Fault("offsets of a draft vocabulary are added twice", "model.head_files:_read_hot",
          gives(lambda hot: hot if hot is None else 2 * hot - _numbers(hot)),
          "model/test_head_files.py::test_saved_and_loaded_is_the_same[midlayer]"),
    Fault("drafts of a native call are drawn with the noise of the next position",
          "drafters.draw:Draw.native",
          gives(lambda it: it and it._replace(positions=it.positions + 1)), _XLAS),
    Fault("children of a native call are drawn with the noise of the level before",
          "native.children:children", takes(numbers=_earlier), _XLAS),
    Fault("drafted tokens are named twice", "drafters.tree_search:children",
          takes(hot=lambda hot: hot if hot is None else hot[hot]),
          "drafters/test_tree_search.py::"
          "test_a_vocabulary_of_its_own_drafts_the_same[3x4:15@0.5]"),
)  # fmt: skip

MUTANTS = (
    *ROUNDS,
    *SCHEDULES,
    *SLOTS,
    *DRAFTERS,
    *BLOCKS,
    *TREES,
    *SHOWN,
    *HEADS,
)
