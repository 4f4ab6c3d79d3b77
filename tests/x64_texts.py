"""What a tiny pair writes in each way that the library has: for `test_x64`.

Run as a script it prints the texts as JSON, in whatever width JAX has by default.
"""

import json
import sys

import decoding
import jax
import jax.numpy as jnp
import numpy as np
from spec_jax.batch import drafters, queue, rows

from experiments.ablations import decode_rounds
from spec_jax import autoregressive, rounds, session
from spec_jax.drafters import draft_model, hybrid, ngram, suffix
from spec_jax.engine import protocols
from spec_jax.gamma import goodput, policy, threshold
from spec_jax.model import row_model
from spec_jax.rules import sampling
from spec_jax.testing import bench


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


PROBING = policy.Probing(every=2, longest=8)


def adaptive() -> tuple[goodput.Goodput, goodput.GoodputState]:
    """A policy of gamma that moves within a few rounds, and its first state."""
    made = goodput.Goodput(gamma_max=GAMMA_MAX, probing=PROBING)
    return made, made.init(np.array([1.0, 1.3, 1.45, 1.6, 1.75]))


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


def speculative(settings) -> list[int]:
    drafter, draft_params = mixed(settings)
    params = PARAMS, draft_params
    gamma_policy, policy_state = adaptive()
    state = begin(drafter, params, settings, policy_state=policy_state)
    return read(
        rounds.generate(
            TARGET, drafter, params, state, **LOOP, gamma_policy=gamma_policy
        )
    )


def batched(settings) -> list[list[int]]:
    drafter, draft_params = mixed(settings)
    gamma_policy, policy_state = adaptive()
    batch = queue.Batch(
        target=rows.RowBatch(model=TARGET, num_slots=2),
        drafter=drafters.of(drafter, 2),
        params=(PARAMS, draft_params),
        gamma_policy=gamma_policy,
        policy_state=policy_state,
        **SIZES,
    )
    request = queue.Request(prompt=PROMPT, max_tokens=MAX_TOKENS, settings=settings)
    return [read(one.state) for one in batch.run([request] * 2)]


def trace_the_rest() -> None:
    """Traces what is not run: loops whose dtypes would change as they turn."""
    settings = sampling.make_settings(**SETTINGS["sampled"])
    one = draft(draws="independent", min_confidence=0.01)
    params = PARAMS, draft_model.SampledParams(weights=PARAMS, settings=settings)
    state = begin(one, params, settings)
    for rule in ("rejection", "block"):
        rounds.generate.trace(TARGET, one, params, state, **LOOP, rule=rule)
    inner = decode_rounds.init_state(state, commit_cache=state.cache)
    decode_rounds.generate.trace(TARGET, TARGET, one, params, inner, **LOOP)
    ladder = threshold.Threshold(probing=PROBING)
    found = ngram.PromptLookup(gamma_max=GAMMA_MAX)
    state = begin(found, (PARAMS, None), None, policy_state=ladder.init(2))
    rounds.generate.trace(
        TARGET, found, (PARAMS, None), state, **LOOP, gamma_policy=ladder
    )


def main() -> None:
    """Prints what each way writes with each of `SETTINGS`."""
    found = {"x64": jax.config.jax_enable_x64}
    for name, values in SETTINGS.items():
        settings = sampling.make_settings(**values)
        found[name] = [plain(settings), speculative(settings), *batched(settings)]
    trace_the_rest()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
