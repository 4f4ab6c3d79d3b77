"""The tests that faults of batches must not survive: module, test and its arguments."""

_ROWS, _ROUNDS, _QUEUE = "test_batch_rows", "test_batch_rounds", "test_queue"
_DRAFTERS = "test_batch_drafters"

TESTS = {
    "rows of slots": (
        _ROWS,
        "test_slots_are_what_they_are_alone",
        {"kind": "native-float32"},
    ),
    "rows of several tiles": (_ROWS, "test_native_rows_of_several_tiles", {}),
    "a slot without a page": (
        _ROWS,
        "test_a_slot_without_a_page_is_not_run_and_the_others_are",
        {},
    ),
    "slots of a hybrid": (
        _ROUNDS,
        "test_each_slot_is_what_it_is_alone",
        {"name": "hybrid"},
    ),
    "policies of slots": (
        _ROUNDS,
        "test_each_slot_has_a_policy_of_its_own",
        {"adaptive": "goodput"},
    ),
    "a slot that is done": (_ROUNDS, "test_a_slot_that_is_done_stays_as_it_is", {}),
    "a slot that finds no page": (
        _ROUNDS,
        "test_a_slot_that_finds_no_page_ends_and_the_others_go_on",
        {},
    ),
    "drafts without room": (
        _DRAFTERS,
        "test_drafts_stop_where_the_cache_has_no_room",
        {},
    ),
    "a commit of length one": (
        _DRAFTERS,
        "test_a_commit_of_length_one_forgets_a_slot",
        {},
    ),
    "traces of an oracle": (
        _DRAFTERS,
        "test_traces_that_an_oracle_does_not_take",
        {},
    ),
    "more requests than slots": (
        _QUEUE,
        "test_more_requests_than_slots",
        {"name": "oracle"},
    ),
    "requests that wait": (_QUEUE, "test_requests_wait_for_pages", {}),
    "pages of all that ended": (
        _QUEUE,
        "test_pages_of_all_that_ended_are_free_again",
        {},
    ),
    "a request that never fits": (
        _QUEUE,
        "test_a_request_that_no_slot_can_ever_take",
        {},
    ),
    "a slot that starves": (_QUEUE, "test_a_slot_that_starves", {}),
    "each slot": ("test_each_slot", "test_a_fixed_walk", {"kind": "paged"}),
}
