"""What a tiny pair writes in each way that the library has: for `test_x64`.

Run as a script it prints the texts as JSON, in whatever width JAX has by default.
"""

import json
import sys

import decoding
import jax
import numpy as np
from decoding import GAMMA_MAX, SMALL, Ask

from spec_jax.drafters import hybrid, ngram, suffix
from spec_jax.engine import round as round_lib, scheduler as scheduler_lib
from spec_jax.gamma import goodput, policy, threshold


KINDS = {
    "greedy": (),
    "sampled": (
        ("temperature", 0.9),
        ("top_k", 40),
        ("top_p", 0.95),
        ("min_p", 0.001),
        ("seed", 3),
    ),
}
PROBING = policy.Probing(every=2, longest=8, bound=1.0)


def ask(name: str) -> Ask:
    prompt = (7, 3, 90, 7, 3, 41, 7, 3)
    return Ask(prompt=prompt, max_tokens=12, sampling=KINDS[name])


def scheduler_of(num_slots: int) -> scheduler_lib.Scheduler:
    """Suffix statistics and a draft model that draws, and a policy that moves."""
    corpus = suffix.remember(suffix.empty_corpus(16), [1, 2, 3, 4, 8, 8, 9])
    drafter = hybrid.Hybrid(
        suffix=suffix.SuffixDecoding(gamma_max=GAMMA_MAX),
        draft=decoding.draft_drafter(impl=SMALL.target.impl, catch_up_rows=8),
    )
    made = goodput.Goodput(gamma_max=GAMMA_MAX, probing=PROBING)
    return SMALL.scheduler(
        drafter,
        num_slots=num_slots,
        draft_params=hybrid.HybridParams(draft=SMALL.weights, corpus=corpus),
        gamma_policy=made,
        policy_state=made.init(np.array([1.0, 1.3, 1.45, 1.6, 1.75])),
    )


def check_widths(state) -> None:
    """Raises where a leaf is wider than what the loops were written for."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.dtype.itemsize > 4:
            raise TypeError(f"{jax.tree_util.keystr(path)} is {leaf.dtype}")


def texts_of(name: str) -> list[list[int]]:
    """The texts of decoding, and of two slots."""
    state = decoding.decoded(SMALL, ask(name))
    check_widths(state)
    found = [decoding.text(state)]
    scheduler = scheduler_of(num_slots=2)
    # The drawing program takes greedy requests, too: one compilation.
    state = decoding.admit(scheduler, [ask(name).request()] * 2, draws=True)
    state = decoding.generate(scheduler, state)
    check_widths(state)
    return found + [decoding.text(state, slot) for slot in range(2)]


def trace(scheduler: scheduler_lib.Scheduler, *, draws: bool) -> None:
    """Traces all rounds of the slots, and checks what they begin with."""
    state = scheduler.empty(draws=draws)
    check_widths(state)
    round_lib.generate.trace(scheduler.speculator, state, max_rounds=decoding.FOREVER)


def trace_the_rest() -> None:
    """Traces what is not run: loops whose dtypes would change as they turn."""
    draft = decoding.draft_drafter(impl=SMALL.target.impl, min_confidence=0.01)
    ladder = threshold.Threshold(probing=PROBING)
    found = ngram.PromptLookup(gamma_max=GAMMA_MAX)
    adaptive = {"gamma_policy": ladder, "policy_state": ladder.init(2)}
    for scheduler in (
        *(
            SMALL.scheduler(draft, num_slots=2, draft_params=SMALL.weights, rule=rule)
            for rule in ("rejection", "block")
        ),
        SMALL.scheduler(found, **adaptive),
    ):
        for draws in (False, True):
            trace(scheduler, draws=draws)


def main() -> None:
    """Prints what each way writes with each of `KINDS`."""
    found = {"x64": jax.config.jax_enable_x64}
    found |= {name: texts_of(name) for name in KINDS}
    trace_the_rest()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
