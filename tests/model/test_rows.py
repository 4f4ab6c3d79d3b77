"""The row contract of `forward_rows`: bits compared as integers.

Every property is checked against the same oracle, one active row decoded at a time,
and has a negative control: the check must fail on a kernel that breaks it.
"""

import dataclasses
import functools

import chex
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.model import (
    config as config_lib,
    decoder,
    families,
    params as params_lib,
    row_model,
)
from spec_jax.native import steps
from spec_jax.ops import dispatch, row_attention, skinny_gemm
from spec_jax.paging import allocator, cache


PREFIX = 141  # past one key block of the attention, inside a page
WINDOW = 5
NAN_TOKEN = 0
SLAB = 8


def make_config(dtype: str, **changes) -> config_lib.Qwen3Config:
    sizes = {
        "vocab_size": 160, "hidden_size": 96, "intermediate_size": 176,
        "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "dtype": dtype,
        "tie_word_embeddings": False,  # so a NaN embedding makes no NaN logit
    }  # fmt: skip
    return config_lib.Qwen3Config(**(sizes | changes))


def make_params(config: config_lib.Qwen3Config) -> params_lib.Params:
    """Makes random weights; the embedding of `NAN_TOKEN` is NaN."""
    params = params_lib.init(jax.random.key(0), config, stddev=0.1)
    params = params.replace(embed=params.embed.at[NAN_TOKEN].set(jnp.nan))
    return params_lib.to_bytes(params, config.weights)


