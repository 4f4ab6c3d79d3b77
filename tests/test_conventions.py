"""Conventions: hand-computed numbers, and counters that come back as they were."""

import dataclasses

import hypothesis
import pytest
import test_metrics
from hypothesis import strategies as st

from spec_jax.analysis import conventions, metrics


# Four rounds that drafted 3, 3, 3 and 1 tokens and kept 3, 0, 1 and 1 of them; the
# last round committed two tokens, of which the limit cut one off.
HAND = test_metrics.HAND
# Two full windows of 2 that kept 2 and 0; nothing was cut.
FULL = test_metrics.simulate([(2, 2), (2, 0)], 2, 0)
SILENT = test_metrics.simulate([(0, 0), (2, 1)], 2, 0)
"""A round that drafted nothing, and a full one."""

PROPERTY = hypothesis.settings(deadline=None, max_examples=40)


@st.composite
def full_windows(draw):
    """Counters of rounds that all drafted `gamma_max`; the last one may be cut."""
    gamma = draw(st.integers(1, 5))
    kept = draw(st.lists(st.integers(0, gamma), min_size=1, max_size=12))
    cut = draw(st.integers(0, kept[-1]))
    return test_metrics.simulate([(gamma, n) for n in kept], gamma, cut)


def test_vllm_by_hand():
    vllm = conventions.to_vllm(HAND)
    assert vllm == conventions.Vllm(
        num_spec_tokens=3,
        num_drafts=4,
        num_draft_tokens=10,
        num_accepted_tokens=5,
        num_accepted_tokens_per_pos=(3, 1, 1),
    )
    assert vllm.mean_acceptance_length == 1 + 5 / 4
    assert vllm.draft_acceptance_rate == 0.5
    # Marginal, where ours is conditional: 3/4, 1/2, 1/1.
    assert vllm.acceptance_rate_per_position == [0.75, 0.25, 0.25]


def test_vllm_leaves_out_rounds_that_drafted_nothing():
    """Fails if `rounds` is taken for `num_drafts`."""
    vllm = conventions.to_vllm(SILENT)
    assert (SILENT.rounds, vllm.num_drafts) == (2, 1)
    assert vllm.mean_acceptance_length == 2.0
    assert (SILENT.accepted + SILENT.rounds) / SILENT.rounds == 1.5
    assert conventions.from_vllm(vllm, rounds=2, tokens=3) == SILENT
    # Negative control: with the drafts for rounds, other counters come back.
    assert conventions.from_vllm(vllm, rounds=1, tokens=2) != SILENT


def test_sglang_by_hand():
    sglang = conventions.to_sglang(HAND)
    assert sglang.spec_accept_length == 8 / 4  # after the cut
    assert sglang.spec_accept_rate == 5 / 12  # of four full windows
    assert sglang.scheduler_accept_rate == (5 + 4) / (12 + 4)
    assert sglang.spec_correct_drafts_histogram == (1, 2, 0, 1)
    # SGLang samples the first token in prefill, and ends its histogram early.
    own = conventions.Sglang(
        spec_verify_ct=2,
        completion_tokens=4,
        spec_num_correct_drafts=1,
        spec_num_proposed_drafts=4,
        spec_correct_drafts_histogram=(1, 1),
    )
    assert conventions.from_sglang(
        own, gamma_max=2, proposed=4, prefill_tokens=1
    ) == test_metrics.simulate([(2, 1), (2, 0)], 2, 0)


def test_spec_bench_by_hand():
    lengths = conventions.to_spec_bench(HAND)
    assert lengths == (1, 2, 2, 4)
    assert conventions.mean_accepted_tokens(lengths) == 9 / 4
    assert conventions.mean_accepted_tokens(()) is None


def test_eagle_by_hand():
    eagle = conventions.to_eagle(FULL)
    assert eagle == conventions.Eagle(alpha=(1, 1), alpha_num=(2, 1))
    assert eagle.n_alpha == [0.5, 1.0]
    assert eagle.tau == 2.0
    # The short window of HAND was kept whole, and counts as rejected behind its end.
    assert conventions.to_eagle(HAND).n_alpha == [3 / 4, 1 / 3, 1 / 1]
    assert test_metrics.summarise(HAND)["conditional_acceptance"] == [0.75, 0.5, 1.0]


def test_hugging_face_by_hand():
    assert conventions.hugging_face_matches(HAND) == 4  # the cut took one of five
    rounds = [(3, 3), (3, 0), (3, 1), (1, 1)]
    whole = conventions.from_hugging_face(rounds, gamma_max=3)
    assert whole == dataclasses.replace(HAND, tokens=9, cut=0, kept_by_rank=())
    # With the cut round as the library reports it, the kept draft behind it is lost.
    cut = conventions.from_hugging_face([*rounds[:3], (1, 0)], gamma_max=3)
    assert (cut.tokens, cut.accepted, cut.cut) == (8, 4, 0)
    # Counted before the cut, nothing is.
    known = conventions.from_hugging_face(rounds, gamma_max=3, tokens=8)
    assert known == dataclasses.replace(HAND, kept_by_rank=())


