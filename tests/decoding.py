"""A tiny model, and drafters that are right or wrong on purpose: shared by tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import acceptance, autoregressive, protocols, rounds, session
from spec_jax.drafters import draft_model
from spec_jax.model import config as config_lib, params as params_lib, row_model


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
DRAFT_CONFIG = make_config(num_layers=1, hidden_size=32, intermediate_size=48)
DRAFT_PARAMS = params_lib.init(jax.random.key(1), DRAFT_CONFIG, stddev=0.3)


def draft_drafter(config=DRAFT_CONFIG) -> draft_model.DraftModel:
    """A draft model of random weights: nearly always wrong."""
    model = row_model.RowModel(config=config, impl="xla", slab=2)
    return draft_model.DraftModel(model=model, gamma_max=GAMMA_MAX)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted:
    """Proposes a given text, right for `run` positions and wrong at the next.

    The memory is the text; `run=0` is always wrong, a large `run` always right.
    """

    run: int
    gamma_max: int = GAMMA_MAX

    def propose(self, params, memory, *, tokens, length, gamma):
        del params, tokens
        at = length + jnp.arange(self.gamma_max)
        truth = memory.at[at].get(mode="fill", fill_value=acceptance.PAD)
        wrong = at % (self.run + 1) == self.run
        drafts = jnp.where(wrong, (truth + 1) % 96, truth)
        return memory, protocols.Proposal(tokens=drafts, num_drafted=gamma)

    def commit(self, params, memory, length):
        del params, length
        return memory


def plain(
    prompt=PROMPT,
    *,
    max_tokens=40,
    stop_ids=NO_STOP,
    capacity=CAPACITY,
    target=TARGET,
):
    """Plain decoding of the tiny target."""
    kv = target.new_cache(capacity=capacity, page_size=PAGE_SIZE)
    state = session.begin_plain(
        target, TARGET_PARAMS, kv, prompt, max_tokens=max_tokens
    )
    return autoregressive.generate(
        target, TARGET_PARAMS, state, stop_ids=stop_ids, max_steps=FOREVER
    )


def begin_scripted(
    truth, prompt=PROMPT, *, max_tokens=40, capacity=CAPACITY, target=TARGET
):
    """The state before the first round of a `Scripted` drafter."""
    kv = target.new_cache(capacity=capacity, page_size=PAGE_SIZE)
    start = session.begin_plain(
        target, TARGET_PARAMS, kv, prompt, max_tokens=max_tokens
    )
    return rounds.init_state(
        start.tokens,
        length=start.length,
        limit=start.limit,
        cache=start.cache,
        # A copy: donating the state must not take the caller's array.
        memory=jnp.array(truth),
        gamma_max=GAMMA_MAX,
    )


def begin_drafted(drafter, draft_params, prompt=PROMPT, *, max_tokens=40):
    """The state before the first round of a draft model."""
    sizes = {"capacity": CAPACITY, "page_size": PAGE_SIZE}
    return session.begin(
        TARGET,
        drafter,
        (TARGET_PARAMS, draft_params),
        TARGET.new_cache(**sizes),
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


def text(state) -> list[int]:
    """Committed tokens, the prompt included."""
    return np.asarray(state.tokens)[: int(state.length)].tolist()
