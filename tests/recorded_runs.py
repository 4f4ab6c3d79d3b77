"""The evidence of generations alone, without decoding to compare them with."""

from spec_jax import lossless, run as run_lib
from spec_jax.debug import evidence


def evidence_of(lm, prompts, **settings) -> list[evidence.Evidence]:
    """Generates prompts together, a slot each, and returns the evidence of each; takes
    the settings of `check_lossless`, but any rule."""
    run = run_lib.Run.make(lm, prompts, num_slots=len(prompts), **settings)
    return evidence_in(lossless._generate(run, range(len(prompts))), run)


def evidence_in(state, run: run_lib.Run) -> list[evidence.Evidence]:
    """Returns the evidence of each request of a run, which has a slot of its own."""
    layout = run.lm.target.layout
    if layout is not None:  # Other processes hold parts of it.
        state = layout.gather(state)
    return [
        evidence.of_slot(state, num_prompt=len(one.prompt), slot=slot)
        for slot, one in enumerate(run.requests)
    ]
