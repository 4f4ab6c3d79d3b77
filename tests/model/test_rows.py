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
import page_tables
import pytest
from slow_cases import slow

from spec_jax import testing
from spec_jax.model import (
    config as config_lib,
    decoder,
    gpt_neox,
    observe,
    params as params_lib,
    qwen2,
    row_model,
)
from spec_jax.ops import dispatch
from spec_jax.paging import allocator, cache


PREFIX = 141  # past one key block of the attention, inside a page
WINDOW = 5
NAN_TOKEN = 0
SLAB = 8


CONFIGS = {
    "qwen3": config_lib.Qwen3Config,
    "qwen2": qwen2.Qwen2Config,
    "gpt_neox": gpt_neox.GPTNeoXConfig,
}


def make_config(dtype: str, family="qwen3", **changes) -> config_lib.ModelConfig:
    sizes = {
        "vocab_size": 160, "hidden_size": 96, "intermediate_size": 176,
        "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "dtype": dtype,
        "tie_word_embeddings": False,  # so a NaN embedding makes no NaN logit
    }  # fmt: skip
    if family == "gpt_neox":
        sizes |= {"num_heads": 3, "num_kv_heads": 3, "rotary_size": 8}
    return CONFIGS[family](**sizes | changes)


def make_params(config: config_lib.ModelConfig) -> params_lib.Params:
    """Makes random weights, biases too; the embedding of `NAN_TOKEN` is NaN."""
    params = params_lib.init(jax.random.key(0), config, stddev=0.1)
    params = params_lib.cast(decoding.perturbed(params, 0.1), config.dtype)
    params = params.replace(embed=params.embed.at[NAN_TOKEN].set(jnp.nan))
    return params_lib.to_bytes(params, config.weights)


