"""Many samples of a prompt, and prompts that begin alike: one seed, one prefill.

Whatever slots share, each sample must be the text that decoding it alone writes, from a
cache of its own that is prefilled with the whole prompt.
"""

import dataclasses
import itertools

import decoding
import numpy as np
import page_tables
import pytest
import tiny_pair
from slow_cases import slow, slow_but

import spec_jax as sj
from spec_jax import run as run_lib, testing
from spec_jax.drafters import slots
from spec_jax.rules import settings as settings_lib


PREFIX = "import os\n\n"  # It ends within a page, as the prompts' common part does.
PROMPTS = ["def f(x):", "def g(x, y):", "x"]
DRAWN = sj.Sampling(temperature=0.9, top_k=40, seed=5)
SHORT = {"max_tokens": 9, "ignore_eos": True, "page_size": 4, "sampling": DRAWN}


@pytest.fixture(scope="module", params=["native", slow("xla")])
def lm(request, folders):
    return sj.load(folders[0], draft=folders[1], gamma_max=4, impl=request.param)


def test_seeds_of_samples():
    """Fails if two seeds are equal, or the first of all is not the given one."""
    most = settings_lib.MOST_REQUESTS - 1, settings_lib.MOST_SAMPLES - 1
    grid = [*itertools.product(range(70), range(40)), most]
    for seed in (0, 5, 2**32 - 1):
        found = [settings_lib.folded_seed(seed, *each) for each in grid]
        assert found[0] == seed and len(set(found)) == len(grid)
        assert 0 <= min(found) and max(found) < 2**32
    for request, sample in ((-1, 0), (0, -1), (most[0] + 1, 0), (0, most[1] + 1)):
        with pytest.raises(ValueError, match="give the others another seed"):
            settings_lib.folded_seed(3, request, sample)


def test_equal_prompts_of_one_seed(lm):
    """Fails if samples are equal, or one is not that of the prompt decoded alone."""
    outs = sj.generate(lm, [PROMPTS[0]] * 3, gamma=3, **SHORT)
    assert len({tuple(one.tokens) for one in outs}) == 3
    assert outs[0].provenance["seed"] == DRAWN.seed
    for one in outs:
        drawn = dataclasses.replace(DRAWN, seed=one.provenance["seed"])
        alone = sj.decode(lm, PROMPTS[0], **SHORT | {"sampling": drawn})
        assert one.tokens == alone.tokens
        assert "shared_prompt_tokens" not in one.metrics


def test_a_seed_for_each_is_that_of_its_prompt(lm):
    """Fails if the seed of a prompt depends on its place in the list."""
    each = [dataclasses.replace(DRAWN, seed=seed) for seed in (7, 5, 7)]
    runs = [
        run_lib.Run.make(lm, PROMPTS, **SHORT | {"sampling": each}, n=n)
        for n in (None, 2)
    ]
    seeds = [[int(one.sampling.seed) for one in run.requests] for run in runs]
    assert seeds[0] == [7, 5, 7]
    assert seeds[1][::2] == [7, 5, 7] and seeds[1][1] == seeds[1][5] != seeds[1][3]


CASES = {
    "more samples than slots": (PROMPTS[:1], {"n": 5, "num_slots": 3}),
    "one slot": (PROMPTS[:1], {"n": 3, "num_slots": 1}),
    "samples of prompts": (PROMPTS, {"n": 3, "num_slots": 3}),
    "a prefix": (PROMPTS, {"prefix": PREFIX, "num_slots": 3}),
    "a prefix in one slot": (PROMPTS, {"prefix": PREFIX, "num_slots": 1}),
    "samples after a prefix": (PROMPTS, {"prefix": PREFIX, "n": 2, "num_slots": 3}),
    "a tree": (PROMPTS, {"n": 2, "num_slots": 3, "gamma": sj.Tree.parse("2x2:5")}),
    "rejection": (PROMPTS, {"n": 2, "num_slots": 3, "rule": "rejection"}),
    "plain": (PROMPTS, {"n": 2, "prefix": PREFIX, "num_slots": 3, "gamma": 0}),
}

QUICK = ("samples of prompts", "a prefix", "samples after a prefix")


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_samples_are_those_of_decoding(lm, case):
    """Fails if a token or a log-probability depends on which slot a prompt's pages come
    from, if a prompt is prefilled twice, or if `score` gives other numbers."""
    prompts, settings = CASES[case]
    prefix, n = settings.get("prefix"), settings.get("n")
    how = SHORT | {"log_probs": True, "prefix": prefix}
    outs = sj.generate(lm, prompts, **{"gamma": 3} | how | settings)
    plain = sj.decode(lm, prompts, n=n, **how)
    if n:
        assert [len(each) for each in outs] == [n] * len(prompts)
        outs, plain = ([*itertools.chain(*each)] for each in (outs, plain))
    for found, expected in zip(outs, plain, strict=True):
        assert found.prompt_tokens == expected.prompt_tokens
        assert found.provenance["seed"] == expected.provenance["seed"]
        if "rule" not in settings:
            assert found.tokens == expected.tokens
            for name in ("log_probs", "drawn_log_probs"):
                testing.assert_same_bits(getattr(found, name), getattr(expected, name))
    assert len({tuple(one.tokens) for one in outs}) == len(outs)
    least = len(lm.tokenizer.encode(prefix)) if prefix else 0
    for number, one in enumerate(outs):
        shared = one.metrics["shared_prompt_tokens"]
        if number % (n or 1):
            assert shared == len(one.prompt_tokens) - 1
        else:
            assert shared >= least if number else shared == 0
    if prefix and not n:
        texts = [one.tokens for one in outs]
        scored = sj.score(lm, prompts, texts, sampling=DRAWN, prefix=prefix)
        for one, other in zip(scored, outs, strict=True):
            testing.assert_same_bits(one.drawn_log_probs, other.drawn_log_probs)


