"""What a tiny pair writes in every way the library has: for `test_x64`.

Run as a script it prints the texts as JSON, in whatever width JAX has by default.
"""

import json
import sys

import decoding
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import (
    autoregressive,
    bench,
    decode_rounds,
    protocols,
    rounds,
    sampling,
    session,
)
from spec_jax.batch import drafters, queue, rows
from spec_jax.drafters import draft_model, hybrid, suffix
from spec_jax.gamma import goodput, policy, threshold
from spec_jax.model import row_model


GAMMA_MAX = 4
PROMPT = [7, 3, 90, 7, 3, 41, 7, 3]
MAX_TOKENS = 12
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.001,
        "seed": 3,
    },
}
BENCH = decoding.quickest_bench(GAMMA_MAX)
TARGET, PARAMS, SIZES = BENCH.target, BENCH.params, BENCH.sizes
LOOP = {
    "gamma": jnp.int32(GAMMA_MAX),
    "stop_ids": decoding.NO_STOP,
    "max_rounds": decoding.FOREVER,
}


def draft(**changes) -> draft_model.DraftModel:
    model = row_model.RowModel(config=bench.TINY, impl=TARGET.impl, slab=2)
    return draft_model.DraftModel(model=model, gamma_max=GAMMA_MAX, **changes)


def mixed(settings) -> tuple[protocols.Drafter, hybrid.HybridParams]:
    """Suffix statistics and a draft model that draws, and their parameters."""
    corpus = suffix.remember(suffix.empty_corpus(16), [1, 2, 3, 4, 8, 8, 9])
    params = draft_model.SampledParams(weights=PARAMS, settings=settings)
    drafter = hybrid.Hybrid(
        suffix=suffix.SuffixDecoding(gamma_max=GAMMA_MAX),
        draft=draft(draws="sample-path", catch_up_rows=8),
    )
    return drafter, hybrid.HybridParams(draft=params, corpus=corpus)


def policies():
    """Each policy that adapts, and its first state."""
    probing = policy.Probing(every=2, longest=8)
    times = np.array([1.0, 1.3, 1.45, 1.6, 1.75])
    adaptive = goodput.Goodput(gamma_max=GAMMA_MAX, probing=probing)
    ladder = threshold.Threshold(probing=probing)
    return (adaptive, adaptive.init(times)), (ladder, ladder.init(2))


def read(state) -> list[int]:
    """The text, once no leaf of the state is wider than what it was begun with."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.dtype.itemsize > 4:
            raise TypeError(f"{jax.tree_util.keystr(path)} is {leaf.dtype}")
    return session.committed(state)


def plain(settings) -> list[int]:
    state = session.begin_plain(
        TARGET,
        PARAMS,
        TARGET.new_cache(**SIZES),
        PROMPT,
        max_tokens=MAX_TOKENS,
        settings=settings,
    )
    state = autoregressive.generate(
        TARGET,
        PARAMS,
        state,
        stop_ids=decoding.NO_STOP,
        max_steps=decoding.FOREVER,
    )
    return read(state)


def begin(drafter, params, settings, *, policy_state=None):
    return session.begin(
        TARGET,
        drafter,
        params,
        TARGET.new_cache(**SIZES),
        drafter.init(**SIZES),
        PROMPT,
        max_tokens=MAX_TOKENS,
        settings=settings,
        policy=policy_state,
    )


def speculative(settings, gamma_policy, policy_state) -> list[int]:
    drafter, draft_params = mixed(settings)
    params = PARAMS, draft_params
    state = begin(drafter, params, settings, policy_state=policy_state)
    return read(
        rounds.generate(
            TARGET, drafter, params, state, **LOOP, gamma_policy=gamma_policy
        )
    )


def by_rule(settings, rule) -> list[int]:
    drafter = draft(draws="independent", min_confidence=0.01)
    params = PARAMS, draft_model.SampledParams(weights=PARAMS, settings=settings)
    state = begin(drafter, params, settings)
    return read(rounds.generate(TARGET, drafter, params, state, **LOOP, rule=rule))


def decoded(settings) -> list[int]:
    drafter, draft_params = mixed(settings)
    params = PARAMS, draft_params
    kv = session.prefill(TARGET, PARAMS, TARGET.new_cache(**SIZES), PROMPT)
    state = decode_rounds.init_state(begin(drafter, params, settings), commit_cache=kv)
    state = decode_rounds.generate(TARGET, TARGET, drafter, params, state, **LOOP)
    return read(state.inner)


def batched(settings) -> list[list[int]]:
    drafter, draft_params = mixed(settings)
    gamma_policy, policy_state = policies()[0]
    batch = queue.Batch(
        target=rows.RowBatch(model=TARGET, num_slots=2),
        drafter=drafters.of(drafter, 2),
        params=(PARAMS, draft_params),
        gamma_policy=gamma_policy,
        policy_state=policy_state,
        **SIZES,
    )
    request = queue.Request(prompt=PROMPT, max_tokens=MAX_TOKENS, settings=settings)
    return [read(one.state) for one in batch.run([request] * 3)]


def texts() -> dict[str, list]:
    """The text of each way, by a name that says which are to be equal."""
    found = {}
    for name, values in SETTINGS.items():
        settings = sampling.make_settings(**values)
        found[f"plain {name}"] = plain(settings)
        for gamma_policy, state in policies():
            kind = type(gamma_policy).__name__
            found[f"{kind} {name}"] = speculative(settings, gamma_policy, state)
        found[f"decoded {name}"] = decoded(settings)
        found[f"batch {name}"] = batched(settings)
        for rule in ("rejection", "block"):
            found[f"{rule} {name}"] = by_rule(settings, rule)
    return found


if __name__ == "__main__":
    json.dump({"x64": jax.config.jax_enable_x64, **texts()}, sys.stdout)
