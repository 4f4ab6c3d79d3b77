"""Many samples of a prompt, and prompts that begin alike: one seed, one prefill.

Whatever slots share, each sample must be the text that decoding it alone writes, from a
cache of its own that is prefilled with the whole prompt.
"""

import dataclasses
import itertools

import decoding
import numpy as np
import pytest
import tiny_pair
from slow_cases import slow, slow_but

import spec_jax as sj
from spec_jax import generation, testing
from spec_jax.drafters import slots
from spec_jax.engine import held, scheduler as scheduler_lib
from spec_jax.paging import allocator, cache
from spec_jax.rules import settings as settings_lib


PREFIX = "import os\n\n"  # It ends within a page, as the prompts' common part does.
PROMPTS = ["def f(x):", "def g(x, y):", "x"]
DRAWN = sj.Sampling(temperature=0.9, top_k=40, seed=5)
SHORT = {"max_tokens": 9, "ignore_eos": True, "page_size": 4, "sampling": DRAWN}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns folders of a tiny random target and of a draft; a token is a byte."""
    return tiny_pair.write(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=["native", slow("xla")])
def lm(request, folders):
    return sj.load(folders[0], draft=folders[1], gamma_max=4, impl=request.param)


def shared(outs) -> list[int]:
    return [one.metrics["shared_prompt_tokens"] for one in outs]


def test_seeds_of_samples():
    """Fails if two seeds are equal, or the first of all is not the given one."""
    grid = [(request, sample) for request in range(70) for sample in range(40)]
    for seed in (0, 5, 2**32 - 1):
        found = [settings_lib.folded_seed(seed, *each) for each in grid]
        assert found[0] == seed and len(set(found)) == len(grid)
        assert 0 <= min(found) and max(found) < 2**32
    last = settings_lib.MOST_REQUESTS - 1, settings_lib.MOST_SAMPLES - 1
    assert 0 <= settings_lib.folded_seed(3, *last) < 2**32
    for request, sample in ((-1, 0), (0, -1), (last[0] + 1, 0), (0, last[1] + 1)):
        with pytest.raises(ValueError, match="give the others another seed"):
            settings_lib.folded_seed(3, request, sample)


def test_equal_prompts_of_one_seed(lm):
    """Fails if samples are equal, or one is not that of the prompt decoded alone."""
    settings = SHORT | {"log_probs": True}
    outs = sj.generate(lm, [PROMPTS[0]] * 3, gamma=3, **settings)
    assert len({tuple(one.tokens) for one in outs}) == 3
    assert outs[0].provenance["seed"] == DRAWN.seed
    plain = sj.decode(lm, [PROMPTS[0]] * 3, **settings)
    for one, other in zip(outs, plain, strict=True):
        drawn = dataclasses.replace(DRAWN, seed=one.provenance["seed"])
        alone = sj.decode(lm, PROMPTS[0], **settings | {"sampling": drawn})
        assert one.tokens == other.tokens == alone.tokens
        assert one.provenance["seed"] == other.provenance["seed"]
        assert "shared_prompt_tokens" not in one.metrics


def test_a_seed_for_each_is_that_of_its_prompt(lm):
    """Fails if the seed of a prompt depends on its place in the list."""
    each = [dataclasses.replace(DRAWN, seed=seed) for seed in (7, 5, 7)]
    runs = [
        generation.prepare(lm, PROMPTS, **SHORT | {"sampling": each}, n=n)[0]
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


def flat(outs, settings):
    return [one for each in outs for one in each] if "n" in settings else outs


QUICK = ("samples of prompts", "a prefix", "samples after a prefix")


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_samples_are_those_of_decoding(lm, case):
    """Fails if a token or a log-probability depends on which slot a prompt's pages come
    from, or if a prompt is prefilled twice."""
    prompts, settings = CASES[case]
    how, n = SHORT | {"log_probs": True}, settings.get("n")
    prefix = {"prefix": settings["prefix"]} if "prefix" in settings else {}
    asked = {"gamma": 3} | how | settings
    outs = flat(sj.generate(lm, prompts, **asked), settings)
    plain = flat(sj.decode(lm, prompts, n=n, **how, **prefix), settings)
    if n:
        ids = [out.prompt_tokens for out in outs]
        assert len(outs) == n * len(prompts) and ids[::n] == ids[n - 1 :: n]
    for found, expected in zip(outs, plain, strict=True):
        assert found.prompt_tokens == expected.prompt_tokens
        assert found.provenance["seed"] == expected.provenance["seed"]
        if "rule" in settings:
            continue
        assert found.tokens == expected.tokens
        for name in ("log_probs", "drawn_log_probs"):
            testing.assert_same_bits(getattr(found, name), getattr(expected, name))
    assert len({tuple(one.tokens) for one in outs}) == len(outs)
    lengths = [len(one.prompt_tokens) - 1 for one in outs]
    firsts = [number for number in range(len(outs)) if number % (n or 1) == 0]
    for number, length in enumerate(lengths):
        if number not in firsts:
            assert shared(outs)[number] == length
    if prefix:
        least = len(lm.tokenizer.encode(PREFIX))
        assert all(shared(outs)[number] >= least for number in firsts[1:])
    assert shared(outs)[0] == 0


@pytest.mark.slow
def test_keys_and_values_are_those_of_decoding(lm):
    """Compares K/V of all layers, read through the table, and hashes of all logits."""
    assert sj.check_lossless(lm, PROMPTS, gamma=3, n=2, prefix=PREFIX, **SHORT)


def spoilt_share(kv, source, slot, length, *, real=allocator.share):
    """Plants a fault: keys in the copy of the last page are zeros."""
    kv = real(kv, source, slot, length)
    page = kv.page_table[slot, length // kv.page_size]
    return kv.replace(k=tuple(k.at[page].set(0) for k in kv.k))


FAULTS = {
    "the last page is another": (allocator, "share", spoilt_share),
    "a token too many is alike": (
        held.Held,
        "_alike",
        lambda self, wanted, other: min(len(wanted), len(other), len(PREFIX) + 5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(lm, fault, monkeypatch):
    """Negative control of the comparison with decoding, which each fault must fail."""
    monkeypatch.setattr(*FAULTS[fault])
    # Another page size compiles other programs, which have the fault.
    settings = SHORT | {"page_size": 8}
    assert not sj.check_lossless(lm, PROMPTS, gamma=3, prefix=PREFIX, **settings)


DRAFTERS = {
    "draft model": {},
    "head": {"drafter": "eagle3", "draft": tiny_pair.write_head},
    "block": {"drafter": "dspark", "draft": tiny_pair.write_block},
    "hybrid": {"drafter": "hybrid"},
    "tree": {"gamma": sj.Tree.parse("2x2:3")},
    "tree of a head": {
        "drafter": "eagle3",
        "draft": tiny_pair.write_head,
        "gamma": sj.Tree.parse("2x2:3"),
    },
}


def through_a_queue(folders, folder, kind, num_slots, *, shares) -> list:
    """Runs nine requests; returns results in order. Each keeps the K/V of its text
    in the target and of its prompt in the drafter, and its number of rounds."""
    how = {"gamma": 3, "draft": folders[1]} | DRAFTERS[kind]
    if callable(how["draft"]):
        how["draft"] = how["draft"](folder, folders[0])
    gamma = how.pop("gamma")
    lm = sj.load(folders[0], gamma_max=3, impl="native", **how)
    settings = {"prefix": PREFIX, "n": 3, "gamma": gamma, **SHORT}
    run, _ = generation.prepare(lm, PROMPTS, num_slots=num_slots, **settings)

    def rows(kv, slot, length):
        cache.check_integrity(kv)
        return decoding.held(kv, length, slot=slot)

    def keep(state, slot):
        length = int(state.slots.length[slot])
        drafts = getattr(state.memory, "kv", state.memory)
        most = length - SHORT["max_tokens"] - 2  # The next pair holds a drawn token.
        found = rows(state.cache, slot, length - 1) + rows(drafts, slot, most)
        return found, int(state.slots.num_rounds[slot])

    scheduler = dataclasses.replace(run.scheduler, shares=shares)
    found = scheduler.run(run.requests, keep=keep)
    return sorted(found, key=lambda one: one.number)


def begins(monkeypatch, *, more=0) -> list[int]:
    """Adds `more` to the positions that drafters' slots begin with; returns sums."""
    given, real = [], slots.begin

    def begin(rows, kv, begun, *, slot, length):
        given.append(length + more)
        return real(rows, kv, begun, slot=slot, length=length + more)

    monkeypatch.setattr(slots, "begin", begin)
    return given


