"""The row contract of `forward_rows`: bits compared as integers.

Every property is checked against the same oracle, one live row decoded at a time,
and has a negative control: the check must fail on a kernel that breaks it.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.model import config as config_lib, params as params_lib, qwen3
from spec_jax.ops import paged_attention, skinny_gemm
from spec_jax.paging import allocator, cache


PREFIX = 141  # past one key block of the attention, inside a page
WINDOW = 5
NAN_TOKEN = 0


def make_config(dtype: str, **changes) -> config_lib.Qwen3Config:
    sizes = {
        "vocab_size": 160,
        "hidden_size": 96,
        "intermediate_size": 176,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,  # a NaN embedding is not a NaN logit
        "dtype": dtype,
    }
    return config_lib.Qwen3Config(**(sizes | changes))


def make_params(config: config_lib.Qwen3Config) -> params_lib.Params:
    """Random weights; the embedding of `NAN_TOKEN` is NaN."""
    params = params_lib.init(jax.random.key(0), config, stddev=0.1)
    return params.replace(embed=params.embed.at[NAN_TOKEN].set(jnp.nan))


def make_cache(
    config: config_lib.Qwen3Config,
    *,
    page_size: int = 16,
    num_slots: int = 1,
    table_width: int = 20,
    spare_pages: int = 7,
    seed: int | None = 0,
) -> cache.PagedKV:
    """Open slots in a pool full of NaN, with the free pages in random order."""
    num_pages = num_slots * table_width + spare_pages
    kv = cache.init(
        num_layers=config.num_layers,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_slot=table_width,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
    )
    poison = functools.partial(jnp.full_like, fill_value=jnp.nan)
    order = np.arange(num_pages)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(num_pages)
    kv = kv.replace(
        k=tuple(map(poison, kv.k)),
        v=tuple(map(poison, kv.v)),
        free_pages=jnp.asarray(order, jnp.int32),
    )
    for slot in range(num_slots):
        kv = allocator.register(kv, slot)
    return kv


def text(slot: int = 0, length: int = PREFIX + WINDOW) -> np.ndarray:
    """Each slot has its own tokens; none is `NAN_TOKEN`."""
    return np.random.default_rng(100 + slot).integers(1, 160, length).astype(np.int32)


def compile_forward():
    """A jitted `forward_rows` with a cache of its own."""

    @functools.partial(jax.jit, static_argnames=("config",))
    def forward(params, config, tokens, slots, positions, num_live, kv):
        rows = qwen3.Rows(
            tokens=tokens, slots=slots, positions=positions, num_live=num_live
        )
        return qwen3.forward_rows(params, config, rows, kv, impl="xla", taps=(0, 1))

    return forward


_forward = compile_forward()


_prefill_rows = jax.jit(qwen3.prefill_rows, static_argnames=("config", "slab", "impl"))


def run_rows(params, config, kv, rows, *, slab, forward=_forward):
    """Runs `rows`, a list of `(token, slot, position)`; dead rows are poisoned."""
    for _, slot, position in rows:
        kv = allocator.reserve(kv, slot, position + 1)
    dead = [(NAN_TOKEN, 0, PREFIX + 900)] * (slab - len(rows))
    tokens, slots, positions = np.asarray(rows + dead, np.int32).T
    kv, outputs = forward(
        params, config, tokens, slots, positions, jnp.int32(len(rows)), kv
    )
    for _, slot, position in rows:
        kv = allocator.extend(kv, slot, max(int(kv.length[slot]), position + 1))
    return kv, jax.tree.map(lambda x: np.asarray(x[: len(rows)]), outputs)


def fill(params, config, kv, *, slot=0, length=PREFIX, slab=8):
    """The prefix of a slot, written by rows."""
    kv = allocator.reserve(kv, slot, length)
    return jax.jit(qwen3.prefill_rows, static_argnames=("config", "slab", "impl"))(
        params,
        config,
        kv,
        tokens=jnp.asarray(text(slot)[:length]),
        length=jnp.int32(length),
        slot=jnp.int32(slot),
        slab=slab,
        impl="xla",
    )


def written(kv, slot=0, length=PREFIX + WINDOW):
    return [cache.gather(kv, layer, slot, length) for layer in range(len(kv.k))]


def decode_one_by_one(params, config, kv, *, slot=0, slab=8, start=PREFIX):
    """The oracle: outputs of each row of the window, decoded alone in row 0."""
    outputs = []
    for position in range(start, PREFIX + WINDOW):
        token = int(text(slot)[position])
        kv, one = run_rows(params, config, kv, [(token, slot, position)], slab=slab)
        outputs.append(one)
    return kv, jax.tree.map(lambda *rows: np.concatenate(rows), *outputs)


def window(slot=0, count=WINDOW):
    return [(int(text(slot)[PREFIX + i]), slot, PREFIX + i) for i in range(count)]


@pytest.fixture(params=["float32", "bfloat16"])
def model(request):
    config = make_config(request.param)
    return make_params(config), config


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_verifying_equals_decoding_one_by_one(model, page_size):
    """Fails if a row's bits depend on how many rows are live, or which it is."""
    params, config = model
    kv = fill(params, config, make_cache(config, page_size=page_size))
    decoded_kv, decoded = decode_one_by_one(params, config, kv)
    for count in range(1, WINDOW + 1):
        verified_kv, verified = run_rows(
            params, config, kv, window(count=count), slab=8
        )
        testing.assert_same_bits(
            verified, jax.tree.map(lambda x, c=count: x[:c], decoded)
        )
    testing.assert_same_bits(written(verified_kv), written(decoded_kv))
    assert np.isfinite(decoded.logits).all()


