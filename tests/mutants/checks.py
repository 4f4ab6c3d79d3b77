"""The checks of the ordinary suite that mutants must not survive: its own tests.

A check calls a test function with one of the function's own parametrisations. Nothing
is checked here that the suite does not check.
"""

import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import batch_checks
import numpy as np
import pytest

from spec_jax import session
from spec_jax.batch import queue
from spec_jax.native import build
from spec_jax.ops import dispatch
from spec_jax.paging import allocator, cache


TESTS = pathlib.Path(__file__).parents[1]
FOLDERS = (".", "drafters", "model", "ops", "paging", "native", "pallas", "batch")
# As pytest does it when it collects them.
sys.path += [
    str(TESTS / folder) for folder in FOLDERS if str(TESTS / folder) not in sys.path
]

import decoding  # noqa: E402
import paged_walk  # noqa: E402
import test_allocator  # noqa: E402
import test_cache  # noqa: E402
import test_rows  # noqa: E402


REPORTERS = frozenset(
    reporter.__code__
    for reporter in (
        *(allocator.check, cache.check_integrity, queue._check_pages),
        *(session.check_state, session.check_refused),
        *(session.check_finite, session._check_text),
    )
)
"""Functions whose errors say what is wrong; other errors than theirs are crashes."""


def _isa() -> str:
    """The widest instruction set; skips where no kernel can be built."""
    try:
        return build.load()
    except build.BuildError as error:
        pytest.skip(str(error))


FIXTURES: dict[str, Callable[..., Any]] = {
    "isa": _isa,
    "model": lambda name: test_rows.make_model(*name.split("-")),
    "plain": lambda: decoding.plain(),
    "rng": lambda: np.random.default_rng(0),
    "sound": lambda: test_cache.make_cache(),
    "state": lambda: test_allocator.filled(9, 0),
}
"""What the suite's fixtures give; anew for each call, so that it has the fault too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One test of the suite, with one of its own sets of arguments.

    Attributes:
      arguments: of the function; fixtures that take none are filled in.
    """

    module: str
    test: str
    arguments: Mapping[str, Any]

    @property
    def function(self) -> Callable[..., None]:
        return getattr(importlib.import_module(self.module), self.test)

    @property
    def name(self) -> str:
        """As pytest names it, with the arguments for their identifiers."""
        chosen = "-".join(str(value) for value in self.arguments.values())
        return f"{self.module}.py::{self.test}" + (f"[{chosen}]" if chosen else "")

    def run(self) -> None:
        """Runs the test. Raises whatever it raises."""
        with _suite_at_its_quickest():
            arguments = dict(self.arguments)
            for name in inspect.signature(self.function).parameters:
                if name in FIXTURES:
                    given = (arguments[name],) if name in arguments else ()
                    arguments[name] = FIXTURES[name](*given)
            self.function(**arguments)

    def failure(self) -> BaseException | None:
        """How the test fails; None where it passes.

        Raises:
          Exception: the test did not fail but crashed, which tells nothing.
        """
        try:
            self.run()
        except (Exception, pytest.fail.Exception) as error:
            if not is_verdict(error):
                raise
            return error
        return None


def is_verdict(error: BaseException) -> bool:
    """Whether an error says that something is wrong, or just that something broke.

    An assertion outside of the libraries does, `pytest.raises` does where nothing was
    raised, and so do the functions of the package that report what they found.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if isinstance(error, (AssertionError, pytest.fail.Exception)):
        return frame.f_globals["__name__"].partition(".")[0] not in ("jax", "jaxlib")
    return frame.f_code in REPORTERS


@contextlib.contextmanager
def _suite_at_its_quickest() -> Iterator[None]:
    """The tiny model on native kernels, where they can be had: compiled in a third.

    What the suite counts over all of its tests is counted apart.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_walk, "TRACES", type(paged_walk.TRACES)())
        try:
            dispatch.resolve("native")
        except NotImplementedError:
            yield
            return
        patch.setattr(decoding, "TARGET", decoding.NATIVE)
        for function in (
            decoding.plain,
            decoding.begin_scripted,
            decoding.begin_drafted,
            decoding.generate,
        ):
            patch.setitem(function.__kwdefaults__, "target", decoding.NATIVE)
        yield


def _check(module: str, test: str, **arguments) -> Check:
    return Check(module=module, test=test, arguments=arguments)


def _rounds(test: str, **arguments) -> Check:
    return _check("test_rounds", test, **arguments)


