"""The law of sampled speculation on the embedded pair, by a sequential test.

Each sample is one round of the real models from the same state, with a seed of its
own: its first token must have the target's distribution `p`, which is known exactly.
The test bets against that: after every sample it multiplies its wealth by
`r(token) / p(token)`, where `r` is what the samples before suggest. If the tokens have
the law `p`, wealth is a martingale, and by Ville's inequality ever reaches `1 / ALPHA`
with probability `ALPHA` at most, however long one looks; if they have another law it
grows exponentially.

Biases that move a probability by less than about a hundredth of a nat, such as draft
probabilities in bfloat16, are out of its reach: the enumeration catches those.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.support import model_pair, paired_runs, prompt_files, prompt_runs
from spec_jax import rounds, session
from spec_jax.drafters import draft_model
from spec_jax.rules import acceptance, sampling


pytestmark = pytest.mark.slow

NUM_SAMPLES = 4000
ALPHA = 1e-6
PRIOR = 50.0  # samples that the bettor's trust in `p` is worth
GAMMA = 3
SETTINGS = sampling.make_settings(temperature=0.9, top_k=12)
STOP = session.stop_array(())


def wealth(tokens: np.ndarray, law: np.ndarray) -> float:
    """The largest logarithm of the wealth on the way."""
    counts, log_wealth, largest = np.zeros(law.shape), 0.0, 0.0
    for number, token in enumerate(tokens):
        if law[token] == 0:
            return np.inf
        guess = (counts[token] + PRIOR * law[token]) / (number + PRIOR)
        log_wealth += np.log(guess / law[token])
        largest = max(largest, log_wealth)
        counts[token] += 1
    return largest


def assert_law(tokens: np.ndarray, law: np.ndarray) -> None:
    """Raises if the tokens were hardly drawn from `law`."""
    found = wealth(tokens, law)
    if found >= -np.log(ALPHA):
        raise AssertionError(
            f"betting against the law won exp({found:.1f}) within {len(tokens)} tokens"
        )


@pytest.fixture(scope="module")
def pair():
    loaded = model_pair.load_pair(
        model_pair.EMBEDDED_TARGET,
        model_pair.EMBEDDED_DRAFT,
        gamma_max=GAMMA,
        slab=GAMMA + 1,
        dtype=None,
        impl="auto",
        sampling_settings=SETTINGS,
    )
    return loaded


@pytest.fixture(scope="module")
def prompt(pair):
    """A prompt after which both models are in doubt, and not of one mind."""
    prompts = prompt_files.parse("6", default_file=prompt_files.BUNDLED)
    candidates = prompt_runs.encode(pair, prompts, raw=False)

    def doubt(ids):
        target, draft = laws(pair, ids)
        return np.minimum(target, draft).sum() + target.max()

    return min(candidates, key=doubt)


def law_of(model, params, ids) -> np.ndarray:
    """The distribution of the token after a prompt, float64."""
    kv = model.new_cache(capacity=256, page_size=16)
    kv = session.prefill(model, params, kv, ids)
    _, logits = model.forward(
        params,
        kv,
        tokens=jnp.asarray(ids[-1:], jnp.int32),
        start=jnp.int32(len(ids) - 1),
        num_live=jnp.int32(1),
    )
    law = np.asarray(sampling.distribution(logits[:1], SETTINGS)[0], np.float64)
    return law / law.sum()


def laws(pair, ids):
    target = law_of(pair.target, pair.params[0], ids)
    return target, law_of(pair.drafter.model, pair.params[1].weights, ids)


def first_tokens(
    pair, prompt, *, rule, draws="independent", told=SETTINGS, accept=None
):
    """The first token of a round, for each of `NUM_SAMPLES` seeds.

    Args:
      told: what the target is told of sampling, to plant a bias.
      accept: in place of the rule's, to plant a bias.
    """
    drafter = draft_model.DraftModel(
        model=pair.drafter.model, gamma_max=GAMMA, draws=draws
    )
    settings = paired_runs.Settings(
        gamma=GAMMA, gen_tokens=8, capacity=256, page_size=16
    )
    sizes = {"capacity": settings.capacity, "page_size": settings.page_size}
    state = session.begin(
        pair.target,
        drafter,
        pair.params,
        pair.target.new_cache(**sizes),
        drafter.init(**sizes),
        prompt,
        max_tokens=settings.gen_tokens,
        settings=told,
    )

    @jax.jit
    def sample(target_params, draft_params, state):
        def one(seed):
            seed = seed.astype(jnp.uint32)
            drawn = draft_params.replace(
                settings=draft_params.settings.replace(seed=seed)
            )
            after = rounds.run_round(
                pair.target,
                drafter,
                (target_params, drawn),
                state.replace(settings=state.settings.replace(seed=seed)),
                gamma=jnp.int32(GAMMA),
                stop_ids=STOP,
                rule=rule,
            )
            return after.tokens[len(prompt)], after.num_accepted

        return jax.lax.map(one, jnp.arange(NUM_SAMPLES))

    with pytest.MonkeyPatch.context() as patch:
        if accept is not None:
            patch.setattr(acceptance, f"accept_{rule}", accept)
        tokens, accepted = sample(*pair.params, state)
    # Both ways through a round were taken.
    assert 0.02 < np.mean(np.asarray(accepted) > 0) < 0.98
    return np.asarray(tokens)


@pytest.mark.parametrize(
    ("rule", "draws"),
    [
        ("rejection", "independent"),
        ("block", "independent"),
        ("sample-path", "sample-path"),
    ],
)
def test_rounds_draw_from_the_targets_law(pair, prompt, rule, draws):
    tokens = first_tokens(pair, prompt, rule=rule, draws=draws)
    assert_law(tokens, laws(pair, prompt)[0])


def own_from_the_target(real, tokens, draft_probs, target_probs, num_drafted, **noise):
    """The residual is not subtracted: the rule is told that nothing was likely."""
    verdict = real(tokens, draft_probs, target_probs, num_drafted, **noise)
    row = jnp.log(target_probs[verdict.num_accepted]) + noise["noise"]
    own = jnp.argmax(row).astype(jnp.int32)
    tokens = verdict.tokens.at[verdict.num_accepted].set(own)
    return verdict.replace(tokens=tokens)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_residual_that_is_not_subtracted_is_caught(pair, prompt, rule):
    """Planted, and found by the same bets."""
    real = getattr(acceptance, f"accept_{rule}")
    tokens = first_tokens(
        pair, prompt, rule=rule, accept=functools.partial(own_from_the_target, real)
    )
    with pytest.raises(AssertionError, match="betting against the law"):
        assert_law(tokens, laws(pair, prompt)[0])


@pytest.mark.parametrize(
    "changes", [{"temperature": 1.3, "top_k": 12}, {"temperature": 0.9, "top_k": 3}]
)
def test_settings_of_one_side_are_caught(pair, prompt, changes):
    """The target is told another temperature, or another filter, than the draft."""
    told = sampling.make_settings(**changes)
    tokens = first_tokens(pair, prompt, rule="rejection", told=told)
    with pytest.raises(AssertionError, match="betting against the law"):
        assert_law(tokens, laws(pair, prompt)[0])


def test_drafts_taken_as_they_come_are_caught(pair, prompt):
    """The draft's own law, without any verification."""
    target, draft = laws(pair, prompt)
    tokens = np.random.default_rng(0).choice(len(draft), NUM_SAMPLES, p=draft)
    with pytest.raises(AssertionError, match="betting against the law"):
        assert_law(tokens, target)


def test_the_right_law_is_hardly_ever_refused():
    """Of 200 runs on a law of 12 tokens none is refused."""
    rng = np.random.default_rng(1)
    law = rng.dirichlet(np.ones(12))
    for _ in range(200):
        assert wealth(rng.choice(12, 1000, p=law), law) < -np.log(ALPHA)
