"""NaN in keys and in values of the attention over pages: who sees it, and who not."""

import dataclasses

import numpy as np
import pytest
import test_paged_attention as attention

from spec_jax import testing


SLOT, PAGE_SIZE = 4, 16


def spoilt(case, name, position, head):
    """The case with NaN in one head of one key or value of a slot."""
    pages = getattr(case, name).copy()
    page = case.page_table[SLOT, position // PAGE_SIZE]
    pages[page, position % PAGE_SIZE, head] = np.nan
    return dataclasses.replace(case, **{name: pages})


@pytest.mark.parametrize("position", [3, 130])
@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
def test_nan_spoils_who_sees_it(name, position):
    """Fails if NaN is swallowed by a mask or a maximum, or leaks past one."""
    case = attention.make_case(page_size=PAGE_SIZE)
    clean = case.attend()
    out = spoilt(case, name, position, head=1).attend()
    mine = case.slots[: case.num_active] == SLOT
    group = attention.GROUP
    assert np.isnan(out[mine][:, group:]).all()
    testing.assert_same_bits(out[~mine], clean[~mine])
    testing.assert_same_bits(out[:, :group], clean[:, :group])


def test_nan_that_nobody_sees_spoils_nothing():
    """Negative control: behind a row's own position the result stays, bit for bit."""
    case = attention.make_case(page_size=PAGE_SIZE)
    clean = case.attend()
    last = attention.RAGGED - 1
    out = spoilt(case, "v_pages", last, head=1).attend()
    sees = (case.slots == SLOT) & (case.positions >= last)
    sees = sees[: case.num_active]
    assert sees.any() and (case.slots[: case.num_active][~sees] == SLOT).any()
    testing.assert_same_bits(out[~sees], clean[~sees])
    assert np.isnan(out[sees][:, attention.GROUP :]).all()