@pytest.mark.slow
def test_keys_and_values_are_those_of_decoding(lm):
    """Compares K/V of all layers, read through the table, and hashes of all logits."""
    settings = SHORT | {"gamma": 3, "prefix": PREFIX}
    assert sj.check_lossless(lm, PROMPTS, n=2, **settings)


DRAFTERS = {
    "draft model": {},
    "head": {"drafter": "eagle3", "draft": tiny_pair.write_head},
    "block": {"drafter": "dspark", "draft": tiny_pair.WRITE_HEAD["dspark"]},
    "hybrid": {"drafter": "hybrid"},
    "tree": {"gamma": sj.Tree.parse("2x2:3")},
}
DRAFTERS["tree of a head"] = DRAFTERS["head"] | DRAFTERS["tree"]


def through_a_queue(folders, folder, kind, num_slots, *, shares) -> list:
    """Runs nine requests; returns of each, in order, how much of its prompt is shared,
    and its tokens, rounds, and K/V: of its text in the target, of its prompt in the
    drafter."""
    how = {"gamma": 3, "draft": folders[1]} | DRAFTERS[kind]
    if callable(how["draft"]):
        how["draft"] = how["draft"](folder, folders[0])
    settings = {"prefix": PREFIX, "n": 3, "gamma": how.pop("gamma"), **SHORT}
    lm = sj.load(folders[0], gamma_max=3, impl="native", **how)
    run = run_lib.Run.make(lm, PROMPTS, num_slots=num_slots, **settings)

    def keep(state, slot):
        length = int(state.slots.length[slot])
        drafts = getattr(state.memory, "kv", state.memory)
        most = length - SHORT["max_tokens"] - 2  # The next pair holds a drawn token.
        found = [state.slots.num_rounds[slot]]
        for kv, count in ((state.cache, length - 1), (drafts, most)):
            page_tables.check_integrity(kv)
            found += decoding.held(kv, count, slot=slot)
        return found

    scheduler = dataclasses.replace(run.scheduler, shares=shares)
    found = sorted(scheduler.run(run.requests, keep=keep), key=lambda one: one.number)
    return [one.shared for one in found], [(one.tokens, one.kept) for one in found]


def begins(monkeypatch) -> list[int]:
    """Returns a list of the numbers of positions that drafters' slots begin with."""
    given, real = [], slots.begin

    def begin(rows, kv, begun, *, slot, length):
        given.append(length)
        return real(rows, kv, begun, slot=slot, length=length)

    monkeypatch.setattr(slots, "begin", begin)
    return given


@pytest.mark.parametrize(
    ("kind", "num_slots"), slow_but([*itertools.product(DRAFTERS, (1, 3))], ("head", 1))
)
def test_owners_are_counted_through_a_queue(
    folders, tmp_path, kind, num_slots, monkeypatch
):
    """Fails if a page is lost, freed early or left without an owner while slots are
    refilled, or if K/V of a sample, in the target or in a drafter, differ from those
    that it has where slots share nothing."""
    given = begins(monkeypatch)
    arguments = folders, tmp_path, kind, num_slots
    shared, found = through_a_queue(*arguments, shares=True)
    assert shared[0] == 0 and all(shared[1:])
    of_pairs = DRAFTERS[kind].get("drafter") == "eagle3"
    assert sorted(given) == sorted(length - of_pairs for length in shared[1:])
    none, expected = through_a_queue(*arguments, shares=False)
    assert len(given) == len(shared) - 1 and not any(none)
    testing.assert_same_bits(found, expected)


@pytest.mark.slow
def test_a_static_cache_shares_nothing(folders):
    """Checks that it prefills every prompt, and writes the same tokens."""
    found, settings = [], SHORT | {"prefix": PREFIX, "gamma": 3}
    for kind in ("static", "paged"):
        lm = sj.load(folders[0], draft=folders[1], impl="native", cache=kind)
        found.append(sj.generate(lm, PROMPTS, **settings))
    assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]
    assert all("shared_prompt_tokens" not in one.metrics for one in found[0])


def test_prefixes(folders):
    """Fails if the ids are not the prefix and then the prompt, of whatever kind."""
    lm = sj.load(folders[0], drafter="ngram")
    ids = lm.tokenizer.encode(PREFIX)
    whole = [*ids, *lm.tokenizer.encode("x")]
    for prefix, prompt in (
        (PREFIX, "x"),
        (ids, "x"),
        (np.array(ids), whole[len(ids) :]),
    ):
        run = run_lib.Run.make(lm, prompt, prefix=prefix)
        assert run.requests[0].prompt == whole and run.scheduler.prefill_by_rows
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer = dataclasses.replace(lm.tokenizer, chat_template=template)
    chats = dataclasses.replace(lm, tokenizer=tokenizer)
    first = [{"role": "system", "content": "be brief"}]
    asked = [{"role": "user", "content": "hi"}]
    run = run_lib.Run.make(chats, asked, prefix=first)
    assert run.requests[0].prompt == lm.tokenizer.encode("be brief;hi;")


def test_pages_of_all_slots_are_not_bounded(lm):
    run = run_lib.Run.make(lm, PROMPTS, n=2, **SHORT)
    with pytest.raises(ValueError, match="num_pages=99 of slots that share pages"):
        dataclasses.replace(run.scheduler, num_pages=99)
    target = dataclasses.replace(lm.target, cache="static")
    with pytest.raises(ValueError, match="a static cache has its pages by slot"):
        target.new_cache(2, capacity=8, page_size=4, shares=True)
