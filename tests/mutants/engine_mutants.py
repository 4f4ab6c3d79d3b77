"""Faults of the engine: rounds, slots, the scheduler, decoding, the drafters."""

import jax.numpy as jnp
from mutant import Fault, Mutant, takes


_COMMIT = "engine.commit:commit_slot"
_STREAM = "engine/test_sampled.py::test_the_stream_is_that_of_decoding"
_ROUNDS = (
    "engine/test_round.py::test_tokens_and_kv_are_those_of_decoding[native-static-3]"
)

ROUNDS = (
    Fault("a window runs past the limit", "engine.round:_gamma",
          takes(slots=lambda slots: slots.replace(limit=slots.limit + 1)),
          "engine/test_round.py::test_max_tokens_is_met_exactly[1]"),
    Mutant("a stop token is ignored inside a window", _COMMIT,
           "jnp.argmax(is_stop) + 1", "outcome.num_accepted + 1",
           "engine/test_round.py::test_stop_tokens_anywhere_in_the_window[1]"),
    Mutant("a round that is out of pages commits a token", _COMMIT,
           "jnp.where(counts, num_kept, 0)",
           "jnp.where(counts, num_kept, slot.running.astype(jnp.int32))",
           "engine/test_round.py::"
           "test_a_slot_that_finds_no_page_ends_and_the_others_go_on[1]"),
    Mutant("a draft more than was accepted is committed",
           "rules.acceptance:accept_exact",
           "kept = jnp.arange(gamma + 1, dtype=jnp.int32) <= num_accepted",
           "num_accepted = jnp.minimum(num_accepted + 1, num_drafted)\n"
           "    kept = jnp.arange(gamma + 1, dtype=jnp.int32) <= num_accepted",
           _ROUNDS),
    Mutant("the first token of a round is lost", "rules.acceptance:accept_exact",
           "jnp.where(kept, target_tokens, PAD)",
           "jnp.roll(jnp.where(kept, target_tokens, PAD), -1)", _ROUNDS),
    *(Fault(f"a rejected row stays, or a kept one goes: {more}",
            "engine.rows:SlotRows.truncate",
            lambda sound, more=more: lambda self, kv, new_len, **asked: sound(
                self, kv, jnp.clip(new_len + more, 0, kv.length), **asked), _ROUNDS)
      for more in (-1, 1, 1000)),
    Mutant("a target's own token is drawn with the noise of the token before",
           "engine.verification:target_tokens", "positions=verified.positions + 1",
           "positions=verified.positions", _STREAM + "[native-1]"),
    Mutant("decoding draws with the noise of the token before",
           "engine.baseline:_next_token", "positions=position +",
           "positions=position - 1 +", _STREAM + "[native-1]"),
    Mutant("decoding that is out of room commits a token", "engine.baseline:run_step",
           "jnp.where(failed, n, n + 1)", "n + 1",
           "engine/test_baseline.py::test_a_full_static_cache_keeps_what_is_committed"),
)  # fmt: skip

_LAW = "rules/test_laws.py::"

SCHEDULES = (
    Mutant("a schedule looks past the first fall", "gamma.schedule:schedule",
           "jnp.sum(jnp.cumprod(rises))", "jnp.argmax(theta)",
           _LAW + "test_the_papers_example_is_exact_with_the_stop_alone[rejection]"),
    Mutant("survival is that of the draft before",
           "drafters.draft_slots:SlotDraftModel._step",
           "carry.known - draw.length, self.gamma_max)",
           "carry.known - draw.length + 1, self.gamma_max)",
           "engine/test_policies.py::"
           "test_survival_is_the_product_of_what_was_most_probable"),
    Mutant("all drafts are verified, whatever the schedule says", "engine.round:_draft",
           "proposal.replace(num_drafted=num_drafted)", "proposal",
           "engine/test_policies.py::test_a_scheduled_batch_is_as_decoded"),
    Mutant("a policy is told that all drafts were kept", "engine.commit:update_policy",
           "info.outcome.num_accepted", "info.proposal.num_drafted",
           "engine/test_policies.py::"
           "test_a_policy_is_told_of_every_round_of_its_slot[goodput]"),
    Mutant("a round without a kept draft lets nothing fade",
           "gamma.goodput:Goodput.update", "fade = jnp.where(is_verified, self",
           "fade = jnp.where(is_verified & (num_accepted > 0), self", "test_gamma.py::"
           "test_whatever_happens_choices_and_states_stay_in_range[goodput]"),
    Mutant("a schedule is not told what a round brought", "engine.round:run_round",
           "commit_lib.settle(speculator.gamma_policy, slots, info)", "slots",
           "engine/test_policies.py::"
           "test_slots_that_are_refilled_know_that_drafting_does_not_pay"),
    Mutant("drafting costs a schedule nothing", "gamma.schedule:Schedule.settle",
           "step_s[num_active + num_verified] + state.draft_s[0]",
           "step_s[num_active + num_verified]", "test_schedule.py::"
           "test_drafts_that_pay_are_always_made_and_again_where_they_come_to_pay"),
)  # fmt: skip