ROUND_CHECKS = {
    "mixed drafts": _rounds("test_tokens_and_kv_are_those_of_plain_decoding", run=2),
    "right drafts": _rounds(
        "test_tokens_and_kv_are_those_of_plain_decoding", run=10_000
    ),
    "draft rollback": _check(
        "test_draft_rollback", "test_a_rejected_draft_leaves_nothing_behind"
    ),
    "perfect draft": _check(
        "test_draft_rollback", "test_the_target_as_its_own_draft_is_always_right"
    ),
    "stop tokens": _rounds("test_stop_tokens_anywhere_in_the_window"),
    "limit": _rounds("test_max_tokens_is_met_exactly"),
    "out of pages": _rounds("test_out_of_pages_keeps_what_is_committed"),
    "replay": _check("test_replay", "test_replay_follows_the_given_text"),
    "padding as stop": _check("test_round_records", "test_padding_is_no_stop_token"),
    "starved counters": _check(
        "test_round_records", "test_a_starved_round_is_not_counted"
    ),
    "promises that are broken": _check(
        "test_proposals",
        "test_no_proposal_makes_the_output_wrong",
        impl="native",
        rule="sample-path",
        has_probs=False,
    ),
    "drafts outside the vocabulary": _check(
        "test_acceptance_edges",
        "test_a_draft_outside_the_vocabulary_is_never_kept",
        rule="rejection",
        token=4,
    ),
    "logits that are not finite": _check(
        "test_nonfinite",
        "test_each_token_from_such_logits_is_counted",
        impl="native",
    ),
    "what a policy is told": _check(
        "test_adaptive_rounds",
        "test_the_policy_is_told_of_every_round",
        name="goodput",
    ),
    "what a starved round teaches": _check(
        "test_adaptive_rounds", "test_a_starved_round_teaches_nothing"
    ),
    "origins": _check(
        "test_round_records", "test_origins_say_where_tokens_came_from", gamma=2
    ),
    "refusals": _check(
        "test_round_records", "test_a_refusal_of_the_drafts_cache_is_not_overlooked"
    ),
    "acceptance": _check("test_acceptance", "test_every_small_case"),
    "padding as draft": _check(
        "test_acceptance", "test_drafts_past_the_number_drafted_are_not_read"
    ),
    "longest prompt": _check("test_session", "test_the_longest_prompt_that_fits"),
    "unusable prompt": _check(
        "test_session",
        "test_unusable_prompts",
        prompt=[3, 96],
        message=r"token 96, outside \[0, 96\)",
    ),
    "pairs": _check("test_session", "test_pairs_that_do_not_fit_together"),
    "gamma": _check("test_session", "test_gamma_outside_its_range", gamma=5),
    "draws": _check("test_sampling", "test_draws_follow_the_distribution", name="none"),
    "noise of a row": _check(
        "test_sampling_noise", "test_a_draw_depends_on_its_row_and_position"
    ),
    "law of rejection": _check(
        "test_acceptance_rules",
        "test_the_law_is_the_targets",
        rule="rejection",
        kind="random",
        vocab_size=3,
        gamma=2,
    ),
    "metrics": _check("test_metrics", "test_counted_numbers_by_hand"),
    "speeds": _check("test_metrics", "test_speeds_by_hand"),
    "identities": _check(
        "test_metrics",
        "test_planted_fault_is_named",
        identity="sum(hist) == rounds",
        fault={"accepted_hist": (2, 2, 0, 1)},
    ),
}


def _allocator(test: str, **arguments) -> Check:
    return _check("test_allocator", test, **arguments)


def _refused(name: str, numbers: tuple[int, ...], message: str) -> Check:
    return _allocator(
        "test_invalid_requests_are_flagged_under_jit",
        name=name,
        numbers=numbers,
        _=message,
    )


def _out_of_pages(lengths: tuple[int, int], numbers: tuple[int, int]) -> Check:
    return _allocator(
        "test_out_of_pages_is_data", lengths=lengths, name="reserve", numbers=numbers
    )


