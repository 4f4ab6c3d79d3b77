"""Rounds of trees commit what decoding would have committed, whatever the tree.

Trees are right, wrong, or right in one branch alone, with small and full budgets, and
have up to 256 rows. Limits and full caches cut the path. Features that rounds hand to a
drafter are those of decoding. Mutants (`TREES`, `FEATURES`) are negative controls.
"""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import ALWAYS, PROMPT, SMALL, Ask, Status
from slow_cases import slow

from spec_jax import testing
from spec_jax.debug import recorder
from spec_jax.drafters import tree_shapes
from spec_jax.engine import baseline, protocols
from spec_jax.engine.state import Origin
from spec_jax.gamma import goodput
from spec_jax.rules import acceptance


# Drafts 0 .. 6 are columns 1 .. 7: the path 0, 3, 5, its siblings, and a child of 1.
PARENTS = (0, 0, 1, 1, 2, 4, 4)
DEPTHS = (1, 1, 2, 2, 2, 3, 3)
WIDTH, DEPTH = len(PARENTS), max(DEPTHS)
RIGHT = {
    "first": (0, 2),  # the first child of every node on the path
    "second": (1, 4),  # the second child of the root
    "deep": (0, 3, 6),  # the last of all nodes
    "equal": (0, 1, 2, 3, 4, 5, 6),  # all children alike
    "none": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedTree(decoding.Scripted):
    """Proposes trees whose nodes hold the script's tokens where `params` is true.

    `params [WIDTH]` is data, so that all trees share an executable.
    """

    gamma_max: int = WIDTH
    depth_max: int = DEPTH

    def propose(self, params, memory, *, tokens, length, gamma):
        at = length + jnp.array(DEPTHS, jnp.int32) - 1
        drafts = memory.at[at].get(mode="fill", fill_value=acceptance.PAD)
        wrong = jnp.where(params, 0, 1 + jnp.arange(WIDTH, dtype=jnp.int32))
        return memory, protocols.Proposal(
            tokens=(drafts + wrong) % 96,
            num_drafted=gamma,
            parents=jnp.array(PARENTS, jnp.int32),
        )


def scheduler_of(right="deep", *, drafter=None, setting=SMALL, **changes):
    """Returns a scheduler whose drafter proposes trees that are right in `RIGHT`."""
    is_right = jnp.isin(jnp.arange(WIDTH), jnp.array(RIGHT[right], jnp.int32))
    drafter = drafter or ScriptedTree()
    return setting.scheduler(drafter, draft_params=is_right, **changes)


NEIGHBOURS = (
    Ask(prompt=(9, 9), max_tokens=30, gamma=3, run=2),
    Ask(prompt=tuple(range(30, 60)), max_tokens=18, gamma=6, run=1),
)


def checked(asks, *, right="deep", setting=SMALL, **changes):
    """Runs all rounds with trees as drafts; checks each sequence against decoding."""
    scheduler = scheduler_of(right, setting=setting, num_slots=len(asks), **changes)
    return decoding.checked(setting, asks, scheduler=scheduler)


def asks_of(ask, num_slots):
    return [ask, *NEIGHBOURS][:num_slots]


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize(
    ("impl", "cache", "num_slots"),
    [
        ("native", "paged", 1),
        slow("native", "static", 3),
        slow("xla", "paged", 1),
        slow("xla", "paged", 3),
    ],
)
def test_tokens_and_kv_are_those_of_decoding(impl, cache, num_slots, right):
    """Fails if a node off the path is kept, or the K/V of the path are not moved."""
    setting = decoding.setting_of(impl, cache=cache)
    for gamma in (0, 1, 3, 6, WIDTH):
        for runs in (1, ALWAYS):
            asks = asks_of(Ask(gamma=gamma, run=runs), num_slots)
            state = checked(asks, right=right, setting=setting)
            if right == "none" or gamma == 0:
                assert decoding.slot_of(state).num_rounds == 40


def test_counters_by_depth_and_rank(num_slots=3):
    """Fails if counters by depth count columns, or counters by rank count depths."""
    asks = asks_of(Ask(gamma=WIDTH), num_slots)
    state = checked(asks, right="deep")
    one = decoding.slot_of(state)
    assert one.num_rounds == 10 and one.num_proposed == 10 * WIDTH
    assert one.accepted_hist.tolist() == [0, 0, 0, 10]
    assert one.proposed_at.tolist() == one.accepted_at.tolist() == [10] * DEPTH
    ranks = [10 if node in RIGHT["deep"] else 0 for node in range(WIDTH)]
    assert one.kept_by_rank.tolist() == ranks
    origins = np.asarray(one.origins)[len(PROMPT) : int(one.length)]
    assert np.bincount(origins).tolist() == [0, 30, 0, 10]
    assert origins[DEPTH] == Origin.BONUS


@pytest.mark.parametrize("num_slots", [1, 3])
def test_max_tokens_is_met_exactly(num_slots):
    """Fails if a committed path runs past the limit, which drafted nodes may do, or if
    nodes that find no place in a full cache end a sequence early."""
    full = decoding.CAPACITY + 1 - len(PROMPT)
    for few in (1, 2, 3, 4, 5, 9, 200):
        state = checked(asks_of(Ask(gamma=WIDTH, max_tokens=few), num_slots))
        one = decoding.slot_of(state)
        assert int(one.length) == len(PROMPT) + min(few, full)
        assert (one.status == Status.CAPACITY) == (few > full)


def test_a_small_pool_is_shared():
    """Fails if admission counts no pages for nodes: a slot would find no page."""
    # The text fills six pages, and the nodes of the last rounds need a seventh. The
    # requests are alike, so that all slots want it at once.
    full = 6 * decoding.PAGE_SIZE + 1
    asks = [Ask(max_tokens=full - len(PROMPT), gamma=WIDTH)] * 3
    # Pages are held back as data, so that the executable is that of all pages.
    state = scheduler_of(num_slots=3).empty(draws=False)
    state = state.replace(cache=state.cache.replace(num_free=jnp.int32(14 - 3)))
    scheduler = scheduler_of(num_slots=3, num_pages=14)
    requests = [decoding.scripted(SMALL, ask) for ask in asks]
    for finished in scheduler.run(requests, state=state):
        expected = decoding.decoded(SMALL, asks[finished.number])
        prompt = asks[finished.number].prompt
        assert finished.tokens == decoding.text(expected)[len(prompt) :]


def test_what_was_recorded_is_what_decoding_saw():
    """Fails if entries stay at the places of nodes, or come from other nodes."""
    asks = asks_of(Ask(gamma=WIDTH, run=2), 3)
    alone = recorder.Recorder(target=SMALL.target)
    for right in ("deep", "second"):
        made = scheduler_of(right, num_slots=3)
        watched = recorder.Recorder(target=made.target)
        requests = [decoding.scripted(SMALL, ask) for ask in asks]
        state = watched.attach(decoding.admit(made, requests))
        watching = scheduler_of(right, num_slots=3, target=watched)
        _, found = watched.detach(decoding.generate(watching, state))
        for slot, ask in enumerate(asks):
            plain = alone.attach(decoding.begun(SMALL, ask))
            how = {"max_steps": decoding.FOREVER}
            plain = baseline.generate(alone, SMALL.weights, plain, **how)
            _, expected = alone.detach(plain)
            at = slice(len(ask.prompt) - 1, len(ask.prompt) - 1 + ask.max_tokens)
            for name in ("log_prob", "logits_hash", "constant"):
                testing.assert_same_bits(
                    np.asarray(getattr(found, name))[slot, at],
                    np.asarray(getattr(expected, name))[0, at],
                    what=f"{name} of slot {slot}",
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherParents(ScriptedTree):
    """Proposes trees in which some parents do not come before their children; or
    chains, although it has the `depth_max` of a drafter of trees."""

    parents: tuple[int, ...] | None = tuple(range(WIDTH, 0, -1))

    def propose(self, params, memory, **text):
        memory, proposal = super().propose(params, memory, **text)
        parents = self.parents and jnp.array(self.parents, jnp.int32)
        return memory, proposal.replace(parents=parents)


def test_parents_that_are_none_commit_nothing_wrong():
    """Fails if rows and acceptance read different trees from invalid parents."""
    for right in ("deep", "equal"):
        checked([Ask(gamma=WIDTH)], right=right, drafter=OtherParents())


@pytest.mark.parametrize("rule", (slow("rejection"), "block"))
def test_rules_by_uniforms_are_greedy_at_temperature_zero(rule, right="second"):
    """Checks that certain drafts keep the tokens of decoding, limits included."""
    checked([Ask(gamma=WIDTH, run=3), Ask(gamma=4, run=2)], right=right, rule=rule)


def test_what_cannot_be_a_tree_is_refused():
    with pytest.raises(ValueError, match="depth_max=3, and proposes no parents"):
        checked([Ask()], drafter=OtherParents(parents=None))
    with pytest.raises(ValueError, match="object chooses the length of a chain"):
        scheduler_of("none", gamma_policy=object(), policy_state=())
    wide = goodput.RankGoodput(gamma_max=WIDTH + 1)
    ranks = {"gamma_policy": wide, "policy_state": wide.init(np.ones(WIDTH + 2))}
    with pytest.raises(ValueError, match=f"up to rank {WIDTH + 1}, and .*={WIDTH}:"):
        scheduler_of("none", **ranks)


WIDEST = protocols.MAX_TREE_ROWS  # of a window, with the root's row
REPEATS = (7, 3, 90, 7, 3, 41, 7, 3)
WIDE = (
    Ask(prompt=REPEATS, max_tokens=24, gamma=None, sampling=decoding.COLD),
    Ask(prompt=REPEATS, max_tokens=20, gamma=None, sampling=decoding.WARM),
    Ask(prompt=(9,), max_tokens=12, gamma=40, sampling=decoding.COLD),
)
WEIGHTS = decoding.perturbed(decoding.TARGET_PARAMS, 0.05)


def of_drafts(setting, rows, num_slots):
    """Returns a scheduler whose drafts are often wrong, so that trees matter."""
    tree = tree_shapes.parse(f"8x8:{rows - 1}@1")
    drafter = decoding.draft_drafter(impl=setting.target.impl).for_tree(tree)
    return setting.scheduler(drafter, num_slots=num_slots, draft_params=WEIGHTS)


@pytest.mark.parametrize(
    ("rows", "impl"), [slow(64, "native"), (WIDEST, "native"), slow(WIDEST, "xla")]
)
def test_tokens_are_those_of_decoding_at_each_budget(rows, impl):
    """Fails if a row does not see a node of an earlier tile, or a branch is cut."""
    setting = dataclasses.replace(decoding.setting_of(impl), capacity=400)
    state = decoding.rounds(of_drafts(setting, rows, len(WIDE)), WIDE)
    decoding.assert_as_decoded(setting, state, WIDE)
    slots = jax.device_get(state.slots)
    # Nodes past the first 64 were proposed, and some of them were kept.
    assert slots.num_proposed[0] == (rows - 1) * slots.num_rounds[0]
    assert slots.num_proposed[2] == 40 * slots.num_rounds[2]
    if rows > 64:
        assert np.asarray(slots.kept_by_rank)[:, 63:].sum() > 0


TAPS = (1, 0)  # not in order; of two layers, without the last output


class Noted:
    """A mixin that records the features that a drafter gets, beside its script."""

    def init(self, *, capacity, page_size):
        script = super().init(capacity=capacity, page_size=page_size)
        table = jnp.full((script.shape[0], len(self.taps), 48), jnp.nan)
        return {"script": script, "table": table, "end": jnp.int32(0)}

    def prefill(self, params, memory, prompt, features):
        script = super().prefill(params, memory["script"], prompt)
        end = len(prompt) - 1
        table = memory["table"].at[:end].set(features[:end])
        return {"script": script, "table": table, "end": jnp.int32(end)}

    def propose(self, params, memory, **asked):
        _, proposal = super().propose(params, memory["script"], **asked)
        return memory, proposal

    def commit(self, params, memory, length, features=None):
        if features is None:  # The slot is released.
            return memory | {"end": length - 1}
        steps = jnp.arange(features.shape[0])
        at = memory["end"] + steps
        at = jnp.where(at < length - 1, at, memory["table"].shape[0])
        table = memory["table"].at[at].set(features, mode="drop")
        return memory | {"table": table, "end": length - 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotedChain(Noted, decoding.Scripted):
    """Proposes the script."""

    taps: tuple[int, ...] = TAPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotedTree(Noted, ScriptedTree):
    """Proposes trees, right in some branches."""

    taps: tuple[int, ...] = TAPS


CHAIN, TREE = NotedChain(), NotedTree()


def of_decoding(ask) -> np.ndarray:
    """Returns the features of all but the last token of a text, from rows of many
    columns, which give what decoding gives."""
    kv, text = SMALL.target.new_cache(**SMALL.sizes), decoding.decoded(SMALL, ask)
    how = {"taps": TAPS, "by_rows": True}
    text = decoding.text(text)[:-1]
    _, features = SMALL.target.prefill(SMALL.weights, kv, text, **how)
    return np.asarray(features)[: len(text)]


ASKS = (
    Ask(max_tokens=24, run=2),
    Ask(prompt=(9,), max_tokens=20, gamma=3, run=1),
    Ask(prompt=tuple(range(30, 50)), max_tokens=18, run=3),
    Ask(prompt=(7, 3, 90), max_tokens=9, gamma=0),
)


@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
def test_features_are_those_of_decoding(drafter):
    """Fails if features of a rejected row or another branch are given, or too many."""
    scheduler = scheduler_of(drafter=drafter, num_slots=len(ASKS))
    state = decoding.checked(SMALL, ASKS, scheduler=scheduler)
    for slot, ask in enumerate(ASKS):
        table = np.asarray(state.memory.slots["table"][slot])
        expected = of_decoding(ask)
        testing.assert_same_bits(table[: len(expected)], expected)
        assert np.isnan(table[len(expected) :]).all()


@pytest.mark.parametrize("impl", ["native", "xla"])
def test_rows_have_the_features_of_the_sequence(impl):
    """Compares features of rows with a sequence's, which equal Hugging Face's."""
    model, prompt = decoding.setting_of(impl).target, list(range(30, 50))
    made = []
    for by_rows in (True, False):
        kv, how = model.new_cache(**SMALL.sizes), {"taps": TAPS, "by_rows": by_rows}
        _, features = model.prefill(SMALL.weights, kv, prompt, **how)
        made.append(np.moveaxis(np.asarray(features)[: len(prompt)], 1, 0))
    for found, expected in zip(*made, strict=True):
        testing.assert_rows_close(found, expected, dtype="float32", reduction=200)
