"""`head_steps`: a head's step has the bits of its operations, its chains of steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model import test_eagle3_head as heads

from spec_jax import testing
from spec_jax.model import decoder, eagle3, eagle3_params, row_model
from spec_jax.native import head_steps, steps
from spec_jax.ops import projection
from spec_jax.paging import allocator, cache


SLAB, CAPACITY = 9, 24


def make(variant, dtype, **sizes):
    """A head's config, and its weights for the kernels."""
    config = heads.with_dtype(heads.VARIANTS[variant], dtype)
    layer = dataclasses.replace(config.layer, **sizes)
    config = dataclasses.replace(config, layer=layer)
    params = heads.make_params(config, dtype)
    return config, eagle3_params.prepare(params, "native")


def new_slots(config, num_slots):
    """A cache with pages for all positions of its slots."""
    model = row_model.RowModel(config=config.layer, impl="native", slab=SLAB)
    kv = model.new_slots(num_slots, capacity=CAPACITY, page_size=8)
    for slot in range(num_slots):
        kv = allocator.reserve(kv, slot, jnp.int32(CAPACITY))
    return kv


def native_norm(x, weight, eps):
    """The kernels' own norm: what their product with the identity reads."""
    eye = jnp.eye(x.shape[1], dtype=x.dtype)
    count = jnp.int32(x.shape[0])
    return projection.project(
        x, eye, norm=weight, num_active=count, eps=eps, impl="native"
    )


def run(config, params, live, *, operations=False):
    """What two slabs of two slots leave behind: of features, and of hidden states."""
    kv = new_slots(config, 2)
    run_operations = functools.partial(
        eagle3._run_operations, params, config, impl="native"
    )
    forward = jax.jit(
        functools.partial(eagle3.forward_rows, params, config, impl="native")
    )
    if operations:
        forward = jax.jit(
            lambda rows, features, kv: run_operations(
                rows,
                eagle3._fuse(
                    params, config, features, num_active=rows.num_active, impl="native"
                ),
                kv,
            )
        )
    found = []
    for start, width in ((0, config.features_size), (SLAB, config.hidden_size)):
        rng = np.random.default_rng(start)
        rows = decoder.Rows(
            tokens=start + jnp.arange(SLAB, dtype=jnp.int32),
            slots=jnp.arange(SLAB, dtype=jnp.int32) // 5,
            positions=start // 2 + jnp.arange(SLAB, dtype=jnp.int32) % 5,
            num_active=jnp.int32(live),
        )
        features = rng.standard_normal((SLAB, width)).astype(np.float32)
        features[live:] = np.nan
        kv, *outputs = forward(rows, jnp.asarray(features), kv)
        found += [output[:live] for output in outputs]
    return jax.tree.map(np.asarray, (found, kv.k, kv.v))


@pytest.mark.few(3)
@pytest.mark.parametrize("live", [1, 6, 9])
@pytest.mark.parametrize("variant", heads.VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_its_operations(monkeypatch, dtype, variant, live):
    """Fails if the step leaves out an operation, or rounds or sums otherwise."""
    config, params = make(variant, dtype)
    monkeypatch.setattr(eagle3, "_row_norm", native_norm)  # before `fc` of both
    expected = run(config, params, live, operations=True)
    testing.assert_same_bits(run(config, params, live), expected)


@pytest.mark.parametrize("variant", heads.VARIANTS)
def test_a_norm_that_differs_is_caught(monkeypatch, variant):
    """Negative control: norms of a pair that are one bit off."""
    config, params = make(variant, "float32")
    found = run(config, params, 3)
    planted = lambda *given: jnp.nextafter(native_norm(*given), jnp.float32(9))
    monkeypatch.setattr(eagle3, "_row_norm", planted)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(found, run(config, params, 3, operations=True))


def test_an_embedding_of_another_dtype(monkeypatch):
    """Fails if a token is rounded otherwise than where it is taken."""
    config, params = make("plain", "bfloat16")
    wide = jax.random.normal(jax.random.key(9), params.embed.shape, jnp.float32)
    found = run(config, eagle3_params.prepare(params.replace(embed=wide), "native"), 6)
    monkeypatch.setattr(eagle3, "_row_norm", native_norm)
    expected = run(config, params.replace(embed=wide), 6, operations=True)
    testing.assert_same_bits(found, expected)


WIDTH, MOST = 3, 4
STARTS, PENDING, COUNTS = (5, 0, 2), (2, 1, 3), (4, 2, 0)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, config, tokens, features, kv, *, slot, start, live):
    rows = decoder.Rows(
        tokens=tokens,
        slots=jnp.full(tokens.shape, slot),
        positions=start + jnp.arange(tokens.size, dtype=jnp.int32),
        num_active=live,
    )
    return eagle3.forward_rows(params, config, rows, features, kv, impl="native")


def add(params, config, kv, tokens, features, *, slot, start):
    """Adds pairs of a slot; returns the cache, and what the last one leaves behind."""
    pad = 8 - len(tokens)
    kv, hidden, logits = forward(
        params, config, jnp.asarray(np.pad(tokens, (0, pad)), jnp.int32),
        jnp.asarray(np.pad(np.asarray(features, np.float32), ((0, pad), (0, 0)))), kv,
        slot=jnp.int32(slot), start=jnp.int32(start), live=jnp.int32(len(tokens)),
    )  # fmt: skip
    return kv, np.asarray(hidden[len(tokens) - 1]), np.asarray(logits[len(tokens) - 1])