PAGING_CHECKS = {
    "random walk": _check("test_random_walk", "test_the_fixed_walk_passes"),
    **{
        f"truncate to {new_len}": _allocator(
            "test_truncate_at_page_boundaries", new_len=new_len
        )
        for new_len in (0, 1, 4, 5)
    },
    "refused truncation": _refused(
        "truncate", (0, 10), "slot 0 to 10: its length is 9"
    ),
    "refused extension": _refused(
        "extend", (0, 13), "slot 0 from 9 to 13: it owns 12 positions"
    ),
    "refused registration": _refused("register", (0,), "slot 0 is already registered"),
    "no such slot": _allocator(
        "test_slots_that_do_not_exist", name="register", numbers=(-1,)
    ),
    "wider than the table": _check(
        "test_table_width", "test_a_table_narrower_than_the_pool_is_the_limit"
    ),
    "starved": _out_of_pages((9, 8), (1, 17)),
    "recovery": _allocator("test_a_starved_slot_recovers"),
    "broken books": _check(
        "test_cache",
        "test_broken_books_are_reported",
        fault="a free page that is owned",
    ),
    "written rows": _check("test_cache", "test_written_rows_read_back"),
    "written nowhere": _check("test_cache", "test_nothing_else_is_written"),
    "unowned positions": _check("test_cache", "test_unowned_positions_read_as_nan"),
    "pages and offsets": _check(
        "test_index", "test_pages_and_offsets_follow_the_table"
    ),
    "outside the table": _check(
        "test_index", "test_outside_the_table_is_nowhere", slot=0, position=-1
    ),
    "pages for a length": _check(
        "test_index", "test_pages_for_covers_exactly", page_size=4
    ),
    "pages for the largest length": _check(
        "test_index", "test_pages_for_does_not_overflow"
    ),
}

KERNEL_CHECKS = {
    "attention": _check("test_paged_attention", "test_page_sizes", page_size=16),
    "attention on both": _check(
        "test_native_attend", "test_the_reference_form_agrees", dtype="float32"
    ),
    "product on both": _check(
        "test_native_project", "test_the_reference_form_agrees", dtype="float32"
    ),
    "skinny product": _check(
        "test_skinny_gemm", "test_product_is_that_of_float64", dtype="float32"
    ),
    "norm": _check("test_rms_norm", "test_rows_are_normalised", dtype="float32"),
    "roundings of the norm": _check(
        "test_rms_norm", "test_the_weight_meets_the_rounded_value"
    ),
    "gate": _check("test_swiglu", "test_gate_times_up", dtype="float32"),
    "rotation": _check(
        "test_rope", "test_heads_are_rotated", dtype="float32", scale=1.0
    ),
    "NaN in values": _check(
        "test_nan_in_values",
        "test_nan_spoils_who_sees_it",
        position=3,
        name="v_pages",
    ),
    "argmax of NaN": _check("test_argmax", "test_the_first_nan_wins", impl="xla"),
    "argmax of equals": _check(
        "test_argmax", "test_the_first_of_equals_wins", impl="xla"
    ),
    "row contract, xla": _check(
        "test_rows",
        "test_head_sizes_and_groups",
        impl="xla",
        head_dim=64,
        num_heads=2,
        num_kv_heads=2,
    ),
    "row contract, native": _check(
        "test_rows",
        "test_verifying_equals_decoding_one_by_one",
        model="float32-native",
    ),
    "rows that do not follow": _check(
        "test_row_model", "test_rows_that_do_not_follow_are_refused"
    ),
    "native product": _check(
        "test_native_project",
        "test_products_are_those_of_float64",
        dtype="float32",
        K=33,
        N=13,
    ),
    "native gate": _check(
        "test_native_gate", "test_a_row_is_that_row_alone", dtype="float32", K=7, F=5
    ),
    "native attention": _check(
        "test_native_attend",
        "test_a_row_is_that_row_alone_and_float64s",
        dtype="float32",
        heads=(16, 1, 64),
        page_size=8,
    ),
    "native reach": _check(
        "test_native_attend", "test_every_reach_and_page_size", position=7
    ),
    "native argmax of NaN": _check(
        "test_native_argmax", "test_the_first_nan_wins", size=7, value=np.nan
    ),
    "native argmax of live rows": _check(
        "test_native_argmax", "test_dead_rows_are_zero_and_unread"
    ),
    "native rows of a table": _check(
        "test_native_take_rows", "test_rows_are_the_tables", dtype="float32", width=7
    ),
    "native step": _check(
        "test_native_step", "test_a_step_is_its_operations", dtype="float32", live=6
    ),
    "rows of a Triton product": _check(
        "test_pallas_skinny_gemm", "test_a_row_is_that_row_alone", name="logits"
    ),
    "splits of a Triton product": _check(
        "test_pallas_skinny_gemm", "test_splits_are_added_in_their_order"
    ),
    "special values in a Triton argmax": _check(
        "test_pallas_argmax", "test_special_values"
    ),
    "width of a Triton argmax": _check(
        "test_pallas_argmax", "test_the_largest_is_found", width=5
    ),
}

BATCH_CHECKS = {
    name: _check(module, test, **arguments)
    for name, (module, test, arguments) in batch_checks.TESTS.items()
}

CHECKS: dict[str, Check] = {
    **ROUND_CHECKS,
    **PAGING_CHECKS,
    **KERNEL_CHECKS,
    **BATCH_CHECKS,
}