def test_an_unpadded_row_is_caught(model, monkeypatch):
    """Negative control: the one-row product of the library has other bits."""
    params, config = model
    kv = fill(params, config, make_cache(config))
    _, padded = run_rows(params, config, kv, window(count=1), slab=8)
    with pytest.raises(ValueError, match="at least 2 rows"):
        run_rows(params, config, kv, window(count=1), slab=1)
    monkeypatch.setattr(skinny_gemm, "MIN_ROWS", 1)
    _, unpadded = run_rows(params, config, kv, window(count=1), slab=1)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(unpadded, padded)


def test_rows_do_not_depend_on_their_place_or_neighbours(model):
    """Fails if a row of one slot is touched by the rows of another."""
    params, config = model
    kv = make_cache(config, num_slots=3)
    for slot in range(3):
        kv = fill(params, config, kv, slot=slot)
    alone_kv, alone = decode_one_by_one(params, config, kv, slot=1)
    mine, other, third = window(1, 3), window(0, 3), window(2, 2)
    orders = [
        mine + other + third,
        third + mine + other,
        [other[0], mine[0], third[0], mine[1], other[1], mine[2], other[2], third[1]],
    ]
    for rows in orders:
        packed_kv, packed = run_rows(params, config, kv, rows, slab=8)
        at = np.array([i for i, row in enumerate(rows) if row[1] == 1])
        testing.assert_same_bits(
            jax.tree.map(lambda x, at=at: x[at], packed),
            jax.tree.map(lambda x: x[:3], alone),
        )
        length = PREFIX + 3
        testing.assert_same_bits(
            written(packed_kv, 1, length), written(alone_kv, 1, length)
        )


def test_a_neighbours_fault_is_caught(model, monkeypatch):
    """Negative control: attention that lets a row see every slot's keys."""
    params, config = model
    kv = make_cache(config, num_slots=2)
    for slot in range(2):
        kv = fill(params, config, kv, slot=slot)
    _, alone = run_rows(params, config, kv, window(1, 1), slab=8)

    real = paged_attention.paged_attention

    def leaky(*args, slots, **kwargs):
        return real(*args, slots=jnp.zeros_like(slots), **kwargs)

    monkeypatch.setattr(paged_attention, "paged_attention", leaky)
    _, leaked = run_rows(
        params, config, kv, window(1, 1), slab=8, forward=compile_forward()
    )
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(leaked, alone)