def of_slots(config):
    """Tokens and features of the pairs of each slot."""
    for slot, (start, pending) in enumerate(zip(STARTS, PENDING, strict=True)):
        rng = np.random.default_rng(slot)
        count = start + pending
        features = rng.standard_normal((count, config.features_size))
        yield slot, rng.integers(0, 96, count), features.astype(np.float32)


def filled(params, config):
    """A cache of what comes before the pending pairs."""
    kv = new_slots(config, len(STARTS))
    for slot, tokens, features in of_slots(config):
        start = STARTS[slot]
        if start:
            kv, _, _ = add(
                params, config, kv, tokens[:start], features[:start], slot=slot, start=0
            )
    return kv


def by_steps(params, config):
    """The cache and the drafts of `COUNTS`, a row after the other."""
    kv, drafts = filled(params, config), []
    hot = np.arange(96) if params.hot is None else np.asarray(params.hot)
    for slot, tokens, features in of_slots(config):
        found, at = [], STARTS[slot]
        tokens, read = tokens[at:], features[at:]
        while len(found) < COUNTS[slot]:
            kv, hidden, logits = add(
                params, config, kv, tokens, read, slot=slot, start=at
            )
            found.append(int(hot[np.argmax(logits)]))
            at, tokens, read = at + len(tokens), found[-1:], hidden[None]
        drafts.append(found)
    return kv, drafts


def by_chains(params, config, *, shift=0):
    tokens = np.zeros((len(STARTS), WIDTH), np.int32)
    read = np.full((*tokens.shape, config.features_size), np.nan, np.float32)
    for slot, found, features in of_slots(config):
        tokens[slot, : PENDING[slot]] = found[STARTS[slot] :]
        last = np.roll(features, shift, axis=0)[STARTS[slot] :]
        read[slot, : PENDING[slot]] = last
    chains = jax.jit(eagle3.run_chains, static_argnames=("config", "most"))
    kv, drafts, _ = chains(
        params,
        config,
        filled(params, config),
        tokens=jnp.asarray(tokens),
        features=jnp.asarray(read),
        starts=jnp.asarray(STARTS, jnp.int32),
        pending=jnp.asarray(PENDING, jnp.int32),
        counts=jnp.asarray(COUNTS, jnp.int32),
        most=MOST,
        draws=None,
    )
    return kv, np.asarray(drafts)


@pytest.mark.parametrize("variant", heads.VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chains_are_single_steps(dtype, variant):
    """Fails if a chain takes another row, feature, place or token than steps would."""
    config, params = make(variant, dtype)
    assert (params.hot is None) == (variant != "plain")
    expected_kv, expected = by_steps(params, config)
    kv, drafts = by_chains(params, config)
    for row, other in zip(drafts.tolist(), expected, strict=True):
        assert row == other + [0] * (MOST - len(other))
    for slot, count in enumerate(COUNTS):
        end = STARTS[slot] + (PENDING[slot] + count - 1 if count else 0)
        for ours, theirs in zip(
            cache.gather(kv, 0, slot, end),
            cache.gather(expected_kv, 0, slot, end),
            strict=True,
        ):
            testing.assert_same_bits(ours, theirs)
    # Negative control: features of other pairs are other drafts.
    assert by_chains(params, config, shift=1)[1].tolist() != drafts.tolist()


def test_refusals():
    """Fails if the kernel is let loose on arrays of another shape or form."""
    config, params = make("plain", "float32")
    layer = steps.LayerWeights(
        **{name: getattr(params, name) for name in steps.LayerWeights._fields}
    )
    pool = jnp.zeros((3, 8, config.layer.num_kv_heads, config.layer.head_dim))
    model = {
        "embed": params.embed,
        "layers": [layer],
        "final_norm": params.final_norm,
        "head": params.lm_head,
        "hidden_norm": params.hidden_norm,
        "norm_before_residual": False,
        "norm_output": False,
        "pages": [(pool, pool)],
        "eps": 1e-6,
        "scale": 1.0,
    }
    number = jnp.zeros((2,), jnp.int32)
    angle = jnp.zeros((2, config.layer.head_dim // 2))
    arguments = {
        "tokens": number,
        "features": jnp.zeros((2, config.hidden_size)),
        "cos": angle,
        "sin": angle,
        "page_table": number[None],
        "slots": number,
        "positions": number,
        "num_active": jnp.int32(1),
    }
    narrow = layer._replace(qkv=layer.attention_out)
    for change, error, message in (
        ({"features": angle}, ValueError, "features has shape"),
        ({"features": arguments["features"].astype("bfloat16")}, NotImplementedError,
         "float32 or bfloat16, one of them"),
        ({"layers": [narrow]}, ValueError, "qkv has shape"),
        ({"layers": [layer] * 2}, ValueError, "2 layers, and head="),
        ({"head": None}, ValueError, "a head has one layer, and logits of its own"),
        ({"hidden_norm": params.final_norm[1:]}, ValueError, "hidden_norm has shape"),
    ):  # fmt: skip
        weights = {key: change.get(key, value) for key, value in model.items()}
        rows = {key: change.get(key, value) for key, value in arguments.items()}
        with pytest.raises(error, match=message):
            head_steps.step(model=head_steps.HeadModel(**weights), **rows)
    ids = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="names has shape"):
        head_steps.chains(
            ids,
            jnp.zeros((1, 2, config.hidden_size)),
            head_steps.HeadModel(**model),
            angle,
            angle,
            names=number,
        )