_BUDGET = "engine/test_trees.py::test_tokens_are_those_of_decoding_at_each_budget"
_STOPS = "test_front_door_stops.py::test_ends_are_one_however_a_text_is_written"

SLOTS = (
    Mutant("rows are one position late", "engine.windows:_append",
           "positions=positions,", "positions=positions + 1,", _ROUNDS),
    Mutant("rows are those of a neighbour", "engine.windows:_append", "slots=slots,",
           "slots=(slots + 1) % B,", _ROUNDS),
    Mutant("slots find the rows of a neighbour", "engine.windows:_append",
           "rows, at", "rows, jnp.roll(at, 1, axis=0)", _ROUNDS),
    Mutant("each tile is the first one again", "engine.windows:over_tiles",
           "dynamic_slice_in_dim(values, start, tile)",
           "dynamic_slice_in_dim(values, 0 * start, tile)",
           "engine/test_round.py::test_tokens_and_kv_are_those_of_decoding[xla-paged-3]"),
    Mutant("later native tiles are the first one again", "engine.windows:over_tiles",
           "dynamic_slice_in_dim(values, start, tile)",
           "dynamic_slice_in_dim(values, start * 0, tile)", f"{_BUDGET}[256-native]"),
    Mutant("a forbidden draft is proposed", "engine.processing:cut",
           "proposal.probs is not None or", "True or",
           "engine/test_processing.py::test_no_draft_is_proposed_in_vain"
           "[ngram-grammar-0.0-None]"),
    Mutant("the token that completes a stop text is left out",
           "model.stop_texts:Ends.__call__", "return count + 1",
           "return max(count, 1)", _STOPS + "[chains]"),
    Mutant("nothing is held back of a stop text that has begun",
           "model.stop_texts:Search._beginning", "return text[at:]", 'return b""',
           _STOPS + "[stream]"),
    Mutant("a prompt shares a token that differs", "engine.held:Held._alike",
           "int(differ[0]) if", "int(differ[0]) + 1 if",
           "test_samples.py::test_samples_are_those_of_decoding[native-a prefix]"),
    Mutant("a head shares the pair of a token that differs",
           "drafters.features:SlotReader.prefill", "begun.length - self.reads_tokens",
           "begun.length",
           "test_samples.py::test_owners_are_counted_through_a_queue[head-1]"),
    Mutant("a slot that ended commits", "engine.commit:_counts",
           "slot.running & ~info.out_of_pages", "~info.out_of_pages",
           "engine/test_round.py::test_a_slot_that_ended_stays_as_it_is"),
    Mutant("slots draw by the settings of the first",
           "engine.verification:target_tokens", "leaf[verified.slots]",
           "leaf[verified.slots * 0]", _STREAM + "[native-3]"),
    Mutant("a slot that is refilled keeps its pages", "engine.admission:occupy",
           "target.truncate(state.cache, **to_target)", "state.cache",
           "engine/test_scheduler.py::test_requests_wait_for_pages"),
    Mutant("pages that others will need are promised",
           "engine.scheduler:Scheduler._fits", "held + idle + self._pages(request)",
           "idle + self._pages(request)",
           "engine/test_scheduler.py::test_requests_wait_for_pages"),
    Mutant("what is cut behind a stop text is not counted", "engine.ends:apply",
           "slots.num_cut + slots.length - length", "slots.num_cut",
           "test_front_door_stops.py::test_what_is_decoded_in_vain"),
    Mutant("a slot goes on behind a stop text", "engine.ends:apply",
           "_stopped(state, is_ended)", "state",
           _STOPS + "[stream]"),
    Mutant("the stop text that is complete last counts", "model.stop_texts:Search.push",
           "min(ends)", "max(ends)",
           _STOPS + "[plain]"),
)  # fmt: skip