def make_cache(
    config, *, page_size=16, table_width=20, spare_pages=7, seed=0
) -> cache.PagedKV:
    """Makes two open slots in a pool full of NaN, the free pages in random order.

    It has one shape unless a test is about the shape: `forward` is compiled once.
    """
    num_pages = 2 * table_width + spare_pages
    kv = cache.init(
        num_layers=config.num_layers, num_slots=2, num_pages=num_pages,
        page_size=page_size, pages_per_slot=table_width, dtype=config.dtype,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    poison = functools.partial(jnp.full_like, fill_value=jnp.nan)
    order = np.random.default_rng(seed).permutation(num_pages)
    kv = kv.replace(
        k=tuple(map(poison, kv.k)),
        v=tuple(map(poison, kv.v)),
        free_pages=jnp.asarray(order, jnp.int32),
    )
    return allocator.register(allocator.register(kv, 0), 1)


def text(slot: int = 0, length: int = PREFIX + WINDOW) -> np.ndarray:
    """Returns tokens, other ones for each slot; `NAN_TOKEN` is not among them."""
    return np.random.default_rng(100 + slot).integers(1, 160, length).astype(np.int32)


def compile_forward():
    """Returns a jitted `forward_rows` with its own cache of compiled programs."""

    @functools.partial(jax.jit, static_argnames=("config", "impl"))
    def forward(params, config, tokens, slots, positions, num_active, kv, *, impl):
        rows = decoder.Rows(
            tokens=tokens, slots=slots, positions=positions, num_active=num_active
        )
        run_rows = families.of(config).forward_rows
        return run_rows(params, config, rows, kv, impl=impl, taps=(0, 1))

    return forward


_forward = compile_forward()
_prefill_rows = jax.jit(
    decoder.prefill_rows, static_argnames=("config", "slab", "impl")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A random model and the implementation that runs it."""

    config: config_lib.ModelConfig
    params: params_lib.Params
    impl: str

    @property
    def slab(self) -> int:
        return dispatch.slab_rows(self.impl) or SLAB

    def run(self, kv, rows, *, slab=None, forward=_forward):
        """Runs `rows`, each `(token, slot, position)`; padding rows are poisoned."""
        for _, slot, position in rows:
            kv = allocator.reserve(kv, slot, position + 1)
        dead = [(NAN_TOKEN, 0, PREFIX + 900)] * ((slab or self.slab) - len(rows))
        columns = np.asarray(rows + dead, np.int32).T
        given = self.params, self.config, *columns, jnp.int32(len(rows)), kv
        kv, outputs = forward(*given, impl=self.impl)
        for _, slot, position in rows:
            kv = allocator.extend(kv, slot, max(int(kv.length[slot]), position + 1))
        return kv, jax.tree.map(lambda x: np.asarray(x[: len(rows)]), outputs)

    def fill(self, kv, *, slot=0, length=PREFIX):
        """Writes the first `length` tokens of a slot's prefix, by rows."""
        known = jnp.asarray(text(slot)[:PREFIX])  # one shape for every length
        kv, _ = _prefill_rows(
            self.params, self.config, allocator.reserve(kv, slot, length), tokens=known,
            length=jnp.int32(length), slot=jnp.int32(slot), slab=self.slab,
            impl=self.impl,
        )  # fmt: skip
        return kv

    def two_slots(self):
        """Makes a cache of two slots, with the prefix of each written."""
        return self.fill(self.fill(make_cache(self.config)), slot=1)

    def decode_one_by_one(self, kv, rows, **options):
        """Returns the oracle's outputs: each of the rows is decoded alone, in row 0."""
        outputs = []
        for row in rows:
            kv, one = self.run(kv, [row], **options)
            outputs.append(one)
        return kv, jax.tree.map(lambda *rows: np.concatenate(rows), *outputs)


def written(kv, slot=0, length=PREFIX + WINDOW):
    return decoding.held(kv, length, slot=slot)


def first(outputs, count: int):
    return jax.tree.map(lambda x: x[:count], outputs)


def window(slot=0, count=WINDOW):
    return [(int(text(slot)[PREFIX + i]), slot, PREFIX + i) for i in range(count)]


def make_model(dtype: str, impl: str, **changes) -> Model:
    decoding.needs(impl)
    config = make_config(dtype, **changes)
    return Model(config=config, params=make_params(config), impl=impl)


@pytest.fixture(params=["bfloat16-native", "float32-xla"])
def model(request):
    dtype, impl, *weights = request.param.split("-")
    return make_model(dtype, impl, weights=weights[0] if weights else "dense")


@pytest.mark.parametrize(
    "model",
    [
        *("float32-xla", "bfloat16-native", "float32-native", "bfloat16-native-q8_0"),
        *map(slow, ("bfloat16-native-q4_1", "bfloat16-xla-q8_0", "bfloat16-xla-q4_1")),
    ],
    indirect=True,
)
def test_verifying_equals_decoding_one_by_one(model):
    """Fails if a row's bits depend on its place, or on how many rows are active."""
    # A block of keys is several pages or part of one. (XLA's programs compile slowly.)
    is_quick = (model.impl, model.config.dtype) == ("native", "float32")
    for page_size in (16, 8, 256) if is_quick else (16,):
        kv = model.fill(make_cache(model.config, page_size=page_size))
        decoded_kv, decoded = model.decode_one_by_one(kv, window())
        for count in range(1, WINDOW + 1):
            verified_kv, verified = model.run(kv, window(count=count))
            testing.assert_same_bits(
                verified,
                first(decoded, count),
                what=f"pages of {page_size}, {count} live",
            )
        testing.assert_same_bits(written(verified_kv), written(decoded_kv))
        assert np.isfinite(decoded.logits).all()


def test_an_unpadded_row_is_caught(monkeypatch):
    """Negative control: XLA's product of a single row has other bits."""
    model = make_model("float32", "xla")
    kv = model.fill(make_cache(model.config))
    _, padded = model.run(kv, window(count=1))
    with pytest.raises(ValueError, match="at least 2 rows"):
        model.run(kv, window(count=1), slab=1)
    monkeypatch.setattr(skinny_gemm, "MIN_ROWS", 1)
    _, unpadded = model.run(kv, window(count=1), slab=1)
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(unpadded, padded)


@pytest.mark.parametrize("dtype", config_lib.DTYPES)
def test_native_rows_need_no_slab(dtype):
    """Fails if a native kernel's bits depend on the slab's height."""
    model = make_model(dtype, "native")
    kv = model.fill(make_cache(model.config))
    _, reference = model.run(kv, window())
    for slab in (5, 16):
        _, outputs = model.run(kv, window(), slab=slab)
        testing.assert_same_bits(outputs, reference)
    _, alone = model.run(kv, window(count=1), slab=1)
    testing.assert_same_bits(alone, first(reference, 1))


def test_rows_do_not_depend_on_their_place_or_neighbours(model):
    """Fails if a row's bits depend on its place or on the rows of another slot."""
    kv = model.two_slots()
    alone_kv, alone = model.decode_one_by_one(kv, window(1))
    assert np.isfinite(alone.logits).all()
    mine, other = window(1, 3), window(0, 5)
    mixed = [other[0], mine[0], other[1], mine[1], other[2], mine[2], *other[3:]]
    for rows in (mine, mine + other, other + mine, mixed):
        packed_kv, packed = model.run(kv, rows)
        at = np.array([i for i, row in enumerate(rows) if row[1] == 1])
        testing.assert_same_bits(
            jax.tree.map(lambda x, at=at: x[at], packed), first(alone, 3)
        )
        length = PREFIX + 3
        testing.assert_same_bits(
            written(packed_kv, 1, length), written(alone_kv, 1, length)
        )


def test_an_active_row_of_nan_spoils_only_itself_and_later_rows(model):
    """Fails if masked keys are multiplied by zero: 0 * NaN is NaN."""
    kv = model.fill(make_cache(model.config))
    _, healthy = model.run(kv, window())
    rows = window()
    rows[2] = (NAN_TOKEN, *rows[2][1:])
    _, outputs = model.run(kv, rows)
    testing.assert_same_bits(first(outputs, 2), first(healthy, 2))
    assert np.isnan(outputs.logits[2:]).all()


@pytest.mark.parametrize("impl", [slow("xla"), "native"])
def test_a_neighbours_fault_is_caught(impl, monkeypatch):
    """Negative control: plants attention that reads the keys of another slot."""
    model = make_model("float32", impl)
    kv = model.two_slots()
    _, alone = model.run(kv, window(1, 1))
    native, others = (steps, "step"), (row_attention, "row_attention")
    module, name = native if impl == "native" else others
    real = getattr(module, name)

    def leaky(*args, slots, **kwargs):
        return real(*args, slots=jnp.zeros_like(slots), **kwargs)

    monkeypatch.setattr(module, name, leaky)
    _, leaked = model.run(kv, window(1, 1), forward=compile_forward())
    with pytest.raises(AssertionError, match="elements differ"):
        testing.assert_same_bits(leaked, alone)


def test_pages_and_table_width_do_not_matter(model):
    """Fails if bits depend on which pages hold the prefix, or on their number."""
    reference = None
    for seed, width, spare in ((0, 20, 7), (1, 20, 7), (2, 33, 11)):
        kv = make_cache(model.config, table_width=width, spare_pages=spare, seed=seed)
        kv = model.fill(kv)
        after, outputs = model.run(kv, window())
        result = (outputs, written(after))
        if reference is None:
            reference = result
        testing.assert_same_bits(result, reference)


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads", "impl"),
    [(64, 2, 2, "xla"), (80, 7, 1, "native"), (128, 4, 2, "native")],
)
def test_head_sizes_and_groups(head_dim, num_heads, num_kv_heads, impl):
    """Checks the contract at other head sizes; 1, 7 and 2 query heads a key head."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    model = make_model("float32", impl, head_dim=head_dim, num_layers=1, **heads)
    kv = model.fill(make_cache(model.config))
    decoded_kv, decoded = model.decode_one_by_one(kv, window())
    verified_kv, verified = model.run(kv, window())
    testing.assert_same_bits(verified.logits, decoded.logits)
    testing.assert_same_bits(written(verified_kv), written(decoded_kv))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "weights"),
    [
        ("float32", 1e-5, "dense"),
        *(slow("bfloat16", 0.04, "q8_0"), slow("bfloat16", 0.04, "q4_1")),
    ],
)
def test_implementations_agree_but_for_rounding(dtype, tolerance, weights):
    """Compares two independent implementations of a model; a wrong weight must show."""
    xla, native = (make_model(dtype, x, weights=weights) for x in ("xla", "native"))
    logits = []
    for model in (xla, native):
        kv = model.fill(make_cache(model.config))
        logits.append(model.run(kv, window())[1].logits)
    scale = np.abs(logits[0]).max()
    assert np.abs(logits[0] - logits[1]).max() <= tolerance * scale
    layers = native.params.layers
    wrong = layers[0].replace(k_norm=jnp.flip(layers[0].k_norm) * 2)
    params = native.params.replace(layers=(wrong, *layers[1:]))
    broken = dataclasses.replace(native, params=params)
    kv = broken.fill(make_cache(broken.config))
    logits.append(broken.run(kv, window())[1].logits)
    assert np.abs(logits[0] - logits[2]).max() > tolerance * scale


@pytest.mark.parametrize(
    ("dtype", "impl", "weights", "most"),
    [
        ("bfloat16", "native", "q8_0", None),
        ("float32", "xla", "dense", 1e-4),
        slow("bfloat16", "native", "q4_1", None),
        slow("bfloat16", "xla", "q8_0", 0.12),  # Rows are rounded to bytes.
    ],
)
def test_the_prefill_of_a_row_model(dtype, impl, weights, most):
    """Fails if the taller slab of a native prefill gives other bits than decoding.

    With XLA the default is the batched prefill, whose bits differ.
    """
    model = make_model(dtype, impl, weights=weights)
    rows = row_model.RowModel(config=model.config, impl=model.impl, slab=SLAB)
    tokens = text()[:64].tolist()  # 64 fill a bucket: padding would be `NAN_TOKEN`.

    def prefill(kv, **how):
        return rows.prefill(model.params, kv, tokens, **how)[0]

    default = written(prefill(make_cache(model.config)), 0, 64)
    decoded = make_cache(model.config)
    for position in range(64):
        decoded, _ = model.run(decoded, [(tokens[position], 0, position)])
    if impl == "native":
        testing.assert_same_bits(default, written(decoded, 0, 64))
    else:
        kv = prefill(make_cache(model.config), by_rows=True)
        by_rows = written(kv, 0, 64)
        testing.assert_same_bits(by_rows, written(decoded, 0, 64))
        with pytest.raises(AssertionError):
            testing.assert_same_bits(default, by_rows)
        wide = lambda kv: [np.asarray(x, np.float32) for x in kv]
        chex.assert_trees_all_close(wide(default), wide(by_rows), atol=most, rtol=most)
