"""Tiny models and sequences for tests, decoded autoregressively and speculatively.

The oracle is `engine.baseline`: whatever sequences share its batch, a sequence must
have the tokens and the K/V that decoding it alone gives, as integers.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import page_tables
import pytest
import random_weights
import tiny_pair

from spec_jax import algorithms, testing
from spec_jax.analysis import metrics
from spec_jax.drafters import draft_model, each
from spec_jax.engine import (
    baseline,
    checks,
    protocols,
    requests as requests_lib,
    round as round_lib,
    rows,
    scheduler as scheduler_lib,
    state as states,
)
from spec_jax.model import params as params_lib, row_model
from spec_jax.ops import dispatch
from spec_jax.paging import cache as paged
from spec_jax.rules import acceptance, sampling as sampling_lib
from spec_jax.testing import bench


GAMMA_MAX = 4
CAPACITY = 96
PAGE_SIZE = 8
PROMPT = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77]
FOREVER = jnp.int32(10_000)
Status = states.Status


make_config = functools.partial(
    tiny_pair.config, vocab_size=96, hidden_size=48, intermediate_size=80, num_layers=2,
    num_heads=4, num_kv_heads=2, max_position_embeddings=512,
)  # fmt: skip
"""A two-layer model with 96 tokens."""

TARGET = row_model.RowModel(config=make_config(), impl="xla", slab=GAMMA_MAX + 1)
TARGET_PARAMS = params_lib.init(jax.random.key(0), TARGET.config, stddev=0.3)
NATIVE = dataclasses.replace(TARGET, impl="native")


def needs(impl: str) -> None:
    """Skips the test if the implementation is not available."""
    try:
        dispatch.resolve(impl)
    except NotImplementedError as error:
        pytest.skip(str(error))


def quickest() -> row_model.RowModel:
    """Returns the target, native if possible, which compiles in a third of the time.
    Use it for tests that do not depend on kernels: of policies, counters, rules."""
    try:
        dispatch.resolve("native")
    except NotImplementedError:
        return TARGET
    return NATIVE


@functools.partial(jax.jit, static_argnames="model")
def _verify(model, params, kv, window):
    return rows.of(model, 1).verify(params, kv, window)


def forward(model, params, kv, tokens, start):
    """Runs tokens from position `start` of one slot; returns the cache and logits."""
    window = protocols.Window(
        tokens=jnp.asarray(tokens, jnp.int32)[None],
        start=jnp.asarray(start, jnp.int32)[None],
        num_active=jnp.full((1,), len(tokens), jnp.int32),
    )
    kv, verified = _verify(model, params, kv, window)
    return kv, verified.logits


def quickest_bench(gamma_max: int) -> bench.Bench:
    """Returns the tiny bench of drafters, on the implementation of `quickest`."""
    made = bench.tiny(gamma_max)
    target = dataclasses.replace(made.target, impl=quickest().impl)
    return dataclasses.replace(made, target=target)


def perturbed(params, scale: float, *, seed: int = 7):
    """Returns `params` with noise: a model that mostly, not always, agrees with it."""
    leaves, structure = jax.tree.flatten(params)
    keys = random_weights.split(jax.random.key(seed), len(leaves))
    moved = [
        np.asarray(leaf) + np.float32(scale) * random_weights.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.map(jnp.asarray, jax.tree.unflatten(structure, moved))


NEARLY_TARGET = perturbed(TARGET_PARAMS, 0.02)
"""Weights of a draft model that is sometimes right and sometimes wrong."""


def draft_drafter(config=TARGET.config, *, impl="xla", **changes):
    """Returns a draft model, by default of the target's shape."""
    model = row_model.RowModel(config=config, impl=impl, slab=2)
    return draft_model.DraftModel(model=model, gamma_max=GAMMA_MAX, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted:
    """A drafter that proposes the text in a request's `draft_params`: see `script`.

    Its proposals are data, so that right and wrong drafts share an executable.
    """

    gamma_max: int = GAMMA_MAX

    def init(self, *, capacity, page_size):
        return jnp.zeros((-(-capacity // page_size) * page_size + 1,), jnp.int32)

    def prefill(self, params, memory, prompt):
        return jnp.pad(params, (0, memory.shape[0] - params.shape[0]))

    def propose(self, params, memory, *, tokens, length, gamma):
        at = length + jnp.arange(self.gamma_max)
        drafts = memory.at[at].get(mode="fill", fill_value=acceptance.PAD)
        return memory, protocols.Proposal(tokens=drafts, num_drafted=gamma)

    def commit(self, params, memory, length):
        return memory


ALWAYS = 1_000_000
"""A `run` of right drafts that is longer than any text here."""


def script(truth, *, run: int = ALWAYS) -> jax.Array:
    """Returns the text, a wrong token after every `run` right ones; 0: all wrong."""
    text = np.array(truth, np.int32)
    text[run :: run + 1] = (text[run :: run + 1] + 1) % 96
    return jnp.asarray(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A sequence of a test; hashable, so that `decoded` decodes it once.

    Attributes:
      run: how many drafts of `Scripted` are right in a row.
      sampling: items of `make_settings`' keywords; () is greedy.
    """

    prompt: tuple[int, ...] = tuple(PROMPT)
    max_tokens: int = 40
    gamma: int | None = GAMMA_MAX
    run: int = ALWAYS
    stop_ids: tuple[int, ...] = ()
    sampling: tuple = ()

    @property
    def settings(self) -> sampling_lib.SamplingSettings | None:
        if not self.sampling:
            return None
        return sampling_lib.make_settings(**dict(self.sampling))

    def request(self, **params) -> requests_lib.Request:
        return requests_lib.Request(
            prompt=list(self.prompt),
            max_tokens=self.max_tokens,
            gamma=self.gamma,
            sampling=self.settings,
            stop_ids=self.stop_ids,
            **params,
        )


WARM = (("temperature", 0.7), ("top_k", 20), ("top_p", 0.8), ("seed", 3))
HOT = (("temperature", 2.0), ("seed", 2**32 - 1))
MIN_P = (("temperature", 1.0), ("min_p", 0.05), ("seed", 5))
COLD = (("temperature", 0.0),)

MIXED = (
    Ask(prompt=(5,), max_tokens=9, gamma=1, sampling=WARM, run=3),
    Ask(prompt=(1, 2, 3, 4) * 5, max_tokens=40, sampling=HOT, run=2),
    Ask(sampling=COLD, max_tokens=24, run=1),
    Ask(prompt=(60, 2, 60), max_tokens=1, gamma=3, sampling=MIN_P),
    Ask(prompt=(9, 9), max_tokens=30, gamma=0),
    Ask(prompt=tuple(range(30, 60)), max_tokens=18, gamma=2, sampling=WARM),
    Ask(prompt=(7, 3, 90, 7, 3, 41, 7, 3), max_tokens=17, gamma=4),
)
"""Sequences that differ in prompt, length, gamma and sampling; some are greedy."""

GREEDY = tuple(dataclasses.replace(ask, sampling=()) for ask in MIXED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The target, by default `quickest`, and capacity of a test's slots; hashable."""

    target: row_model.RowModel = dataclasses.field(default_factory=quickest)
    capacity: int = CAPACITY

    @property
    def weights(self) -> params_lib.Params:
        """`TARGET_PARAMS`, or as many layers of them, in the dtype of the target."""
        config = self.target.config
        params = TARGET_PARAMS.replace(layers=TARGET_PARAMS.layers[: config.num_layers])
        return jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)

    @property
    def sizes(self) -> dict[str, int]:
        return {"capacity": self.capacity, "page_size": PAGE_SIZE}

    def scheduler(
        self, drafter=None, *, num_slots=1, draft_params=None, rule="coupled", **changes
    ) -> scheduler_lib.Scheduler:
        """Returns a scheduler; `drafter` is of one sequence, by default `Scripted`."""
        algo = algorithms.speculative(
            changes.pop("target", self.target),
            drafter or Scripted(),
            rule=rule,
            policy=changes.pop("gamma_policy", None),
        )
        params = changes.pop("params", (self.weights, draft_params))
        sizes = {"num_stop": 1} | self.sizes | changes
        return algo.scheduler(params, num_slots=num_slots, **sizes)


SMALL = Setting()


def setting_of(impl: str, **changes) -> Setting:
    """Returns `SMALL` on an implementation; skips the test if that is not available."""
    needs(impl)
    return Setting(target=dataclasses.replace(TARGET, impl=impl, **changes))


def sampling_of(num_slots: int, **values) -> sampling_lib.SamplingSettings:
    """Returns the same settings for each slot, leaves `[num_slots]`."""
    one = sampling_lib.make_settings(**values)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_slots,)), one)


def padded(texts: Sequence[Sequence[int]], size: int, *, behind: int = 0) -> jax.Array:
    """Returns texts of slots, filled up with `behind`, `[B, size]` int32."""
    rows = [[*text, *[behind] * (size - len(text))] for text in texts]
    return jnp.array(rows, jnp.int32)


def begun(setting: Setting, ask: Ask) -> baseline.DecodeState:
    """Returns the state of decoding a sequence before its first step."""
    kv = setting.target.new_cache(**setting.sizes)
    how = {"max_tokens": ask.max_tokens, "stop_ids": ask.stop_ids}
    how["sampling"] = ask.settings
    return baseline.begin(setting.target, setting.weights, kv, ask.prompt, **how)


@functools.cache
def _decoded(setting: Setting, ask: Ask) -> baseline.DecodeState:
    return baseline.generate(
        setting.target, setting.weights, begun(setting, ask), max_steps=FOREVER
    )


def decoded(setting: Setting, ask: Ask) -> baseline.DecodeState:
    """Decodes a sequence on a paged cache, once for all values of `run` and `gamma`."""
    target = dataclasses.replace(setting.target, cache="paged")
    setting = dataclasses.replace(setting, target=target)
    return _decoded(setting, dataclasses.replace(ask, run=0, gamma=0))


def scripted(setting: Setting, ask: Ask) -> requests_lib.Request:
    """Returns the sequence's request, with drafts that are right by its `run`. Drafts
    past a stop token are the tokens that decoding without one writes."""
    truth = decoded(setting, dataclasses.replace(ask, stop_ids=())).tokens
    return ask.request(draft_params=script(truth, run=ask.run))


def admit(
    scheduler: scheduler_lib.Scheduler,
    requests: Sequence[requests_lib.Request] | Mapping[int, requests_lib.Request],
    *,
    draws: bool | None = None,
) -> states.State:
    """Admits requests to slots; by default `draws` is whether any of them samples."""
    placed = requests if isinstance(requests, Mapping) else dict(enumerate(requests))
    if draws is None:
        draws = any(one.sampling is not None for one in placed.values())
    state = scheduler.empty(draws=draws)
    for slot, request in placed.items():
        state = scheduler.admit(state, slot, request)
    return state


def generate(
    scheduler: scheduler_lib.Scheduler, state: states.State, **until
) -> states.State:
    """Runs rounds of all slots, in one call."""
    return round_lib.run(scheduler.speculator, state, **until)


def held(kv: paged.PagedKV, length: int, *, slot: int = 0) -> list[np.ndarray]:
    """Returns K of each layer, then V, of the first `length` positions of a slot."""
    positions = np.arange(length)
    pages = np.asarray(kv.page_table)[slot, positions // kv.page_size]
    at = pages, positions % kv.page_size
    return [np.asarray(pool)[at] for pool in (*kv.k, *kv.v)]


def text(state, slot: int = 0) -> list[int]:
    """Returns committed tokens, with the prompt, of a slot or of decoding."""
    if isinstance(state, states.State):
        state = requests_lib.slot_of(state.slots, slot)
    return np.asarray(state.tokens)[: int(state.length)].tolist()


def assert_in_place(compiled: jax.stages.Compiled, kv: paged.PagedKV) -> None:
    """Raises if a program copies the pool that it is given: the pool must be aliased,
    and temporary memory must be below an eighth of its size."""
    pool_bytes = sum(x.nbytes for x in (*kv.k, *kv.v))
    usage = compiled.memory_analysis()
    assert usage.alias_size_in_bytes >= pool_bytes
    assert usage.temp_size_in_bytes < pool_bytes / 8


def assert_proposes_in_place(drafter, params, memory, pool: paged.PagedKV) -> None:
    """Fails if a proposal of a drafter for slots copies `pool`, a part of `memory`."""
    number = jnp.ones((drafter.num_slots,), jnp.int32)
    tokens = jnp.zeros((drafter.num_slots, 64), jnp.int32)
    asked = {"tokens": tokens, "length": number, "gamma": number, "sampling": None}
    jitted = jax.jit(drafter.propose, donate_argnums=1)
    assert_in_place(jitted.lower(params, memory, **asked).compile(), pool)


def check_cache(kv: paged.PagedKV) -> None:
    """Checks the pages of either kind of cache, and that no operation was refused."""
    page_tables.check_integrity(kv)
    assert not bool(kv.refused.any())


def assert_as_decoded(
    setting: Setting,
    state: states.State,
    asks: Sequence[Ask] | Mapping[int, Ask],
    *,
    pages: bool = True,
) -> None:
    """Raises unless each slot equals its sequence decoded alone.

    Tokens and committed K/V must be equal as integers, statuses equal, counters valid.

    Args:
      pages: check the page table too; a test that took pages away has broken it.
    """
    placed = asks if isinstance(asks, Mapping) else dict(enumerate(asks))
    if pages:
        check_cache(state.cache)
    on_host = jax.device_get(state.slots)
    for slot, ask in placed.items():
        expected, one = decoded(setting, ask), requests_lib.slot_of(on_host, slot)
        checks.check_slot(one, vocab_size=setting.target.config.vocab_size)
        what = f"slot {slot}, {ask}"
        assert text(state, slot) == text(expected), what
        assert Status(int(one.status)) == Status(int(expected.status)), what
        length = int(one.length) - 1  # The last token is pending.
        assert int(state.cache.length[slot]) == length, what
        testing.assert_same_bits(
            held(state.cache, length, slot=slot), held(expected.cache, length)
        )
        count = int(one.length) - len(ask.prompt)
        metrics.identities(metrics.of_slot(one, num_tokens=count))
        assert requests_lib.generated(one) == text(expected)[len(ask.prompt) :]


def run(
    setting: Setting,
    asks: Sequence[Ask] | Mapping[int, Ask],
    *,
    scheduler: scheduler_lib.Scheduler | None = None,
    draws: bool | None = None,
    num_slots: int | None = None,
) -> states.State:
    """Runs all rounds of the sequences in their slots, drafted by `Scripted`."""
    placed = asks if isinstance(asks, Mapping) else dict(enumerate(asks))
    scheduler = scheduler or setting.scheduler(num_slots=num_slots or len(placed))
    requests = {slot: scripted(setting, ask) for slot, ask in placed.items()}
    return generate(scheduler, admit(scheduler, requests, draws=draws))


def checked(
    setting: Setting, asks: Sequence[Ask] | Mapping[int, Ask], **how
) -> states.State:
    """Calls `run`, and checks that each slot equals its sequence decoded alone."""
    state = run(setting, asks, **how)
    assert_as_decoded(setting, state, asks)
    return state


def prefilled(drafter, params, texts, **sizes):
    """Returns a drafter's slots, and their memory after one prompt each."""
    slots = each.lift(drafter, len(texts))
    memory = slots.init(**sizes)
    for slot, text in enumerate(texts):
        memory = slots.prefill(params, memory, text, slot=slot)
    return slots, memory


@functools.partial(jax.jit, static_argnames="drafter")
def propose(drafter, params, memory, **asked):
    """Calls `drafter.propose`, compiled as a whole: quicker than op by op."""
    return drafter.propose(params, memory, **asked)


def propose_after(
    slots, params, memory, texts, *, size=65, gamma=None, sampling=None, behind=0
):
    """Returns the memory and the proposal of slots, each after a text of its own."""
    gamma = [slots.gamma_max] * len(texts) if gamma is None else gamma
    asked = {
        "tokens": padded(texts, size, behind=behind),
        "length": jnp.array([len(text) for text in texts], jnp.int32),
        "gamma": jnp.array(gamma, jnp.int32),
    }
    return propose(slots, params, memory, **asked, sampling=sampling)


@functools.partial(jax.jit, static_argnames="drafter")
def commit(drafter, params, memory, length, **asked):
    """Calls `drafter.commit`, compiled as a whole."""
    return drafter.commit(params, memory, length, **asked)


def rounds(
    scheduler, asks: Sequence[Ask], *, draws: bool | None = None
) -> states.State:
    """Runs all rounds of sequences, with the drafter of the scheduler."""
    requests = [ask.request() for ask in asks]
    return generate(scheduler, admit(scheduler, requests, draws=draws))


def slot_of(state: states.State, slot: int = 0) -> states.Slots:
    """Returns one slot, on the host."""
    return requests_lib.slot_of(jax.device_get(state.slots), slot)