DRAFTERS = (
    Mutant("rejected drafts stay in a slot's draft cache",
           "drafters.draft_slots:SlotDraftModel.commit",
           "jnp.minimum(memory.length, length - 1)", "memory.length",
           "drafters/test_draft_model.py::test_a_commit_of_length_one_forgets_a_slot"),
    Mutant("a row of a draft model's tree stays",
           "drafters.draft_slots:SlotDraftModel._grow",
           "truncate(memory, length, asked", "truncate(memory, length + 1, asked",
           "drafters/test_draft_model.py::"
           "test_a_tree_leaves_the_rows_of_its_text_alone[path0]"),
    Mutant("the last match is taken for the first",
           "drafters.ngram:PromptLookup.propose", 'self.match == "first"', "False",
           "drafters/test_lookups.py::"
           "test_drafts_are_those_of_a_search[first-stop_ids1]"),
    Mutant("a match reaches over generations", "drafters.suffix:remember",
           "[suffix_match.NONE, *generation]", "generation",
           "drafters/test_lookups.py::test_counts_are_those_of_a_suffix_tree[1]"),
    Mutant("a hybrid asks the draft model where statistics are sure",
           "drafters.hybrid:SlotHybrid.propose", "jnp.where(is_sure, 0, gamma)",
           "gamma", "drafters/test_choice.py::"
           "test_the_draft_model_is_asked_only_where_statistics_are_not_sure"),
    Mutant("what stands behind a text says what a choice has kept",
           "drafters.knowledge:learn", " & (places < since)", "",
           "drafters/test_choice.py::test_tokens_that_are_not_committed_teach_nothing"),
    Mutant("a choice looks at the noise of the round",
           "drafters.choice:SlotChoice.propose", "jnp.stack(most, axis=1)",
           "jnp.stack(most, axis=1) * (1 if sampling is None else "
           "(sampling.seed[0] % 2).astype(jnp.int32))",
           "drafters/test_choice.py::test_no_draw_of_the_round_decides_who_drafts"),
    Mutant("every prompt is taken into the first slot's memory",
           "drafters.each:Each.prefill", "_put(memory.slots, one, np.int32(slot))",
           "_put(memory.slots, one, np.int32(0))",
           "drafters/test_each.py::test_slots_have_memories_and_settings_of_their_own[3]"),
    Mutant("an oracle drafts past the end of its trace",
           "drafters.oracle:Oracle.propose",
           "jnp.clip(memory.length - length, 0, gamma)", "gamma",
           "drafters/test_each.py::test_it_proposes_the_trace"),
)  # fmt: skip

_ORACLE = "drafters/test_heads.py::test_drafts_are_the_oracles"

