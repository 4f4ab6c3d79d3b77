"""`native.children` finds the children that XLA finds, with the target's own noise."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.drafters import draw as draw_lib, tree_shapes
from spec_jax.native import children as native
from spec_jax.rules import sampling


SLOTS, ROWS, V = 3, 4, 2500
TREE = tree_shapes.parse("4x3:9@0.6")
FIXED = tree_shapes.parse("3-2-2")
HOT = jnp.asarray(np.random.default_rng(7).permutation(V)[:1100].astype(np.int32))
COUNTS = jnp.array([ROWS, 0, 2], jnp.int32)

WARM = {"temperature": 1.3}
KINDS = {
    "greedy": None,
    "warm": (WARM, WARM, WARM),
    "mixed": (WARM, {"temperature": 0.0}, {"temperature": 0.4, "top_k": 50}),
    "independent": (WARM, {"temperature": 0.0}, {"temperature": 0.4, "top_k": 50}),
    "filtered": (
        {"temperature": 0.9, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.3},
        {"temperature": 1.1, "top_p": 0.95, "min_p": 0.05},
    ),
}


def draw_of(kinds, *, has_probs=False) -> draw_lib.Draw:
    settings = None
    if kinds is not None:
        made = [sampling.make_settings(seed=i, **kind) for i, kind in enumerate(kinds)]
        settings = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)
    lengths = 50 + 10 * jnp.arange(SLOTS, dtype=jnp.int32)
    return draw_lib.Draw(
        sampling=settings, length=lengths, impl="xla", has_probs=has_probs
    )


def logits_of(size=V):
    made = np.random.default_rng(0).standard_normal((SLOTS, ROWS, size)) * 3
    return jnp.asarray(made, jnp.float32)


@functools.partial(jax.jit, static_argnames=("tree",))
def _children(draw, logits, *, tree, **told):
    return draw.children(logits, tree=tree, vocab_size=V, **told)


def found(impl, draw, logits, *, tree=TREE, hot=None, level=2, counts=COUNTS):
    """Returns the scores and tokens of children, only of rows within `counts`."""
    if impl == "native":
        decoding.needs("native")
    draw = dataclasses.replace(draw, impl=impl)
    told = {"level": jnp.int32(level), "counts": counts, "hot": hot}
    scores, tokens = _children(draw, logits, tree=tree, **told)
    is_row = np.arange(logits.shape[1])[None] < np.asarray(counts)[:, None]
    return np.asarray(scores)[is_row], np.asarray(tokens)[is_row]


def assert_same(one, other, *, has_names=False):
    """Asserts that tokens are equal, and scores but for the rounding of sums.

    With names, tokens without a weight are left out: they come in the order of their
    numbers, which differ between the two implementations.
    """
    is_draft = (other[0] > -np.inf) | (not has_names)
    np.testing.assert_array_equal(one[1][is_draft], other[1][is_draft])
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hot", [None, HOT], ids=["all", "few"])
@pytest.mark.parametrize("kind", KINDS)
def test_children_are_those_of_xla(kind, hot):
    """Fails if a child is drawn with other noise, filtered otherwise, or misnamed; if
    an independent one has the noise of another node of the round."""
    is_independent = kind == "independent"
    draw = draw_of(KINDS[kind], has_probs=is_independent)
    logits = logits_of(size=V if hot is None else hot.size)
    tokens = []
    for level in (0, 2):
        told = {"hot": hot, "level": level, "tree": FIXED if is_independent else TREE}
        one, other = (found(x, draw, logits, **told) for x in ("native", "xla"))
        assert_same(one, other, has_names=hot is not None)
        tokens.append(one[1])
    # Negative control: another level has other noise, where it has any.
    assert np.any(tokens[0] != tokens[1]) == (kind != "greedy")


def test_the_best_child_is_the_targets_own_draw():
    """Fails if the noise is not that of the position, by which a child is accepted."""
    level, counts = 3, jnp.full((SLOTS,), ROWS, jnp.int32)
    draw, logits = draw_of(KINDS["warm"]), logits_of()
    how = {"positions": draw.length + level, "draws": jnp.ones((SLOTS,), bool)}
    drawn = sampling.sample_each(logits[:, 0], draw.sampling, **how)
    told = {"level": level, "counts": counts}
    best = found("native", draw, logits, **told)[1][::ROWS, 0]
    np.testing.assert_array_equal(best, drawn)
    # Negative control: noise of the next position.
    moved = dataclasses.replace(draw, length=draw.length + 1)
    assert np.any(found("native", moved, logits, **told)[1][::ROWS, 0] != drawn)


@pytest.mark.parametrize("kind", ["greedy", "filtered"])
def test_rows_are_alike_beside_others(kind):
    """Fails if a child's score depends on which other rows and slots are asked for."""
    draw, logits = draw_of(KINDS[kind]), logits_of()
    all_ = jnp.full((SLOTS,), ROWS, jnp.int32)
    together = found("native", draw, logits, counts=all_)
    for slot in range(SLOTS):
        alone = found("native", draw, logits, counts=all_.at[:].set(0).at[slot].set(2))
        rows = slice(slot * ROWS, slot * ROWS + 2)
        testing.assert_same_bits(alone, tuple(each[rows] for each in together))
    # Negative control: another row has other scores.
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(together[0][:1], together[0][1:2])


