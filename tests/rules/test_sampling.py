"""Sampling: settings, filters against an oracle, and the law of a draw."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from spec_jax.ops import draw as draw_op
from spec_jax.rules import sampling, settings as settings_lib


VOCAB = 12
distribution = jax.jit(sampling.distribution)


def oracle(logits, *, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """Computes the filters in plain Python, by a sort, in float64."""
    if temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    # Scores in float32 decide the order, and so ties; settings are float32, too.
    logits = np.asarray(logits, np.float32)
    scores = (logits - logits.max()) / np.float32(temperature)
    weights = np.exp(scores.astype(np.float64))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    last = scores[order[min(top_k or len(order), len(order)) - 1]]
    order = [i for i in order if scores[i] >= last]
    mass, kept = 0.0, []
    wanted = np.float32(top_p) * weights[order].sum()
    for i in order:
        # With top_p 1 all stay, even tokens too unlikely to change a sum.
        if top_p < 1 and mass >= wanted:
            break
        mass += weights[i]
        kept.append(i)
    kept = [i for i in kept if weights[i] >= np.float32(min_p)]
    probs = np.zeros(len(scores))
    probs[kept] = weights[kept] / weights[kept].sum()
    return probs


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    # Steps of 1/2, so that there are ties, inside and at a boundary.
    halves=st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_k=st.one_of(st.none(), st.integers(1, VOCAB + 2)),
    top_p=st.integers(1, 64).map(lambda n: n / 64),
    min_p=st.integers(0, 64).map(lambda n: n / 64),
)
def test_filters_agree_with_the_oracle(halves, temperature, top_k, top_p, min_p):
    """Fails if other tokens stay, or if their probabilities differ."""
    values = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = np.asarray(halves, np.float32) / 2
    settings = sampling.make_settings(**(values | {"temperature": temperature or 1.0}))
    settings = settings.replace(temperature=jnp.float32(temperature))
    found = distribution(logits, settings)
    np.testing.assert_allclose(found, oracle(logits, **values), atol=2e-6)


TINY = settings_lib.SMALLEST_TEMPERATURE
EVEN, PEAKS = (0.0, 0.0, 0.0, 0.0), (1.0, 5.0, 5.0, -3.0)
BOUNDARIES = (
    # Top-k keeps all tokens that equal its last one, whatever the sign of zero.
    (EVEN, {"top_k": 3}, [0, 1, 2, 3]),
    ((1.0, 0.0, -0.0, -1.0), {"top_k": 2}, [0, 1, 2]),
    ((2.0, 1.0, 1.0, 0.5), {"top_k": 2}, [0, 1, 2]),
    # Top-p cuts ties by index, and keeps the token that reaches p.
    (EVEN, {"top_p": 0.5}, [0, 1]),
    (EVEN, {"top_p": 0.500001}, [0, 1, 2]),
    (EVEN, {"top_p": 1e-6}, [0]),
    ((1.0, 1.0, 1.0, -1.0), {"top_k": 2, "top_p": 0.6}, [0, 1]),
    ((2.0, 1.0, 1.0, 1.0), {"top_p": 0.7}, [0, 1, 2]),
    # It counts the mass that top-k left: one token reaches p then, not two.
    ((2.0, 1.0, 0.9, 0.8), {"top_k": 2, "top_p": 0.7}, [0]),
    # Min-p keeps its bound.
    (EVEN, {"min_p": 1.0}, [0, 1, 2, 3]),
    # Masked tokens never come back, and the order among -inf does not matter.
    ((-math.inf, 0.0, -math.inf, 0.0), {"top_k": 4}, [1, 3]),
    ((-math.inf, 0.0, -math.inf, 0.0), {"top_k": 2}, [1, 3]),
    # Greedy and a tiny top-p are the first argmax, the others all that equal it.
    (PEAKS, {"temperature": 0.0}, [1]),
    (PEAKS, {"top_p": 1e-6}, [1]),
    (PEAKS, {"top_k": 1}, [1, 2]),
    (PEAKS, {"min_p": 1.0}, [1, 2]),
    # The smallest temperature that is allowed makes no NaN.
    (PEAKS, {"temperature": TINY}, [1, 2]),
    (PEAKS, {"temperature": TINY, "top_p": 0.9}, [1, 2]),
)
"""Logits, settings and tokens that stay, by XLA and by a GPU's kernels."""


def test_boundaries_are_exact():
    for logits, values, kept in BOUNDARIES:
        logits = np.array(logits, np.float32)
        found = np.asarray(distribution(logits, sampling.make_settings(**values)))
        assert np.flatnonzero(found).tolist() == kept, (logits, values)
        weights = np.exp(logits[kept] - logits.max())
        np.testing.assert_allclose(found[kept], weights / weights.sum(), rtol=1e-6)


def by_hugging_face(logits, values):
    """Returns the probabilities that the warpers of `generate` leave."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    scores = torch.from_numpy(logits)
    for name, warper in (
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in values:
            scores = warper(values[name])(None, scores)
    return scores.softmax(-1).numpy()


NUM_ROWS = 600
SIGMAS = 5.0


@pytest.mark.parametrize(
    "values",
    (
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 50},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.03},
        {"temperature": 2.0, "top_k": 4, "min_p": 0.25},
    ),
    ids=str,
)
def test_filters_agree_with_hugging_face(values, rng):
    """Fails if the order of filters differs from `generate`'s, or if top-k cuts logits
    that equal its last one, or min-p its bound, in XLA or native kernels: draws must
    have each likely token that is kept, and no other. `pallas/test_pallas_plans`
    checks the kernels of a GPU."""
    logits = (3 * rng.standard_normal((9, 50))).astype(np.float32)
    if "top_p" not in values:  # The library cuts ties in another order.
        logits[0] = rng.permutation(np.repeat(np.arange(5, dtype=np.float32), 10))
    settings = sampling.make_settings(**values)
    found, expected = distribution(logits, settings), by_hugging_face(logits, values)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    logits, expected = logits[0], expected[0]
    each = jax.tree.map(lambda x: jnp.broadcast_to(x, NUM_ROWS), settings)
    how = {"positions": jnp.arange(NUM_ROWS), "draws": jnp.ones(NUM_ROWS, bool)}
    rows = jnp.broadcast_to(jnp.asarray(logits), (NUM_ROWS, 50))
    drawn = np.asarray(draw_op.draw(rows, each, **how, impl="native"))
    shares = np.bincount(drawn, minlength=50) / NUM_ROWS
    assert not shares[expected == 0].any()
    assert shares[expected > 0.02].all()
    error = np.sqrt(expected * (1 - expected) / NUM_ROWS)
    assert np.all(np.abs(shares - expected) <= SIGMAS * error + 1e-9)


@pytest.mark.parametrize(
    "values, message",
    (
        ({"temperature": -0.1}, "temperature=-0.1 is negative: use 0 for greedy"),
        ({"temperature": math.inf}, "temperature=inf is not finite"),
        ({"temperature": 1e-40}, "temperature=1e-40 is too small to divide by"),
        ({"temperature": True}, "temperature=True is not a number"),
        ({"top_k": 0}, "top_k=0 keeps no token"),
        ({"top_p": 0.0}, r"top_p=0.0 is outside \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p=-0.1 is outside \[0, 1\]"),
        ({"temperature": 0, "top_k": 20}, "greedy decoding, which top_k=20 would not"),
        ({"seed": 2**32}, r"seed=4294967296 is outside \[0, 2\*\*32\)"),
    ),
    ids=str,
)
def test_bad_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        sampling.make_settings(**values)