def test_pages_and_table_width_do_not_matter(model):
    """Fails if bits depend on which pages hold the prefix, or on their number."""
    params, config = model
    reference = None
    for seed, width, spare in ((None, 20, 20), (1, 20, 20), (2, 33, 7)):
        kv = make_cache(config, table_width=width, spare_pages=spare, seed=seed)
        kv = fill(params, config, kv)
        after, outputs = run_rows(params, config, kv, window(), slab=8)
        result = (outputs, written(after))
        if reference is None:
            reference = result
        testing.assert_same_bits(result, reference)


def test_a_wrong_page_is_caught(model):
    """Negative control: the table names the second page twice.

    (Exchanging two pages would not do: attention hardly minds the order of keys.)
    """
    params, config = model
    kv = fill(params, config, make_cache(config))
    _, right = run_rows(params, config, kv, window(), slab=8)
    table = kv.page_table.at[0, 0].set(kv.page_table[0, 1])
    _, wrong = run_rows(params, config, kv.replace(page_table=table), window(), slab=8)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(wrong, right)


def test_dead_rows_write_nowhere(model):
    """Fails if a dead row is written to page 0, or to its own position."""
    params, config = model
    kv = fill(params, config, make_cache(config))
    before = jax.tree.map(np.asarray, (kv.k, kv.v))
    kv = allocator.reserve(kv, 0, PREFIX + WINDOW)
    tokens, slots, positions = np.asarray(window() + window()[:3], np.int32).T
    after, _ = _forward(params, config, tokens, slots, positions, jnp.int32(0), kv)
    testing.assert_same_bits((after.k, after.v), before)
    with pytest.raises(AssertionError, match="elements differ"):
        live, _ = _forward(params, config, tokens, slots, positions, jnp.int32(1), kv)
        testing.assert_same_bits((live.k, live.v), before)


def test_head_sizes_and_groups():
    """The contract at head sizes 64, 80 and 128 and group sizes 1 and 7."""
    for head_dim, num_heads, num_kv_heads in ((64, 2, 2), (80, 7, 1), (128, 4, 2)):
        config = make_config(
            "float32",
            head_dim=head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_layers=1,
        )
        params = make_params(config)
        kv = fill(params, config, make_cache(config))
        decoded_kv, decoded = decode_one_by_one(params, config, kv)
        verified_kv, verified = run_rows(params, config, kv, window(), slab=8)
        testing.assert_same_bits(verified.logits, decoded.logits)
        testing.assert_same_bits(written(verified_kv), written(decoded_kv))


def test_prefill_by_rows_is_decoding(model):
    """The prompt's K/V equals that of one-row decoding; batched prefill's is near."""
    params, config = model
    by_rows = fill(params, config, make_cache(config), length=40)
    one_by_one = make_cache(config)
    for position in range(40):
        row = (int(text()[position]), 0, position)
        one_by_one, _ = run_rows(params, config, one_by_one, [row], slab=8)
    testing.assert_same_bits(written(by_rows, 0, 40), written(one_by_one, 0, 40))

    padded = np.zeros(64, np.int32)
    padded[:40] = text()[:40]
    batched = allocator.reserve(make_cache(config), 0, 40)
    batched, _ = jax.jit(qwen3.prefill, static_argnames=("config",))(
        params,
        config,
        batched,
        tokens=jnp.asarray(padded),
        length=jnp.int32(40),
        slot=jnp.int32(0),
    )
    assert int(batched.length[0]) == 40
    tolerance = {"float32": 1e-4, "bfloat16": 0.06}[config.dtype]
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x.astype(jnp.float32), written(batched, 0, 40)),
        jax.tree.map(lambda x: x.astype(jnp.float32), written(by_rows, 0, 40)),
        atol=tolerance,
        rtol=tolerance,
    )


def test_prefill_buckets():
    lengths = [1, 64, 65, 128, 129, 1000, 1024, 1025]
    buckets = [64, 64, 128, 128, 256, 1024, 1024, 2048]
    assert [qwen3.bucket(n) for n in lengths] == buckets
