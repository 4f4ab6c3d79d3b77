"""Slots that sample, beside greedy ones: each writes the stream of its seed.

With the rule "coupled" this stream is that of decoding, bit for bit. Rules that draw
uniforms keep its distribution alone, which `tests/rules` enumerates, and a sequential
test looks at here.

Each of its samples is one round of the real models from the same state, with a seed of
its own: its first token must have the target's distribution `p`, known exactly. The
test bets against that: after every sample it multiplies its wealth by `r(token) /
p(token)`, where `r` is estimated from the samples before. If the tokens have the law
`p`, wealth is a martingale, and by Ville's inequality ever reaches `exp(MOST)` with
probability `exp(-MOST)` at most, after any number of samples; if they have another law
it grows exponentially. Biases that move a probability by less than about a hundredth of
a nat, such as draft probabilities in bfloat16, are out of its reach.
"""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair
from decoding import ALWAYS, MIXED, SMALL, Ask
from slow_cases import slow

import spec_jax as sj
from experiments.lib import prompt_files
from spec_jax import testing
from spec_jax.engine import (
    baseline,
    processing,
    requests as requests_lib,
    round as round_lib,
)
from spec_jax.model import sequence
from spec_jax.processors import built_in
from spec_jax.rules import sampling


@pytest.mark.parametrize(("impl", "num_slots"), [("native", 3), slow("native", 1)])
def test_the_stream_is_that_of_decoding(impl, num_slots):
    """Fails if noise is keyed by round, row or slot, or a filter sees other rows."""
    setting = decoding.setting_of(impl)
    for kind in (decoding.WARM, decoding.HOT, decoding.MIN_P, decoding.COLD):
        for run, gamma in ((0, 4), (1, 1), (3, 3), (ALWAYS, 4), (ALWAYS, 0)):
            asks = [Ask(run=run, gamma=gamma, sampling=kind), *MIXED[:2]][:num_slots]
            state = decoding.checked(setting, asks, draws=True)
            if (run, gamma) == (ALWAYS, 4):
                one = decoding.slot_of(state)
                assert one.num_rounds == 40 // 5
                assert one.num_accepted == one.num_proposed


def test_settings_are_data():
    """Checks that the seed decides the stream, and that a setting compiles nothing."""

    def write(**sampling):
        ask = Ask(sampling=tuple(sampling.items()))
        return decoding.text(decoding.decoded(SMALL, ask))

    first = write(temperature=2.0, seed=1)
    compiled = baseline.generate._cache_size()
    assert write(temperature=2.0, seed=2) != first
    cold = write(temperature=0.0, seed=1)
    assert baseline.generate._cache_size() == compiled
    # Temperature 0 writes the tokens of a program that cannot draw.
    assert cold == decoding.text(decoding.decoded(SMALL, Ask()))


@pytest.mark.parametrize("rule", [slow("rejection"), "block"])
def test_rules_by_uniforms_write_the_same_in_any_slot(rule):
    """Fails if the noise of a round is keyed by its slot, or a slot reads another's."""
    scheduler = SMALL.scheduler(num_slots=3, rule=rule)
    asks = MIXED[:3]
    together = decoding.run(SMALL, asks, scheduler=scheduler, draws=True)
    kept = 0
    for slot, ask in enumerate(asks):
        other = 2 - slot if slot != 1 else 0
        one = decoding.run(SMALL, {other: ask}, scheduler=scheduler, draws=True)
        testing.assert_same_bits(
            decoding.slot_of(together, slot), decoding.slot_of(one, other)
        )
        kept += int(one.slots.num_accepted[other])
    assert kept


NUM_SAMPLES = 4000
MOST = np.log(1e6)
PRIOR = 50.0  # samples that `p` counts as in the estimate of `r`
GAMMA = 3
SETTINGS = sampling.make_settings(temperature=0.9, top_k=12)
SIZES = {"capacity": 256, "page_size": 16}


def wealth(tokens: np.ndarray, law: np.ndarray) -> float:
    """Returns the logarithm of the largest wealth after any number of tokens."""
    counts, log_wealth, largest = np.zeros(law.shape), 0.0, 0.0
    for number, token in enumerate(tokens):
        if law[token] == 0:
            return np.inf
        guess = (counts[token] + PRIOR * law[token]) / (number + PRIOR)
        log_wealth += np.log(guess / law[token])
        largest = max(largest, log_wealth)
        counts[token] += 1
    return largest


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    target, _ = tiny_pair.write(tmp_path_factory.mktemp("target"))
    # The order of tokens is the same, and their probabilities differ.
    flatter = tmp_path_factory.mktemp("flatter")
    draft, _ = tiny_pair.write_scaled(flatter, final_norm=0.1)
    return sj.load(target, draft=draft, gamma_max=GAMMA)


