"""Parts of the exactness suite: cells, comparison over pages, prompts."""

import dataclasses

import numpy as np
import pytest

from experiments.lib import (
    exact_cells as cells_lib,
    policies,
    suite,
    suite_plan as plans,
)
from spec_jax.debug import evidence
from spec_jax.drafters import ngram


AXES = {axis: values for axis, values in plans.BRIEF.axes.items()} | {
    "impl": ("native", "xla")
}


def test_a_star_varies_one_axis_at_a_time():
    found = cells_lib.star(AXES)
    assert len(found) == len(set(found)) == 1 + sum(len(v) - 1 for v in AXES.values())
    base = found[0]
    assert all(getattr(base, axis) == values[0] for axis, values in AXES.items())
    for cell in found[1:]:
        changed = [a for a in AXES if getattr(cell, a) != getattr(base, a)]
        assert len(changed) == 1
    groups = cells_lib.by_plain(found)
    assert len(groups) == len({tuple(cell.plain.items()) for cell in found})


def test_names_of_axes_stand_for_what_the_certificate_says():
    greedy, *others = cells_lib.star(AXES)
    sampled = next(cell for cell in others if cell.sampling == "sampled")
    settings = dataclasses.asdict(sampled.settings)
    found = {name: value.item() for name, value in settings.items()}
    assert found.pop("min_p") == 0
    assert found == pytest.approx(cells_lib.CONSTANTS["sampled"])
    assert greedy.settings is None
    drafter = ngram.PromptLookup(gamma_max=3)
    fixed, by_share, by_speed = (
        dataclasses.replace(greedy, gamma_policy=name).policy(drafter)
        for name in policies.POLICIES
    )
    assert fixed.gamma_policy is None and fixed.state is None
    assert by_share.gamma_policy.ladder == (0, 1, 2, 3)
    np.testing.assert_array_equal(by_speed.state.round_s, [1, 1.25, 1.5, 1.75])
    assert cells_lib.constants_of([greedy]) == {}
    assert [*cells_lib.constants_of([sampled])] == ["sampled"]
    with pytest.raises(ValueError, match="'mood' is not one of fixed"):
        dataclasses.replace(greedy, gamma_policy="mood").policy(drafter)


def test_plain_bits_may_not_depend_on_pages():
    """Negative control of the comparison over cells."""
    axes = {axis: values[:1] for axis, values in AXES.items()} | {"page_size": (8, 64)}
    small, large = cells_lib.star(axes)
    hashes = dict.fromkeys(evidence.WHATS, "1")
    rows = [
        {"cell": cell.name, "index": number, "plain_sha256": hashes}
        for cell in (small, large)
        for number in range(3)
    ]
    assert suite.across_pages([small, large], rows) == []
    rows[4] = rows[4] | {"plain_sha256": hashes | {"kv": "0"}}
    assert suite.across_pages([small, large], rows) == [(small.bits, 1)]


def test_more_prompts_than_are_bundled():
    """Beginnings of them: as many as asked for, all different."""
    pairs = [(str(i), list(range(i, i + 24))) for i in range(10)]
    found = suite.beginnings(pairs, 35)
    assert found[:10] == pairs and len(found) == 35
    assert len({tuple(ids) for _, ids in found}) == 35
    with pytest.raises(ValueError, match="99 prompts asked for.*at most 80"):
        suite.beginnings(pairs, 99)
