"""A tiny model, and drafters that are right or wrong on purpose: shared by tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import autoregressive, rounds, session
from spec_jax.drafters import draft_model
from spec_jax.engine import protocols
from spec_jax.model import config as config_lib, params as params_lib, row_model
from spec_jax.ops import dispatch
from spec_jax.paging import cache
from spec_jax.rules import acceptance
from spec_jax.testing import bench


GAMMA_MAX = 4
CAPACITY = 96
PAGE_SIZE = 8
PROMPT = [7, 3, 90, 41, 5, 66, 23, 8, 14, 2, 77]
NO_STOP = session.stop_array(())
FOREVER = jnp.int32(10_000)


def make_config(**changes) -> config_lib.Qwen3Config:
    """A two-layer model with 96 tokens."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    return config_lib.Qwen3Config(**(sizes | changes))


TARGET = row_model.RowModel(config=make_config(), impl="xla", slab=GAMMA_MAX + 1)
TARGET_PARAMS = params_lib.init(jax.random.key(0), TARGET.config, stddev=0.3)
NATIVE = dataclasses.replace(TARGET, impl="native")


def quickest() -> row_model.RowModel:
    """The target on native kernels, where they can be had: compiled in a third.

    For what no kernel has a part in: policies, counters, rules, verify paths.
    """
    try:
        dispatch.resolve("native")
    except NotImplementedError:
        return TARGET
    return NATIVE


DRAFT_CONFIG = make_config(num_layers=1, hidden_size=32, intermediate_size=48)
DRAFT_PARAMS = params_lib.init(jax.random.key(1), DRAFT_CONFIG, stddev=0.3)


def quickest_bench(gamma_max: int) -> bench.Bench:
    """The tiny bench of drafters, on the implementation of `quickest`."""
    made = bench.tiny(gamma_max)
    target = dataclasses.replace(made.target, impl=quickest().impl)
    return dataclasses.replace(made, target=target)


def draft_drafter(config=DRAFT_CONFIG, *, impl="xla") -> draft_model.DraftModel:
    """A draft model of random weights: nearly always wrong."""
    model = row_model.RowModel(config=config, impl=impl, slab=2)
    return draft_model.DraftModel(model=model, gamma_max=GAMMA_MAX)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted:
    """Proposes the text that it is given as its memory: see `script`.

    What it proposes is data, so that right and wrong drafts share an executable.
    """

    gamma_max: int = GAMMA_MAX

    def propose(self, params, memory, *, tokens, length, gamma):
        del params, tokens
        at = length + jnp.arange(self.gamma_max)
        drafts = memory.at[at].get(mode="fill", fill_value=acceptance.PAD)
        return memory, protocols.Proposal(tokens=drafts, num_drafted=gamma)

    def commit(self, params, memory, length):
        del params, length
        return memory


ALWAYS = 1_000_000
"""A `run` of right drafts that is longer than any text here."""


def script(truth, *, run: int = ALWAYS) -> jax.Array:
    """The text with every token behind `run` right ones wrong; `run=0`: all of them.

    Always a copy: donating the state must not take the caller's array.
    """
    text = np.array(truth)
    text[run :: run + 1] = (text[run :: run + 1] + 1) % 96
    return jnp.asarray(text)


def plain(
    prompt=PROMPT,
    *,
    max_tokens=40,
    stop_ids=NO_STOP,
    capacity=CAPACITY,
    target=TARGET,
    params=TARGET_PARAMS,
):
    """Plain decoding of the tiny target."""
    kv = target.new_cache(capacity=capacity, page_size=PAGE_SIZE)
    state = session.begin_plain(target, params, kv, prompt, max_tokens=max_tokens)
    return autoregressive.generate(
        target, params, state, stop_ids=stop_ids, max_steps=FOREVER
    )


def begin_scripted(
    truth,
    prompt=PROMPT,
    *,
    run=ALWAYS,
    max_tokens=40,
    capacity=CAPACITY,
    target=TARGET,
):
    """The state before the first round of a `Scripted` drafter: see `script`."""
    kv = target.new_cache(capacity=capacity, page_size=PAGE_SIZE)
    start = session.begin_plain(
        target, TARGET_PARAMS, kv, prompt, max_tokens=max_tokens
    )
    return rounds.init_state(
        start.tokens,
        length=start.length,
        limit=start.limit,
        cache=start.cache,
        memory=script(truth, run=run),
        gamma_max=GAMMA_MAX,
    )


def begin_drafted(
    drafter, draft_params, prompt=PROMPT, *, max_tokens=40, target=TARGET
):
    """The state before the first round of a draft model."""
    sizes = {"capacity": CAPACITY, "page_size": PAGE_SIZE}
    return session.begin(
        target,
        drafter,
        (TARGET_PARAMS, draft_params),
        target.new_cache(**sizes),
        drafter.model.new_cache(**sizes),
        prompt,
        max_tokens=max_tokens,
    )


def generate(
    drafter,
    state,
    *,
    gamma=GAMMA_MAX,
    stop_ids=NO_STOP,
    draft_params=None,
    target=TARGET,
):
    """All rounds in one call."""
    return rounds.generate(
        target,
        drafter,
        (TARGET_PARAMS, draft_params),
        state,
        gamma=jnp.int32(gamma),
        stop_ids=stop_ids,
        max_rounds=FOREVER,
    )


def held(kv, length: int, *, slot: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Keys and values of the first positions of a slot, of each layer.

    Every position is gathered, whatever the length, so that no length is compiled.
    """
    layers = range(len(kv.k))
    whole = [cache.gather(kv, layer, slot, kv.slot_capacity) for layer in layers]
    return jax.tree.map(lambda x: np.asarray(x)[:length], whole)


def text(state) -> list[int]:
    """Committed tokens, the prompt included."""
    return np.asarray(state.tokens)[: int(state.length)].tolist()