BLOCKS = (
    Mutant("context goes through the norm of a block's rows",
           "model.block_draft:append_context", "weight.kv, norm=params.hidden_norm",
           "weight.kv, norm=weight.input_norm",
           _ORACLE + "[dflash-xla]"),
    Mutant("rows of a block do not see those after them",
           "model.block_draft:forward_block",
           "None if sees.is_causal else config.block_size", "None",
           _ORACLE + "[dspark-xla]"),
    Mutant("a draft is given the ids of another tokenizer",
           "model.translated:TranslatedModel.forward_rows",
           "params.read.at[rows.tokens].get(mode=\"clip\")", "rows.tokens",
           "drafters/test_translated.py::test_rounds_are_those_of_the_draft_in_the_"
           "targets_vocabulary[0.0-None]"),
    Mutant("a draft's logits stay in its own order",
           "model.translated:TranslatedModel.forward_rows",
           "outputs.logits.at[:, params.drafted].get(",
           "outputs.logits.at[:, jnp.arange(params.drafted.shape[0])].get(",
           "drafters/test_translated.py::test_rounds_are_those_of_the_draft_in_the_"
           "targets_vocabulary[0.0-None]"),
    Mutant("slots are read by the other convention",
           "drafters.block:SlotBlock._go_over", "slice(head.first_slot,", "slice(0,",
           _ORACLE + "[dflash-xla]"),
    Mutant("a confidence knows the token itself", "drafters.block:SlotBlock._go_over",
           "probs, processing), (token, confidence)",
           "probs, processing), (token, correct(state, token, hidden)[2])",
           _ORACLE + "[dspark-xla]"),
    Mutant("a confidence of native kernels knows the token itself",
           "model.block_heads:run_slots", "[anchor[:, None], tokens[:, :-1]]",
           "[tokens]", "native/test_native_children.py::"
           "test_slots_are_gone_over_as_one_by_one[all]"),
    Mutant("a recurrent head reads the hidden states of another block",
           "native.block_steps:slot_chains", "(hidden, (S, places, D))",
           "(hidden[::-1], (S, places, D))", "native/test_native_children.py::"
           "test_slots_are_gone_over_as_one_by_one[passed, filtered]"),
    Mutant("a token is drawn from other probabilities than are stated",
           "drafters.block:SlotBlock._go_over", "draw.put(probs, row, number)",
           "draw.put(probs, logits[:, None] * 0.9, number)", "drafters/test_heads.py::"
           "test_independent_draws_are_from_the_probabilities_they_state[dspark-xla]"),
    Mutant("the context of a prompt is one position late",
           "drafters.features:SlotReader._prefill", "start[slot]", "start[slot] + 1",
           _ORACLE + "[dspark-xla]"),
    Mutant("a level of a block's tree is of the slot before",
           "drafters.block:SlotBlock._grow", "head.first_slot + level)",
           "head.first_slot + level - 1)",
           "drafters/test_heads.py::test_children_are_the_oracles[rnn]"),
    Mutant("every row of a block's tree has the state of the root",
           "drafters.block:SlotBlock._grow", "[:, None], above]",
           "[:, None], above * 0]",
           "drafters/test_heads.py::test_children_are_the_oracles[rnn]"),
    Mutant("masks of a parallel head begin a row late",
           "drafters.peagle:SlotParallel._run_round", "columns < waiting",
           "columns <= waiting",
           _ORACLE + "[peagle-xla]"),
    Mutant("pairs of a parallel head go with their own tokens",
           "drafters.peagle:SlotParallel._run_round", "ring.first + 1, size",
           "ring.first, size",
           _ORACLE + "[peagle-xla]"),
    Mutant("in training a mask sees the pair after its anchor",
           "model.eagle3:forward_parallel", "<= last[..., None, None]",
           "<= last[..., None, None] + 1",
           "drafters/test_head_training.py::"
           "test_training_computes_what_is_drafted[peagle]"),
    Mutant("a convolution sees the block before", "model.block_draft:_around",
           "own > 0", "own >= 0", _ORACLE + "[dflash2-xla]"),
    Mutant("in training a block sees its anchor's feature",
           "model.block_draft:forward_sequence", "places[:, None] < anchors",
           "places[:, None] <= anchors",
           "drafters/test_head_training.py::"
           "test_training_computes_what_is_drafted[dspark]"),
    Mutant("confidence trains the drafts that it judges", "training.block:loss",
           "jax.lax.stop_gradient(1.0 - l1 / 2)", "1.0 - l1 / 2",
           "drafters/test_head_training.py::test_what_a_term_trains"),
)  # fmt: skip

_TREES = "engine/test_trees.py"
_TREE_ROUNDS = (
    f"{_TREES}::test_tokens_and_kv_are_those_of_decoding[native-paged-1-deep]"
)
_COUNTERS = f"{_TREES}::test_counters_by_depth_and_rank"

TREES = (
    Mutant("a child of another node is kept", "rules.tree_acceptance:walk",
           "is_real & (parents == at) & goes_on", "is_real & goes_on", _TREE_ROUNDS),
    Mutant("a path goes on past the limit", "rules.tree_acceptance:walk",
           "jnp.minimum(wanted, depth_max)", "jnp.int32(depth_max)",
           f"{_TREES}::test_max_tokens_is_met_exactly[1]"),
    Mutant("the K/V of a path are moved one position early",
           "engine.rows:SlotRows.keep_path", "start[:, None] + steps + 1",
           "start[:, None] + steps", _TREE_ROUNDS),
    Mutant("rows see those nodes alone that are in their own tile",
           "engine.windows:_layout", "        return laid_out",
           "        positions, branch = laid_out\n"
           "        columns = jnp.arange(num_rows)[None, :, None] // 80\n"
           "        places = branch - window.start[:, None, None]\n"
           "        is_far = (places > 0) & (places // 80 < columns)\n"
           "        return positions, branch - is_far.astype(branch.dtype)",
           f"{_BUDGET}[256-native]"),
    Mutant("a slot's nodes have no pages of their own",
           "engine.scheduler:Scheduler._pages",
           "num_positions = max(num_positions, min(most, self.slot_capacity))", "pass",
           f"{_TREES}::test_a_small_pool_is_shared"),
    Mutant("nodes are positions", "tree:layout", "return start + depth,",
           "return start + above[:, 0],", _TREE_ROUNDS),
    Mutant("ranks are counted by depth", "engine.commit:_kept_ranks",
           "outcome.path - 1", "depths", _COUNTERS),
    Mutant("a child's score is its own alone", "drafters.tree_search:_expand_level",
           "_at(search.score, search.frontier)[:, :, None] + own", "own",
           "drafters/test_tree_search.py::test_nodes_are_those_of_eagle[6]"),
    Mutant("entries of a tree's rows are moved from the row before",
           "debug.recorder:Recorder.keep_path", "source = start[:, None] + path",
           "source = start[:, None] + path - 1",
           f"{_TREES}::test_what_was_recorded_is_what_decoding_saw"),
)  # fmt: skip