def make_cache(config, *, page_size=16, table_width=20) -> cache.PagedKV:
    """Makes two slots in a pool full of NaN, the free pages in random order. It
    has one shape unless a test is about the shape: `forward` is compiled once."""
    num_pages = 2 * table_width + 7
    kv = cache.init(
        num_layers=config.num_layers, num_slots=2, num_pages=num_pages,
        page_size=page_size, pages_per_slot=table_width, dtype=config.dtype,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    poison = functools.partial(jnp.full_like, fill_value=jnp.nan)
    kv = kv.replace(k=tuple(map(poison, kv.k)), v=tuple(map(poison, kv.v)))
    return page_tables.shuffled(kv, np.random.default_rng(0))


def text(slot: int = 0, length: int = PREFIX + WINDOW) -> np.ndarray:
    """Returns tokens, other ones for each slot; `NAN_TOKEN` is not among them."""
    return np.random.default_rng(100 + slot).integers(1, 160, length).astype(np.int32)


def compile_forward(**hook):
    """Returns a jitted `forward_rows` with its own cache of compiled programs."""

    @functools.partial(jax.jit, static_argnames=("config", "impl"))
    def forward(params, config, rows, kv, *, impl):
        how = {"impl": impl, "taps": (0, 1), **hook}
        return decoder.forward_rows(params, config, rows, kv, **how)

    return forward


_forward = compile_forward()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A random model and the implementation that runs it."""

    config: config_lib.ModelConfig
    params: params_lib.Params
    impl: str

    @property
    def slab(self) -> int:
        return dispatch.slab_rows(self.impl) or SLAB

    @property
    def rows(self) -> row_model.RowModel:
        return row_model.RowModel(config=self.config, impl=self.impl, slab=self.slab)

    def run(self, kv, rows, *, slab=None, branch=None, forward=_forward):
        """Runs `rows`, each `(token, slot, position)`; padding rows are poisoned."""
        for _, slot, position in rows:
            kv = allocator.reserve(kv, slot, position + 1)
        missing = (slab or self.slab) - len(rows)
        dead = [(NAN_TOKEN, 0, PREFIX + 900)] * missing
        tokens, slots, positions = np.asarray(rows + dead, np.int32).T
        if branch is not None:
            branch = np.pad(branch, ((0, missing), (0, 0)), constant_values=900)
        given = decoder.Rows(
            tokens=tokens, slots=slots, positions=positions, branch=branch,
            num_active=jnp.int32(len(rows)),
        )  # fmt: skip
        kv, outputs = forward(self.params, self.config, given, kv, impl=self.impl)
        for _, slot, position in rows:
            kv = allocator.extend(kv, slot, max(int(kv.length[slot]), position + 1))
        return kv, jax.tree.map(lambda x: np.asarray(x[: len(rows)]), outputs)

    def fill(self, kv, *, slot=0, length=PREFIX):
        """Writes the first tokens of a slot's prefix, by rows. Donates `kv`."""
        tokens, how = text(slot)[:length].tolist(), {"slot": slot, "by_rows": True}
        return self.rows.prefill(self.params, kv, tokens, **how)[0]

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


@pytest.fixture
def model(request) -> Model:
    """Makes the model that a case names: its dtype, its kernels, and form or family."""
    dtype, impl, *other = request.param.split("-")
    changes = {}
    if other and other[0] in CONFIGS:
        changes = {"family": other[0], "num_layers": 1}
    elif other:
        changes = {"weights": other[0]}
    return make_model(dtype, impl, **changes)


def assert_verifying_is_decoding(model, counts=(WINDOW,), **sizes):
    """Compares windows of these lengths with the oracle, and returns what it gives.
    Native slabs are as low as their rows are few; other slabs are padded with NaN."""
    kv = model.fill(make_cache(model.config, **sizes))
    decoded_kv, decoded = model.decode_one_by_one(kv, window())
    assert np.isfinite(decoded.logits).all()
    for count in counts:
        slab = count if model.impl == "native" else None
        verified_kv, verified = model.run(kv, window(count=count), slab=slab)
        what = f"{count} live, {sizes}"
        testing.assert_same_bits(verified, first(decoded, count), what=what)
    testing.assert_same_bits(written(verified_kv), written(decoded_kv))
    return decoded, written(decoded_kv)


@pytest.mark.parametrize(
    "model",
    [
        *("float32-xla", "bfloat16-native", "float32-native", "bfloat16-native-q8_0"),
        *map(slow, ("bfloat16-native-q4_1", "bfloat16-xla-q8_0", "bfloat16-xla-q4_1")),
    ],
    indirect=True,
)
def test_verifying_equals_decoding_one_by_one(model):
    """Fails if a row's bits depend on its place, on how many rows are active, on the
    slab's height, or on which pages hold the prefix, and on their size and number."""
    found = assert_verifying_is_decoding(model, range(1, WINDOW + 1))
    # A block of keys is several pages or part of one. (XLA's programs compile slowly.)
    if (model.impl, model.config.dtype) == ("native", "float32"):
        for page_size, width in ((8, 33), (256, 20)):
            sizes = {"page_size": page_size, "table_width": width}
            other = assert_verifying_is_decoding(model, **sizes)
            testing.assert_same_bits(other, found, what=f"{sizes}")


@pytest.mark.parametrize(
    "model",
    [
        *("bfloat16-native", "float32-xla"),
        *("float32-xla-gpt_neox", "bfloat16-native-qwen2"),
        slow("bfloat16-native-gpt_neox"),
    ],  # `pallas/test_triton_model` checks interpreted kernels.
    indirect=True,
)
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
    """Fails if the taller slab of a native prefill gives other bits than decoding. With
    XLA the default is the batched prefill, whose bits differ."""
    model = make_model(dtype, impl, weights=weights)
    tokens = text()[:64].tolist()  # 64 fill a bucket: padding would be `NAN_TOKEN`.

    def prefill(**how):
        kv = make_cache(model.config)
        kv, _ = model.rows.prefill(model.params, kv, tokens, **how)
        return written(kv, 0, 64)

    decoded = make_cache(model.config)
    for position in range(64):
        decoded, _ = model.run(decoded, [(tokens[position], 0, position)])
    by_rows = prefill(**({} if impl == "native" else {"by_rows": True}))
    testing.assert_same_bits(by_rows, written(decoded, 0, 64))
    if impl == "xla":
        default = prefill()
        with pytest.raises(AssertionError):
            testing.assert_same_bits(default, by_rows)
        wide = lambda kv: [np.asarray(x, np.float32) for x in kv]
        chex.assert_trees_all_close(wide(default), wide(by_rows), atol=most, rtol=most)


LIVE = 3


def observed(hook):
    """Returns the cache and logits of three active rows of five after the prompt."""
    model = make_model("bfloat16", "native")
    kv = model.fill(make_cache(model.config))
    how = {"slab": 5, "forward": compile_forward(observe=hook)}
    kv, outputs = model.run(kv, window(count=LIVE), **how)
    return decoding.held(kv, PREFIX + LIVE), outputs.logits


@functools.cache
def unseen():
    return observed(None)


def key_of(layer, operation):
    return operation if layer is None else f"{layer}:{operation}"


def test_the_hook_sees_all_that_leaves_a_kernel_and_moves_no_bit():
    """Fails if the hook misses or repeats an operation, or looking changes a bit."""
    seen = {}

    def record(layer, operation, value):
        seen[key_of(layer, operation)] = value.reshape(5, -1).shape[1]
        return value

    testing.assert_same_bits(observed(record), unseen())
    of_layer = observe.LEAVES_ROWS[1:-1]
    config = make_config("bfloat16")
    layers = [f"{n}:{name}" for n in range(config.num_layers) for name in of_layer]
    assert list(seen) == ["embed", *layers, "logits"]
    D, F = config.hidden_size, config.intermediate_size
    N, K = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    widths = {"embed": D, "1:q": N, "1:k": K, "1:v": K, "1:k_cache": K}
    widths |= {"0:v_cache": K, "0:attention": N, "0:attention_residual": D}
    widths |= {"0:swiglu": F, "1:mlp_residual": D, "logits": config.vocab_size}
    assert {key: seen[key] for key in widths} == widths


@pytest.mark.parametrize(
    ("key", "written_differs"), [("1:k_cache", True), ("1:swiglu", False)]
)
def test_what_the_hook_returns_goes_on(key, written_differs):
    """Negative control: the hook changes one element of one row, which must be seen."""

    def change(layer, operation, value):
        if key_of(layer, operation) != key:
            return value
        flat = value.reshape(5, -1)
        return flat.at[LIVE - 1, 0].add(1).reshape(value.shape)

    held, logits = observed(change)
    expected_held, expected_logits = unseen()
    if written_differs:  # The layer reads the key before it is changed and stored.
        testing.assert_same_bits(logits, expected_logits)
    else:
        testing.assert_same_bits(logits[: LIVE - 1], expected_logits[: LIVE - 1])
        assert (logits[LIVE - 1] != expected_logits[LIVE - 1]).any()
    differs = [
        np.flatnonzero((testing.bits(ours) != testing.bits(theirs)).any(axis=(1, 2)))
        for ours, theirs in zip(held, expected_held, strict=True)
    ]
    changed = {PREFIX + LIVE - 1} if written_differs else set()
    assert set(np.concatenate(differs).tolist()) == changed
