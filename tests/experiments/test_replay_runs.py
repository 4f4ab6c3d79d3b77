"""Drafters on traces of the tiny pair: the counters of live rounds, as integers."""

import dataclasses

import jax
import pytest
import tiny_pair

from experiments.support import (
    drafters,
    paired_runs,
    policies,
    replay_check,
    replay_policies,
    replay_record,
    replay_runs,
    traces,
)
from spec_jax import testing
from spec_jax.analysis import metrics
from spec_jax.gamma import theory
from spec_jax.model import load


GAMMAS = (1, 2, 4)
GEN_TOKENS = 24
GREEDY = {"temperature": 0.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "seed": 0}
SETTINGS = {
    "greedy": GREEDY,
    "sampled": GREEDY | {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 7},
}
COSTS = theory.CostCurve(
    plain_s=1.0, rows=(1, 5), verify_s=(1.0, 1.6), draft_s=0.1, overhead_s=0.02
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The tiny target, and a draft that is right at times: its weights with noise."""
    folder = tmp_path_factory.mktemp("pair")
    target, _ = tiny_pair.write(folder)
    config, params = load.load(target)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    noisy = [
        leaf + 0.03 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    load.save(folder / "noisy", config, jax.tree.unflatten(structure, noisy))
    tiny_pair.byte_tokenizer().save(str(folder / "noisy" / "tokenizer.json"))
    return target, folder / "noisy"


@pytest.fixture(scope="module", params=SETTINGS)
def recorded(request, folders, tmp_path_factory):
    """Header and traces of three prompts, with a stop token that the first meets."""
    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    wanted = replay_record.Request(
        target=folders[0],
        dtype=None,
        impl="native",
        gamma_max=max(GAMMAS),
        prompts="3",
        raw=False,
        gen_tokens=GEN_TOKENS,
        page_size=16,
        settings=SETTINGS[request.param],
    )
    replay_record.record(wanted, path)
    header, prompts = traces.read(path)
    stop = prompts[0].generated_ids[7]
    return dataclasses.replace(header, stop_ids=(stop,)), prompts


class Subject:
    """A drafter with the target and without it."""

    def __init__(self, name: str, recorded, folders):
        self.header, self.prompts = recorded
        target, draft = folders
        sizes = {"gamma_max": max(GAMMAS), "min_confidence": 0.05}
        built = replay_runs.build([name], self.header, draft, **sizes)
        drafter, params = built[name]
        self.replayer = replay_runs.Replayer(
            drafter=drafter,
            params=params,
            slab=self.header.slab,
            capacity=replay_runs.capacity_of(self.header, self.prompts),
            page_size=self.header.page_size,
            stop_ids=self.header.stop_ids,
        )
        self.pair = replay_check.load_pair(
            self.header, target, draft, drafter=name, **sizes
        )

    def both(self, prompt, **run):
        """What a prompt yields live, and replayed."""
        live = replay_check.run_live(
            self.pair, self.header, self.replayer, prompt, **run
        )
        return live, self.replayer.run(prompt, **run)

    def assert_equal(self, prompt, **run) -> metrics.Counters:
        """Asserts that every counter is the same; returns them."""
        live, replayed = self.both(prompt, **run)
        assert vars(replayed.counters) == vars(live.counters)
        assert live.tokens == prompt.until_stop(self.header.stop_ids)
        assert replayed.num_forwards.sum() == live.counters.target_steps
        metrics.identities(replayed.counters)
        return replayed.counters


# Every drafter and both settings: what is drawn are a draft model's drafts and the
# target's tokens, of which lookups see no more than the text. The rest is slow.
SAMPLED = ("draft-model", "ngram")
RUNS = [("greedy", name) for name in drafters.DRAFTERS] + [
    pytest.param(
        *("sampled", name), marks=() if name in SAMPLED else [pytest.mark.slow]
    )
    for name in drafters.DRAFTERS
]


@pytest.mark.parametrize(("recorded", "name"), RUNS, indirect=["recorded"])
def test_replayed_counters_are_live_counters(name, recorded, folders):
    """Fails if a drafter sees anything else, or draws with other noise, than live."""
    subject = Subject(name, recorded, folders)
    total = metrics.Counters()
    for prompt in subject.prompts:
        for gamma in GAMMAS:
            total += subject.assert_equal(prompt, gamma=gamma)
    # The counters are not those of drafts that are all kept, or all rejected.
    assert total.proposed > 0
    if name in ("draft-model", "hybrid"):
        assert 0.1 * total.proposed < total.accepted < 0.95 * total.proposed
    # Some text was cut.
    assert total.tokens < GEN_TOKENS * len(subject.prompts) * len(GAMMAS)
    if name == "oracle":
        assert total.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["threshold", "goodput"])
def test_replayed_policies_choose_what_live_ones_choose(policy, recorded, folders):
    """Fails if adaptive rounds learn other counts on a trace."""
    subject = Subject("draft-model", recorded, folders)
    drafter = subject.replayer.drafter
    chosen = replay_policies.make(policy, drafter, gamma=4, curve=COSTS)
    for prompt in subject.prompts:
        subject.assert_equal(prompt, gamma=4, chosen=chosen)


@pytest.mark.parametrize("name", drafters.DRAFTERS)
def test_drafters_are_those_of_a_live_run(name, recorded, folders):
    """Fails if what is built without the target is not what `load_pair` builds."""
    subject = Subject(name, recorded, folders)
    assert subject.replayer.drafter == subject.pair.drafter
    testing.assert_same_bits(subject.replayer.params, subject.pair.params[1])


def test_the_threshold_policy_is_that_of_live_runs(recorded, folders):
    """Fails if replay judges another policy than `spec_round.py` runs."""
    subject = Subject("ngram", recorded, folders)
    settings = paired_runs.Settings(gamma=4, gen_tokens=8, capacity=64, page_size=16)
    live = policies.with_policy("threshold", subject.pair, settings, [1])
    drafter = subject.replayer.drafter
    chosen = replay_policies.make("threshold", drafter, gamma=4, curve=None)
    assert chosen.gamma_policy == live.gamma_policy
    testing.assert_same_bits(chosen.state, live.policy_state)
    with pytest.raises(ValueError, match="'mood' is not one of fixed"):
        replay_policies.make("mood", drafter, gamma=4, curve=None)


def test_whatever_differs_is_named(recorded, folders):
    """Negative control: one counter, one token, one length."""
    subject = Subject("draft-model", recorded, folders)
    prompt = subject.prompts[1]
    plain = prompt.until_stop(subject.header.stop_ids)
    live, replayed = subject.both(prompt, gamma=2)
    same = replayed.counters
    assert replay_check.differences(live, same, plain) == []
    changed = [*plain[:5], (plain[5] + 1) % subject.header.vocab_size, *plain[6:]]
    assert replay_check.differences(live, same, changed) == [
        f"token 5: live {plain[5]}, in the trace {changed[5]}"
    ]
    assert replay_check.differences(live, same, plain[:-1]) == [
        f"{len(plain)} tokens live, {len(plain) - 1} in the trace"
    ]
    more = dataclasses.replace(same, accepted=same.accepted + 1)
    assert replay_check.differences(live, more, plain) == [
        f"accepted: live {same.accepted}, replayed {same.accepted + 1}"
    ]


def test_drafts_behind_a_stop_token_are_judged(recorded, folders):
    """Fails if a trace ends at its stop token: what is behind it is counted, then cut.

    A text that the draft model continues behind its stop token as the target does.
    """
    header, prompts = recorded
    total = metrics.Counters()
    for prompt in prompts:
        for at in (5, 9, 14):
            stop = (prompt.generated_ids[at],)
            changed = dataclasses.replace(header, stop_ids=stop)
            subject = Subject("draft-model", (changed, prompts), folders)
            total += subject.assert_equal(prompt, gamma=4)
    assert total.cut > 0


def test_a_gamma_that_the_drafter_does_not_have(recorded, folders):
    subject = Subject("ngram", recorded, folders)
    with pytest.raises(ValueError, match=r"gamma=5 is outside \[0, 4\]"):
        subject.replayer.run(subject.prompts[0], gamma=5)


def test_drafters_that_do_not_exist(recorded, folders):
    with pytest.raises(ValueError, match="'medusa' is not one of draft-model"):
        replay_runs.build(["medusa"], recorded[0], folders[1], gamma_max=2)