@pytest.fixture(scope="module")
def prompt(lm):
    """Returns a prompt after which both models are unsure, and disagree."""
    prompts = prompt_files.parse("6")
    # The cache has room for so many tokens, and for the answer.
    candidates = [lm.tokenizer.encode(one.text)[:100] for one in prompts]

    def doubt(ids):
        target, draft = laws(lm, ids)
        return np.minimum(target, draft).sum() + target.max()

    return min(candidates, key=doubt)


_logits = jax.jit(sequence.logits, static_argnums=1)


def law_of(model, params, ids, processor=None) -> np.ndarray:
    """Returns the distribution of the token after a prompt, float64."""
    text = np.zeros((128,), np.int32)  # One shape for all prompts.
    text[: len(ids)] = ids
    row = _logits(params, model.config, text[None])[0, len(ids) - 1]
    begun = processing.begin(
        processor, text, np.int32(len(ids)), vocab_size=model.config.vocab_size
    )
    if begun is not None:
        row = processing.process(begun.processor, begun.states, row)
    law = np.asarray(sampling.distribution(row[None], SETTINGS)[0], np.float64)
    return law / law.sum()


def laws(lm, ids):
    target = law_of(lm.target, lm.params, ids)
    return target, law_of(lm.drafter.model, lm.drafter_params, ids)


def first_tokens(lm, prompt, *, rule, num_slots=1, processor=None):
    """Returns the first token of a round, for each of `NUM_SAMPLES` seeds.

    Args:
      num_slots: each with seeds of its own.
      processor: of the logits.
    """
    scheduler = sj.speculative(lm.target, lm.drafter, rule=rule).scheduler(
        (lm.params, lm.drafter_params), num_slots=num_slots, **SIZES
    )
    request = requests_lib.Request(
        prompt=prompt, max_tokens=8, sampling=SETTINGS, processor=processor
    )
    begun = scheduler.begin(*[request] * num_slots)

    @jax.jit
    def sample(speculator, state):
        def one(seeds):
            drawn = state.slots.sampling.replace(seed=seeds)
            slots = state.slots.replace(sampling=drawn)
            after, _ = round_lib.run_round(speculator, state.replace(slots=slots))
            return after.slots.tokens[:, len(prompt)], after.slots.num_accepted

        seeds = jnp.arange(NUM_SAMPLES, dtype=jnp.uint32).reshape(-1, num_slots)
        return jax.lax.map(one, seeds)

    tokens, accepted = sample(scheduler.speculator, begun)
    # Some rounds keep a draft, and some keep none.
    assert 0.02 < np.mean(np.asarray(accepted) > 0) < 0.98
    return np.asarray(tokens).ravel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "tree", "num_slots", "is_processed"),
    [
        ("coupled", None, 1, False),
        ("coupled", None, 4, False),
        ("coupled", "3-2", 1, False),
        ("rejection", None, 1, False),
        ("rejection", None, 4, False),
        ("rejection", "3-2", 1, False),
        ("rejection", "[[0],[1],[0,0],[0,0,0]]", 1, False),
        ("block", None, 4, False),
        ("rejection", None, 1, True),
        ("rejection", "3-2", 1, True),
        ("block", None, 1, True),
    ],
)
def test_rounds_draw_from_the_targets_law(
    lm, prompt, rule, tree, num_slots, is_processed
):
    """Fails if a rule is biased, or reads logits that a processor has not changed."""
    plain, processor = laws(lm, prompt)[0], None
    if is_processed:
        first = int(plain.argmax())
        changes = {first: -2.0, (first + 1) % len(plain): 3.0}
        processor = built_in.logit_bias(changes)
    how = {"rule": rule, "num_slots": num_slots, "processor": processor}
    tokens = first_tokens(lm.with_tree(tree) if tree else lm, prompt, **how)
    assert wealth(tokens, law_of(lm.target, lm.params, prompt, processor)) < MOST
    if is_processed:
        assert wealth(tokens, plain) >= MOST


def test_the_right_law_is_hardly_ever_refused():
    """Fails if one of 200 runs with the right law, of 12 tokens, is refused."""
    rng = np.random.default_rng(1)
    law = rng.dirichlet(np.ones(12))
    for _ in range(200):
        assert wealth(rng.choice(12, 1000, p=law), law) < MOST
