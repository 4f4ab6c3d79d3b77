"""The mutants themselves: how many, where, and what counts as caught."""

import dataclasses
import inspect

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import round_mutants
import table
from mutant import Mutant, OutOfDateError

from spec_jax import acceptance
from spec_jax.paging import cache, index


ALL = [mutant for group in table.GROUPS.values() for mutant in group]

_pages_for = jax.jit(index.pages_for, static_argnames=("page_size",))

HARMLESS = Mutant(
    name="the same in other words",
    where="spec_jax.paging.index:pages_for",
    old="-(-length // page_size)",
    new="-((0 - length) // page_size)",
    caught_by=("pages for a length",),
)
FAULTY = dataclasses.replace(HARMLESS, new="length // page_size + 1")
CRASHING = dataclasses.replace(HARMLESS, new="length // page_size.nothing")


def test_there_are_enough_of_them_everywhere():
    """Fails if a part of the package has no mutant, or a fault is there twice."""
    assert len(ALL) >= 60
    assert len({mutant.name for mutant in ALL}) == len(ALL)
    assert len({(mutant.where, mutant.old, mutant.new) for mutant in ALL}) == len(ALL)
    modules = {mutant.where.partition(":")[0] for mutant in ALL}
    for part in (
        *("rounds", "acceptance", "autoregressive", "session", "metrics", "sampling"),
        *("drafters.draft_model", "paging.allocator", "paging.cache", "paging.index"),
        *("model.qwen3", "model.row_model", "native.calls"),
        *("pallas.skinny_gemm_triton", "pallas.argmax_triton"),
        *("batch.rows", "batch.rounds", "batch.draft_models", "batch.queue"),
        *("ops.paged_attention", "ops.projection", "ops.argmax", "ops.page_write"),
    ):
        assert f"spec_jax.{part}" in modules, part


def test_the_table_has_a_row_for_each_mutant_and_no_others():
    """Fails if a mutant was taken away or renamed, and its row was not."""
    written = [line.split(" | ")[0] for line in table.rows_of(table.README.read_text())]
    assert written == [f"| {mutant.name}" for mutant in ALL]


@pytest.mark.parametrize("name", checks.CHECKS)
def test_checks_are_parametrisations_of_the_suite(name):
    """Fails if a check calls a test with arguments that the suite does not give it."""
    check = checks.CHECKS[name]
    marks = getattr(check.function, "pytestmark", [])
    given = set()
    for mark in (mark for mark in marks if mark.name == "parametrize"):
        names, values = mark.args[0], mark.args[1]
        if isinstance(names, str):
            names = [each.strip() for each in names.split(",")]
        chosen = tuple(check.arguments[each] for each in names)
        rows = [tuple(v) if len(names) > 1 else (v,) for v in values]
        assert any(_is_same(chosen, each) for each in rows), (names, chosen)
        given |= set(names)
    # What is left are parameters of fixtures.
    assert set(check.arguments) - given <= set(checks.FIXTURES)
    wanted = set(inspect.signature(check.function).parameters)
    assert wanted <= given | set(checks.FIXTURES)


def _is_same(left, right) -> bool:
    """Equality for which NaN equals itself."""
    return repr(left) == repr(right)


def test_no_check_is_idle():
    """Fails if a check catches nothing any more."""
    assert {name for mutant in ALL for name in mutant.caught_by} == set(checks.CHECKS)


def test_whoever_holds_the_function_has_the_fault():
    """Fails if an executable, or a function held elsewhere, escapes the fault."""
    held, eight = index.pages_for, jnp.int32(8)
    assert int(_pages_for(eight, page_size=4)) == held(8, 4) == 2
    with FAULTY.planted():
        assert int(_pages_for(eight, page_size=4)) == held(8, 4) == 3
    assert int(_pages_for(eight, page_size=4)) == held(8, 4) == 2


def test_a_rule_that_is_compiled_by_itself_is_forgotten_too():
    """Fails if such an executable hides the fault, or is left to the next check.

    The executables of decoding may stay: negative control of the forgetting.
    """
    mutant = round_mutants.ACCEPTANCE[0]
    accept, pages = jax.jit(acceptance.accept_exact), jax.jit(index.pages_for)
    drafts = jnp.array([5, 6, 7]), jnp.array([5, 6, 8, 9]), jnp.int32(3)

    def num_accepted():
        pages(jnp.int32(8), 4)
        return int(accept(*drafts).num_accepted)

    assert num_accepted() == 2
    with mutant.planted():
        assert accept._cache_size() == 0 < pages._cache_size()
        assert num_accepted() == 0
    assert num_accepted() == 2


def test_the_fault_goes_when_the_check_crashes():
    """Fails if an exception leaves the fault in the package."""
    with pytest.raises(ZeroDivisionError), FAULTY.planted():
        _ = 1 // 0
    assert index.pages_for(8, 4) == 2


def test_a_harmless_mutant_survives():
    """Negative control: no check fails where nothing is wrong."""
    assert table.catches(HARMLESS) == {"pages for a length": None}
    assert table.row(HARMLESS, table.catches(HARMLESS)).endswith("| nothing |")


def test_a_crash_is_no_catch():
    """Negative control: an error that nobody raised to say so tells nothing."""
    with pytest.raises(AttributeError, match="nothing"):
        table.catches(CRASHING)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"where": "spec_jax.paging.index:gone"},
            "there is no spec_jax.paging.index:g",
        ),
        ({"where": "spec_jax.gone:locate"}, "there is no spec_jax.gone:locate"),
        (
            {"old": "length * page_size"},
            r"says 'length \* page_size' 0 times, not once",
        ),
        ({"old": "page_size"}, r"says 'page_size' \d+ times, not once"),
    ],
)
def test_mutants_that_are_out_of_date(changes, message):
    """Fails if a fault that can no longer be planted passes for a caught one."""
    with pytest.raises(OutOfDateError, match=message):
        table.catches(dataclasses.replace(HARMLESS, **changes))


def verdict_of(function) -> bool:
    try:
        function()
    except (Exception, pytest.fail.Exception) as error:
        return checks.is_verdict(error)
    raise RuntimeError("nothing was raised")


def broken_books():
    kv = cache.init(
        num_layers=1, num_slots=1, num_pages=1, page_size=1, pages_per_slot=1,
        num_kv_heads=1, head_dim=1, dtype="float32",
    )  # fmt: skip
    cache.check_integrity(kv.replace(num_free=jnp.int32(0)))


def nothing_raised():
    with pytest.raises(ValueError):
        acceptance.PAD.bit_length()


def test_what_is_a_verdict():
    """Fails if a crash counts as one, or a report does not."""
    assert verdict_of(lambda: np.testing.assert_array_equal(1, 2))
    assert verdict_of(broken_books)
    assert verdict_of(nothing_raised)
    assert not verdict_of(lambda: cache.init())
    assert not verdict_of(lambda: jnp.zeros((2,)) + jnp.zeros((3,)))
    assert not verdict_of(lambda: index.locate(None, 1, None, None))