SPOILT = {
    "NaN": lambda row: row.at[1030].set(jnp.nan),
    "NaN among nothing": lambda row: jnp.full_like(row, -jnp.inf).at[1030].set(jnp.nan),
    "infinite": lambda row: row.at[2000].set(jnp.inf),
    "two infinite": lambda row: row.at[jnp.array([3, 2000])].set(jnp.inf),
    "three tokens": lambda row: (
        jnp.full_like(row, -jnp.inf).at[jnp.array([7, 1024, 2499])].set(2.0)
    ),
    "a piece of nothing": lambda row: row.at[1024:2048].set(-jnp.inf),
    "equal pieces": lambda row: jnp.round(row),
    "denormal": lambda row: row * 1e-40,
}


@pytest.mark.parametrize("kind", ["greedy", "warm"])
@pytest.mark.parametrize("fault", SPOILT)
def test_rows_of_no_use_are_those_of_xla(fault, kind):
    """Fails if a logit of NaN or infinity is drafted or spoils another row, or if ties
    are decided otherwise than by XLA."""
    if fault == "denormal" and kind == "greedy":
        pytest.skip("whether denormals are equal is the processor's mode")
    logits = logits_of()
    spoilt = logits.at[0, 1].set(SPOILT[fault](logits[0, 1]))
    draw = draw_of(KINDS[kind])
    one, other = found("native", draw, spoilt), found("xla", draw, spoilt)
    assert_same(one, other)
    clean = found("native", draw, logits)
    others = [[each[[0, 2, 3, 4, 5]] for each in found_] for found_ in (one, clean)]
    testing.assert_same_bits(*others)
    is_useless = fault.split()[0] in ("NaN", "infinite", "two")
    assert (one[0][1] == -np.inf).all() == is_useless


def test_what_the_kernels_cannot_take_is_refused():
    decoding.needs("native")
    logits, numbers = logits_of(), jnp.zeros((ROWS,), jnp.int32)
    told = {"tau": 1.0, "draws": None}
    for message, (*arrays, most, names) in {
        "0 children of 2500 tokens": (logits, COUNTS, numbers, 0, None),
        "2501 children of 2500 tokens": (logits, COUNTS, numbers, V + 1, None),
        "counts has shape": (logits, COUNTS[:2], numbers, 2, None),
        "numbers has shape": (logits, COUNTS, numbers[:2], 2, None),
        "names has shape": (logits, COUNTS, numbers, 2, HOT),
        "take float32": (logits.astype(jnp.bfloat16), COUNTS, numbers, 2, None),
    }.items():
        with pytest.raises((ValueError, NotImplementedError), match=message):
            native.children(*arrays, most=most, names=names, **told)
