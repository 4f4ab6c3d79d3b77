"""Exact-match acceptance, against a loop in plain Python."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.rules import acceptance


def accept_in_python(drafts, targets, num_drafted):
    """Walks the chain as a reader would: stop at the first disagreement."""
    kept = []
    for i in range(num_drafted):
        if drafts[i] != targets[i]:
            break
        kept.append(drafts[i])
    return len(kept), [*kept, targets[len(kept)]]


accept = jax.jit(acceptance.accept_exact)


def test_every_small_case():
    """All chains of three over two tokens, each cut at 0 to 3 drafts."""
    for drafts in itertools.product((1, 2), repeat=3):
        for targets in itertools.product((1, 2), repeat=4):
            for num_drafted in range(4):
                outcome = accept(
                    jnp.asarray(drafts), jnp.asarray(targets), jnp.int32(num_drafted)
                )
                count, tokens = accept_in_python(drafts, targets, num_drafted)
                assert int(outcome.num_accepted) == count
                padded = tokens + [acceptance.PAD] * (4 - len(tokens))
                np.testing.assert_array_equal(outcome.tokens, padded)


def test_shapes_are_checked():
    """The off-by-one of speculative decoding is a type error."""
    with pytest.raises(Exception, match="gamma"):
        acceptance.accept_exact(jnp.asarray([1, 2]), jnp.asarray([1, 2]), jnp.int32(2))
