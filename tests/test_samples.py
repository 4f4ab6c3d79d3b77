"""Many samples of a prompt, and prompts that begin alike: one seed, one prefill.

Whatever slots share, each sample must be the text that decoding it alone writes, from a
cache of its own that is prefilled with the whole prompt. Log-probabilities of scoring
and of generating are the same integers.
"""

import dataclasses
import itertools

import decoding
import numpy as np
import page_tables
import pytest
import recorded_runs
import tiny_pair
from slow_cases import slow, slow_but

import spec_jax as sj
from spec_jax import run as run_lib, scoring, testing
from spec_jax.drafters import slots
from spec_jax.rules import settings as settings_lib


PREFIX = "import os\n\n"  # It ends within a page, as the prompts' common part does.
PROMPTS = ["def f(x):", "def g(x, y):", "x"]
DRAWN = sj.Sampling(temperature=0.9, top_k=40, seed=5)
SHORT = {"max_tokens": 9, "ignore_eos": True, "page_size": 4, "sampling": DRAWN}


@pytest.fixture(scope="module", params=["native", slow("xla")])
def lm(request, folders):
    return sj.load(folders[0], draft=folders[1], gamma_max=4, impl=request.param)


def same(found, expected) -> None:
    for name in scoring.NAMES:
        testing.assert_same_bits(getattr(found, name), getattr(expected, name))


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
            same(found, expected)
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


SCORED = ["def f(x):", "import os", "x = [1, 2]"]
FILTERED = sj.Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5)
OF_SCORED = {"max_tokens": 11, "ignore_eos": True}


def of_all_tokens(lm, sampling=None):
    """Returns the log-probabilities of every token after the first prompt, by the model
    and by `sampling`."""
    size = lm.target.config.vocab_size
    texts = [SCORED[0]] * size, [[token] for token in range(size)]
    found = sj.score(lm, *texts, sampling=sampling)
    return np.array([(one.log_probs[0], one.drawn_log_probs[0]) for one in found]).T


@pytest.mark.parametrize("sampling", [slow(None), FILTERED], ids=["greedy", "drawn"])
def test_they_are_those_of_decoding(lm, sampling):
    """Fails if a number depends on drafts, on a tree, on a batch, or on the other rows
    of its slab."""
    top = {"sampling": sampling, "top_logprobs": 3}
    settings = OF_SCORED | top
    plain = sj.decode(lm, SCORED, **settings)
    for made in (
        sj.generate(lm, SCORED, num_slots=2, gamma=4, **settings),
        sj.generate(lm, SCORED, gamma=sj.Tree.parse("2x2:5"), **settings),
        sj.score(lm, SCORED, [one.tokens for one in plain], **top),
        [sj.score(lm, one.prompt_tokens, one.tokens, **top) for one in plain],
    ):
        for found, expected in zip(made, plain, strict=True):
            assert found.tokens == expected.tokens
            same(found, expected)
    one = plain[0]
    if lm.target.prefills_by_rows:  # Then a prompt has the K/V of decoding, too.
        for count, token in [*enumerate(one.tokens)][::4]:
            prompt = [*one.prompt_tokens, *one.tokens[:count]]
            alone = sj.score(lm, prompt, [token], sampling=sampling)
            testing.assert_same_bits(alone.log_probs[0], one.log_probs[count])
    # Negative control: the numbers of another prompt.
    other = sj.score(lm, SCORED[1], one.tokens, sampling=sampling)
    assert np.all(other.log_probs[1:] != one.log_probs[1:])


def test_the_likeliest_tokens(lm):
    """Fails if they are not the highest of all log-probabilities, in order, with the
    bits that `score` gives each token, or if asking for them changes a bit."""
    (one,) = sj.generate(lm, [SCORED[0]], gamma=2, top_logprobs=5, **OF_SCORED)
    (asked,) = sj.generate(lm, [SCORED[0]], gamma=2, log_probs=True, **OF_SCORED)
    for name in ("log_probs", "drawn_log_probs"):
        testing.assert_same_bits(getattr(one, name), getattr(asked, name))
    assert asked.top_tokens is None and one.top_tokens.dtype == np.int32
    first, _ = of_all_tokens(lm)
    order = np.argsort(-first, kind="stable")[:5]
    assert (
        one.top_tokens.shape == one.top_log_probs.shape == (OF_SCORED["max_tokens"], 5)
    )
    assert one.top_tokens[0].tolist() == order.tolist()
    testing.assert_same_bits(one.top_log_probs[0], first[order])
    # Written greedily, the first is the token itself.
    assert one.top_tokens[:, 0].tolist() == one.tokens
    testing.assert_same_bits(one.top_log_probs[:, 0].copy(), one.log_probs)
    _, end = tiny_pair.streamed(lm, SCORED[0], gamma=2, top_logprobs=5, **OF_SCORED)
    same(end, one)


def test_they_are_those_of_the_rows_that_decided(lm):
    """Fails if log-probabilities are not computed from the logits of the rounds."""
    settings = OF_SCORED | {"gamma": 4}
    (seen,) = recorded_runs.evidence_of(lm, [SCORED[0]], **settings)
    (found,) = sj.generate(lm, [SCORED[0]], log_probs=True, **settings)
    assert found.tokens == list(seen.tokens)
    testing.assert_same_bits(found.log_probs.view(np.uint32), seen.log_probs)


def test_they_are_of_distributions(lm):
    """Fails if chances do not add up to one, or if filters keep more than `top_k`."""
    raw, drawn = of_all_tokens(lm, FILTERED).astype(float)
    for log_probs in (raw, drawn):
        assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-5)
    kept = np.isfinite(drawn)
    assert 1 < kept.sum() <= FILTERED.top_k
    # By definition: the kept logits over the temperature, normalised.
    scaled = raw[kept] / FILTERED.temperature
    expected = scaled - np.log(np.sum(np.exp(scaled)))
    np.testing.assert_allclose(drawn[kept], expected, atol=1e-5)
    # Greedily only one token has a chance.
    _, greedy = of_all_tokens(lm)
    assert greedy[raw.argmax()] == 0 and np.isneginf(greedy).sum() == len(greedy) - 1


def test_nobody_asks_and_nothing_is_computed(lm):
    out = sj.generate(lm, SCORED[0], gamma=2, **OF_SCORED)
    assert all(getattr(out, name) is None for name in scoring.NAMES)


REFUSED = {
    "no completion": ((SCORED[0], []), "completion is empty"),
    "a token of another model": ((SCORED[0], [10**6]), "completion has token 1000000"),
    "no row of ids": ((SCORED[0], [0.5]), "give one row of token ids"),
    "too few": ((SCORED, [[1]]), "1 completions of 3 prompts: give each"),
    "too long": ((SCORED[0], [1] * 10**5), "shorten it"),
    "settings": (
        ([SCORED[0]], [[1]], FILTERED, FILTERED),
        "2 settings of .* for 1 prompts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(lm, case):
    (prompt, completion, *draws), words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        sj.score(lm, prompt, completion, sampling=draws or None)
