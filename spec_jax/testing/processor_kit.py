"""The contract kit of logits processors: a state follows from a row's own tokens alone.

On the tiny target of `bench` or on another one. A processor that looks at siblings, or
counts calls, rounds or columns, breaks a clause.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import algorithms
from spec_jax.drafters import draft_model, tree_shapes
from spec_jax.engine import processing
from spec_jax.processors import processor as processor_lib
from spec_jax.rules import sampling as sampling_lib
from spec_jax.testing import bench as bench_lib, compare, drafter_kit


Processor = processor_lib.Processor
GAMMA = 4
TREE = tree_shapes.FixedTree.of_branching((2, 1))


def check_processor(
    processor: Processor, bench: bench_lib.Bench | None = None, *, seed: int = 0
) -> tuple[str, ...]:
    """Raises `AssertionError` unless a processor keeps all of `processors.Processor`.

    The message begins with the clause that is broken.

    Args:
      bench: `bench.tiny` where it is None, of 96 tokens.
      seed: of random tokens and logits.

    Returns:
      The names of the clauses that were checked.

    Raises:
      ValueError: a processor of another vocabulary.
    """
    bench = bench or bench_lib.tiny(GAMMA)
    processing.check(processor, vocab_size=bench.target.config.vocab_size)
    for check in _CLAUSES.values():
        check(processor, bench, np.random.default_rng(seed))
    return tuple(_CLAUSES)


_fail_if, _shapes = drafter_kit.fail_if, drafter_kit.shapes_of


def _begun(processor, bench, prompt, behind: int = 0) -> Any:
    """Returns the state after a prompt, in a buffer that holds `behind` after it."""
    text = np.full((bench.capacity + 1,), behind, np.int32)
    text[: len(prompt)] = prompt
    length = jnp.int32(len(prompt))
    vocab_size = bench.target.config.vocab_size
    return processor.init(jnp.asarray(text), length, vocab_size=vocab_size)


def _logits(bench, rng) -> jax.Array:
    size = bench.target.config.vocab_size
    return jnp.asarray(rng.normal(size=size).astype(np.float32) * 3)


def check_static(processor: Processor, bench: Any, rng: Any) -> None:
    """Checks that states keep their shapes, and logits theirs and float32."""
    shared, logits = processor.shared(), _logits(bench, rng)
    for prompt in bench.prompts:
        state = _begun(processor, bench, prompt)
        after = jax.eval_shape(shared.step, state, jnp.int32(1))
        why = f"step makes a state of {_shapes(after)} of one of {_shapes(state)}"
        _fail_if(_shapes(after) != _shapes(state), "static shapes", why)
        made = jax.eval_shape(shared.apply, state, logits)
        why = f"apply makes {made} of {logits.shape} float32"
        _fail_if(_shapes(made) != _shapes(logits), "static shapes", why)


def check_pure(processor: Processor, bench: Any, rng: Any) -> None:
    """Checks that only arguments matter, and nothing calls back to the host."""
    shared, logits = processor.shared(), _logits(bench, rng)
    state = _begun(processor, bench, bench.prompts[0])
    drafter_kit.check_programs(
        step=(shared.step, state, jnp.int32(1)),
        apply=(shared.apply, state, logits),
        allows=(shared.allows, state, jnp.int32(1)),
    )


def check_prefix(processor: Processor, bench: Any, rng: Any) -> None:
    """Checks that a row's logits follow from its own path: not from siblings, from how
    often anything was called, or from what is behind the prompt."""
    clause, shared = "own prefix", processor.shared()
    size, logits = bench.target.config.vocab_size, _logits(bench, rng)
    for prompt in bench.prompts:
        paths = [rng.integers(0, size, 3).tolist() for _ in range(3)]
        paths += [[*paths[0][:2], paths[1][2]], [prompt[-1]] * 3]

        def alone(path, behind=0, prompt=prompt):
            state = _begun(processor, bench, prompt, behind)
            for token in path:
                state = shared.step(state, jnp.int32(token))
            return shared.apply(state, logits)

        found = {}
        # The states of a tree, level by level, with what is beside a node in between.
        states = {(): _begun(processor, bench, prompt)}
        for depth, path in itertools.product(range(1, 4), paths):
            at = tuple(path[:depth])
            states[at] = shared.step(states[at[:-1]], jnp.int32(at[-1]))
            found[at] = shared.apply(states[at], logits)
            shared.apply(states[at[:-1]], logits)
        for path, row in found.items():
            for behind in (0, prompt[0], size - 1):
                try:
                    compare.assert_same_bits(alone(path, behind), row)
                except AssertionError as error:
                    raise AssertionError(
                        f"{clause}: after {list(prompt)} and {list(path)}, with "
                        f"{behind} behind the prompt, logits differ{error}"
                    ) from None


def check_allows(processor: Processor, bench: Any, rng: Any) -> None:
    """Checks that logits stay numbers, one of them finite, and that a token which is
    said to be forbidden is."""
    shared, logits = processor.shared(), _logits(bench, rng)
    size = bench.target.config.vocab_size
    for prompt in bench.prompts:
        state = _begun(processor, bench, prompt)
        for _ in range(4):
            row = np.asarray(shared.apply(state, logits))
            why = f"{row[np.isnan(row) | (row == np.inf)]} among the logits"
            _fail_if(bool(np.isnan(row).any() | (row == np.inf).any()), "numbers", why)
            _fail_if(not np.isfinite(row).any(), "numbers", "every token is forbidden")
            allowed = np.array(
                [bool(shared.allows(state, jnp.int32(n))) for n in range(size)]
            )
            wrong = np.flatnonzero(~allowed & np.isfinite(row))
            why = f"allows says no to {wrong[:3]}, and apply leaves them"
            _fail_if(wrong.size > 0, "allows", why)
            token = rng.choice(np.flatnonzero(np.isfinite(row)))
            state = shared.step(state, jnp.int32(token))


def check_lossless(processor: Processor, bench: Any, rng: Any) -> None:
    """Checks that rounds write what decoding does: chains and trees of a draft model
    that is sometimes wrong, drawn and greedy, in slots of their own."""
    del rng
    target = bench.target
    draft = draft_model.DraftModel(model=target, gamma_max=GAMMA)
    weights = jax.tree.map(lambda leaf: leaf * 1.02, bench.params)
    prompts = [list(prompt) for prompt in bench.prompts]
    warm = sampling_lib.make_settings(temperature=1.0, seed=3)
    for drafter, sampling in ((draft, warm), (draft.for_tree(TREE), None)):
        sizes = {"max_tokens": bench.max_tokens, **bench.sizes}
        sizes |= {"sampling": sampling, "processors": processor}
        algo = algorithms.speculative(target, drafter)
        params = bench.params, weights
        found = algo.generated(algo.run(params, algo.init(params, prompts, **sizes)))
        base = algorithms.autoregressive(target)
        state = base.run(bench.params, base.init(bench.params, prompts, **sizes))
        expected = base.generated(state)
        how = "trees" if drafter.tree else "chains"
        why = f"{how} write {found}, decoding {expected}"
        _fail_if(found != expected, "lossless", why)


_CLAUSES: dict[str, Callable[[Processor, Any, Any], None]] = {
    "static": check_static,
    "pure": check_pure,
    "prefix": check_prefix,
    "allows": check_allows,
    "lossless": check_lossless,
}