@PROPERTY
@hypothesis.given(counters=full_windows())
def test_full_windows_come_back_from_every_convention(counters):
    gamma = len(counters.accepted_at)
    known = dict(proposed=counters.proposed, tokens=counters.tokens)
    vllm = conventions.to_vllm(counters)
    sglang = conventions.to_sglang(counters)
    lengths = conventions.to_spec_bench(counters)
    eagle = conventions.to_eagle(counters)
    back = [
        conventions.from_vllm(vllm, rounds=counters.rounds, tokens=counters.tokens),
        conventions.from_sglang(
            sglang, gamma_max=gamma, proposed=counters.proposed, prefill_tokens=0
        ),
        conventions.from_spec_bench(lengths[::-1], gamma_max=gamma, **known),
        conventions.from_eagle(eagle, **known),
    ]
    assert back == [counters] * 4
    # All but the token count of SGLang, which is after the cut, are one length.
    ours = test_metrics.summarise(counters)
    assert vllm.mean_acceptance_length == pytest.approx(ours["mean_accepted_length"])
    assert conventions.mean_accepted_tokens(lengths) == ours["mean_accepted_length"]
    assert eagle.tau == ours["mean_accepted_length"]
    assert sglang.spec_accept_length == ours["tokens_per_target_step"]
    assert eagle.n_alpha == ours["conditional_acceptance"]
    assert sglang.spec_accept_rate == vllm.draft_acceptance_rate
    assert sglang.spec_accept_rate == ours["acceptance_rate"]


@PROPERTY
@hypothesis.given(rounds=test_metrics.ROUNDS, gamma_max=st.integers(7, 9))
def test_windows_of_any_length(rounds, gamma_max):
    counters = test_metrics.simulate(rounds, gamma_max, 0)
    assert conventions.from_hugging_face(rounds, gamma_max=gamma_max) == counters
    assert conventions.hugging_face_matches(counters) == counters.accepted
    vllm = conventions.to_vllm(counters)
    assert vllm.num_drafts == sum(drafted > 0 for drafted, _ in rounds)
    if counters.proposed != vllm.num_drafts * gamma_max:
        with pytest.raises(ValueError, match="which positions the shorter ones"):
            conventions.from_vllm(vllm, rounds=len(rounds), tokens=counters.tokens)


def test_marginal_rates_are_products_of_conditional_ones():
    """Fails if vLLM's rates are taken for conditional ones, or the reverse."""
    counters = test_metrics.simulate([(3, n) for n in (3, 3, 1, 0, 2)], 3, 0)
    marginal = conventions.to_vllm(counters).acceptance_rate_per_position
    conditional = test_metrics.summarise(counters)["conditional_acceptance"]
    assert marginal == pytest.approx(
        [conditional[0], conditional[0] * conditional[1], 2 / 5]
    )
    assert marginal[1:] != conditional[1:]


def test_nothing_counted_is_none():
    nothing = metrics.Counters()
    assert conventions.to_vllm(nothing).mean_acceptance_length is None
    assert conventions.to_vllm(nothing).draft_acceptance_rate is None
    assert conventions.to_sglang(nothing).spec_accept_length is None
    assert conventions.to_sglang(nothing).scheduler_accept_rate is None
    assert conventions.to_spec_bench(nothing) == ()
    with pytest.raises(ValueError, match="no drafted position.*gamma_max must be 1"):
        conventions.to_eagle(nothing)


@pytest.mark.parametrize(
    "convert",
    [
        conventions.to_vllm,
        conventions.to_sglang,
        conventions.to_spec_bench,
        conventions.to_eagle,
        conventions.hugging_face_matches,
    ],
)
def test_contradicting_counters_are_not_converted(convert):
    with pytest.raises(metrics.IdentityError):
        convert(dataclasses.replace(HAND, tokens=7))


VLLM, SGLANG = conventions.to_vllm(FULL), conventions.to_sglang(FULL)
EAGLE = conventions.to_eagle(FULL)


HALF = dataclasses.replace(SGLANG, spec_num_correct_drafts=1)
OF_SGLANG = {"gamma_max": 2, "proposed": 4, "prefill_tokens": 0}
REFUSED = (
    ("vllm", [conventions.to_vllm(HAND)], {"rounds": 4, "tokens": 8},
     "10 drafted tokens are not 4 full windows of 3: which positions"),
    ("vllm", [VLLM], {"rounds": 2, "tokens": 9},
     "contradict each other: .*0 <= every counter"),
    ("sglang", [SGLANG], OF_SGLANG | {"proposed": 3},
     "3 drafted tokens are not 2 full windows of 2"),
    ("sglang", [SGLANG], OF_SGLANG | {"gamma_max": 1, "proposed": 2},
     r"\(2, 2, 2\), and by the histogram .*gamma_max=1 they are \(2, 2, 4\)"),
    ("sglang", [HALF], OF_SGLANG,
     r"\(2, 1, 4\), and by the histogram .* they are \(2, 2, 4\)"),
    ("spec_bench", [(1, 4)], {"gamma_max": 2, "proposed": 4, "tokens": 5},
     "holds 4: with gamma_max=2 a round commits 1 to 3 tokens"),
    ("spec_bench", [(1, 3)], {"gamma_max": 2, "proposed": 3, "tokens": 4},
     "not 2 full windows of 2"),
    ("eagle", [dataclasses.replace(EAGLE, alpha_num=(2, 2))],
     {"proposed": 4, "tokens": 4}, r"alpha_num=\(2, 2\) must count"),
    ("eagle", [conventions.Eagle(alpha=(), alpha_num=())],
     {"proposed": 0, "tokens": 0}, "must count at each position"),
    ("hugging_face", [[(5, 3)]], {"gamma_max": 4},
     "drafted 5 tokens and matched 3, with gamma_max=4"),
    ("hugging_face", [[(3, 3)]], {"gamma_max": 3, "tokens": 5},
     "the numbers contradict each other"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "given", "known", "message"), REFUSED)
def test_what_cannot_come_back_is_named(name, given, known, message):
    with pytest.raises(ValueError, match=message):
        getattr(conventions, f"from_{name}")(*given, **known)