def same_rows(found, expected) -> bool:
    return all(
        np.array_equal(testing.bits(own), testing.bits(other))
        for one, two in zip(found, expected, strict=True)
        for own, other in zip(one.kept[0], two.kept[0], strict=True)
    )


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
    found = through_a_queue(*arguments, shares=True)
    of_pairs = DRAFTERS[kind].get("drafter") == "eagle3"
    shared = [one.shared for one in found if one.shared]
    assert sorted(given) == sorted(length - of_pairs for length in shared)
    assert len(shared) == len(found) - 1
    expected = through_a_queue(*arguments, shares=False)
    assert len(given) == len(shared) and not any(one.shared for one in expected)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.kept[1] == other.kept[1]
    assert same_rows(found, expected)
    if (kind, num_slots) == ("head", 1):
        # Negative control: one more pair is shared, which has another token.
        monkeypatch.undo()
        begins(monkeypatch, more=1)
        found = through_a_queue(*arguments, shares=True)
        assert not same_rows(found, expected)


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
        run, _ = generation.prepare(lm, prompt, prefix=prefix)
        assert run.prompts == [whole] and run.scheduler.prefill_by_rows
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer = dataclasses.replace(lm.tokenizer, chat_template=template)
    chats = dataclasses.replace(lm, tokenizer=tokenizer)
    first = [{"role": "system", "content": "be brief"}]
    asked = [{"role": "user", "content": "hi"}]
    run, _ = generation.prepare(chats, asked, prefix=first)
    assert run.prompts == [lm.tokenizer.encode("be brief;hi;")]


def test_scores_after_a_prefix(lm):
    """Fails if `score` with the same prefix gives other numbers."""
    settings = SHORT | {"prefix": PREFIX, "gamma": 3, "log_probs": True}
    outs = sj.generate(lm, PROMPTS, **settings)
    texts = [one.tokens for one in outs]
    found = sj.score(lm, PROMPTS, texts, sampling=DRAWN, prefix=PREFIX)
    for one, other in zip(found, outs, strict=True):
        testing.assert_same_bits(one.drawn_log_probs, other.drawn_log_probs)


def test_pages_of_all_slots_are_not_bounded(lm):
    run, _ = generation.prepare(lm, PROMPTS, n=2, **SHORT)
    with pytest.raises(ValueError, match="num_pages=99 of slots that share pages"):
        dataclasses.replace(run.scheduler, num_pages=99)
    with pytest.raises(ValueError, match="a static cache has its pages by slot"):
        target = dataclasses.replace(lm.target, cache="static")
        target.new_slots(2, capacity=8, page_size=4, shares=True)
    assert isinstance(run.scheduler, scheduler_lib.Scheduler)
