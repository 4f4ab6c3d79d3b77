"""Calls of the public functions with their types, for mypy alone.

mypy also reports an `ignore` that is not needed.
"""

from collections.abc import Generator
from typing import assert_type

import spec_jax as sj
from spec_jax.algorithms import Info


lm = sj.load()
assert_type(sj.generate(lm, "a", max_tokens=3, gamma=2), sj.Generation)
assert_type(sj.generate(lm, [1, 2]), sj.Generation)
assert_type(sj.generate(lm, [{"role": "user", "content": "hi"}]), sj.Generation)
assert_type(sj.generate(lm, ["a", [1, 2]], num_slots=2), list[sj.Generation])
assert_type(sj.decode(lm, "a", stop=[1]), sj.Generation)
assert_type(sj.decode(lm, ["a"]), list[sj.Generation])
mild = sj.processors.penalties(repetition=1.1)
assert_type(sj.generate(lm, "a", processors=mild), sj.Generation)
assert_type(sj.decode(lm, ["a"], processors=[mild]), list[sj.Generation])
assert_type(sj.stream(lm, "a"), Generator[sj.Piece, None, sj.Generation])
assert_type(sj.gamma.Goodput(gamma_max=3), sj.gamma.Goodput)
algo = sj.speculative(lm.target, lm.drafter, rule=sj.rules.coupled)
state = algo.init((lm.params, lm.drafter_params), [[1, 2]], max_tokens=3)
assert_type(algo.step((lm.params, lm.drafter_params), state)[1], Info)
assert_type(algo.generated(state), list[list[int]])
sj.generate(lm, "a", temperature=0.7)  # type: ignore[call-overload]
sj.decode(lm, "a", gamma=3)  # type: ignore[call-overload]