_PAIRS = _ORACLE + "[eagle3-native]"

FEATURES = (
    Mutant("a feature is handed out one position early", "engine.round:_features",
           "verified.at[:, : depth_max + 1]",
           "jnp.roll(verified.at, 1, axis=1)[:, : depth_max + 1]",
           "engine/test_trees.py::test_features_are_those_of_decoding[chain]"),
    Mutant("a feature is read one position late",
           "drafters.feature_ring:FeatureRing.read",
           "start[:, None] +", "start[:, None] + 1 +", _PAIRS),
    Mutant("features of rejected rows are handed out", "engine.round:_features",
           "if outcome.path is not None:", "if False:",
           "engine/test_trees.py::test_features_are_those_of_decoding[tree]"),
    Mutant("features are those of the next layer", "model.decoder:_run_operations",
           "boundaries[tap]", "boundaries[tap + 1]",
           "engine/test_trees.py::test_rows_have_the_features_of_the_sequence[xla]"),
)  # fmt: skip

HEADS = (
    Mutant("a head's normed feature comes before its normed token",
           "model.eagle3:_run_operations", "jnp.concatenate(x, axis=1)",
           "jnp.concatenate(x[::-1], axis=1)",
           "model/test_head_files.py::test_parity_with_float64"
           "[speculators eagle3-xla]"),
    Mutant("rows of a head's chain are turned one position further",
           "model.eagle3:run_chains", "starts, W + most - 1, dtype",
           "starts + 1, W + most - 1, dtype", _PAIRS),
    Mutant("drafts of a native call are drawn with the noise of the next position",
           "drafters.draw:Draw.native", "positions=self.length",
           "positions=self.length + 1",
           "native/test_native_children.py::test_children_are_those_of_xla[warm-all]"),
    Mutant("a pair has the token of its feature's position",
           "drafters.features:SlotReader._take_in", "ahead=1", "ahead=0", _PAIRS),
    Mutant("a row of a tree has the hidden state of its own column",
           "drafters.eagle3:SlotEagle3._grow",
           "jnp.take_along_axis(hidden, above[:, :, None], axis=1)",
           "jax.lax.dynamic_slice_in_dim(hidden, first, tree.width, axis=1)",
           "drafters/test_heads.py::test_children_are_the_oracles[eagle3]"),
    Mutant("offsets of a draft vocabulary are added twice",
           "model.head_files:_read_hot",
           "np.arange(Vd) + offsets", "np.arange(Vd) + 2 * offsets",
           "model/test_head_files.py::test_saved_and_loaded_is_the_same[midlayer]"),
    Mutant("children of a native call are drawn with the noise of the level before",
           "drafters.draw:Draw.children", "jnp.broadcast_to(level, (count,))",
           "jnp.broadcast_to(level - 1, (count,))",
           "native/test_native_children.py::test_children_are_those_of_xla[warm-all]"),
    Mutant("drafted tokens are named twice", "drafters.tree_search:children",
           "hot[tokens]", "hot[hot[tokens]]", "drafters/test_tree_search.py::"
           "test_a_vocabulary_of_its_own_drafts_the_same[3x4:15@0.5]"),
)  # fmt: skip

MUTANTS = (
    *ROUNDS,
    *SCHEDULES,
    *SLOTS,
    *DRAFTERS,
    *BLOCKS,
    *TREES,
    *FEATURES,
    *HEADS,
)
