"""The choice of the implementation that runs; and arrays that kernels would misread,
which are refused: one table of all operations."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import row_contract, row_slabs as slabs, test_draw

from spec_jax.model import row_model
from spec_jax.native import build
from spec_jax.ops import dispatch
from spec_jax.pallas import rms_norm_triton, skinny_gemm_triton
from spec_jax.rules import sampling


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a choice on the CPU")
@pytest.mark.parametrize("compiles", [True, False])
def test_auto_is_native_where_that_compiles(compiles, monkeypatch, caplog):
    """Fails if "auto" is slow without a reason, or does not say the reason."""

    def load():
        if not compiles:
            raise build.BuildError("no C++ compiler found\nand more")

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(dispatch, "_choose", dispatch._choose.__wrapped__)
    chosen = dispatch.resolve("auto")
    assert chosen == ("native" if compiles else "xla") == dispatch.resolve(chosen)
    said = [record.getMessage() for record in caplog.records]
    line = "no native kernels, XLA runs instead: no C++ compiler found"
    assert said == ([] if compiles else [line])


def test_a_platform_that_jax_cannot_start(monkeypatch):
    """Fails if jax's own error escapes, or the message has more than one line."""

    def fail():
        raise RuntimeError("Unable to initialize 'x'\nand more")

    monkeypatch.setattr(jax, "default_backend", fail)
    message = r"^JAX_PLATFORMS=.*: jax cannot start it here \(Unable to .* 'x'\); leave"
    with pytest.raises(ValueError, match=message) as caught:
        dispatch.resolve("auto")
    assert "\n" not in str(caught.value)


REMOVED = r"was removed: .* 1.60 ms with it and 1.09 ms .*; commit 9b82177 has it$"
CHOICES = [
    ("gpu", "auto", "triton"),
    ("gpu", "triton", "triton"),
    ("cpu", "interpret", "interpret"),
    ("cpu", "xla", "xla"),
    ("tpu", "auto", "xla"),
    ("cpu", "triton", "runs on a GPU, .* here is cpu: use xla.*extra cuda12 or cuda13"),
    ("tpu", "triton", "runs on a GPU, and jax's backend here is tpu"),
    ("gpu", "native", "runs on the CPU, not on gpu"),
    ("gpu", "interpret", "runs on the CPU, not on gpu"),
    ("cpu", "XLA", "is not one of auto, xla"),
    ("cpu", None, "is not one of auto, xla"),
    ("cpu", "mosaic", REMOVED),
]


@pytest.mark.parametrize(("backend", "impl", "outcome"), CHOICES)
def test_kernels_by_device(backend, impl, outcome, monkeypatch):
    """Fails if a device is denied its kernels or given another's, or if another
    implementation runs instead of the named one."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if " " not in outcome:
        assert dispatch.resolve(impl) == outcome
        return
    is_known = impl in ("triton", "native", "interpret")
    error = NotImplementedError if is_known else ValueError
    with pytest.raises(error, match=f"^impl={impl!r} {outcome}"):
        dispatch.resolve(impl)


def test_a_slab_that_kernels_do_not_have_is_refused():
    """Fails if rows beyond all slabs are cut off, or a slab's height is wrong."""
    assert row_model.slab_for("xla", 65) == 65
    assert row_model.slab_for("triton", 5) == row_model.slab_for("interpret", 64) == 16
    with pytest.raises(ValueError, match="65 rows do not fit impl='triton'.*gamma 63"):
        row_model.slab_for("triton", 65)
    assert [dispatch.whole_slabs("triton", n) for n in (1, 16, 17)] == [16, 16, 32]
    assert dispatch.whole_slabs("native", 17) == 17
    with pytest.raises(
        ValueError, match="slab=8, but impl='interpret' has slabs of 16"
    ):
        dataclasses.replace(decoding.TARGET, impl="interpret", slab=8)


ones = lambda *shape, dtype="bfloat16": np.ones(shape, dtype)
whole = lambda *shape: np.zeros(shape, np.int32)
BOTH = ("portable", "interpret")
LIVE = {"num_active": np.int32(2)}
DEFAULTS = {
    "argmax": LIVE,
    "draw": {
        "logits": ones(2, 5, dtype="float32"), "settings": sampling.greedy(2),
        "positions": whole(2), "asked": np.ones(2, bool),
    },
    "embed": {"index": whole(2), **LIVE},
    "norm": {"x": ones(2, 8), "weight": ones(8), "eps": 0.0, **LIVE},
    "project": {
        "x": ones(3, 7), "w": ones(5, 7), "norm": None, "residual": None, "eps": 0.0,
        "out_dtype": "bfloat16", **LIVE,
    },
    "move": {
        "pools": (ones(7, 4, 2, 6),) * 2, "page_table": whole(2, 3), "slots": whole(3),
        "sources": whole(3), "targets": whole(3), "moves": np.ones(3, bool),
    },
}  # fmt: skip
"""Arguments of each operation that are in order, if a row does not give them all."""
KERNELS = {
    **{("draw", impl): functools.partial(test_draw.run, impl) for impl in BOTH},
    ("norm", "interpret"): rms_norm_triton.rms_norm,
    ("project", "interpret"): lambda *, norm, eps, **given: skinny_gemm_triton.project(
        **given
    ),
}
"""Kernels that are called before the types of their operation are checked, if any."""

SHAPE, DTYPE = ValueError, NotImplementedError
REFUSALS = (
    ("argmax", "interpret", {"logits": ones(2, 0, dtype="float32")}, SHAPE,
     r"of 0 logits.*1\.\.4194304"),
    ("argmax", "interpret", {"logits": ones(2, 8, dtype="float16")}, DTYPE,
     "not float16"),
    ("argmax", "portable", {"x": ones(1, 0, dtype="float32")}, SHAPE, "no values"),
    ("argmax", "portable", {"x": ones(1, 4)}, DTYPE, "float32, not bfloat16"),
    ("draw", "portable", {"logits": jnp.zeros((2, 5), "bfloat16")}, DTYPE, "float32"),
    ("draw", "portable", {"asked": np.ones(3, bool)}, SHAPE, "asked has shape"),
    ("draw", "portable", {"positions": whole(3)}, SHAPE, "positions has shape"),
    ("draw", "interpret", {"settings": sampling.greedy(5)}, SHAPE,
     r"temperature has shape \(5,\), not \(2,\)"),
    ("draw", "interpret", {"logits": ones(2, 0, dtype="float32")}, SHAPE,
     r"rows of 0 logits are not in 1\.\.419430"),
    ("embed", "portable", {"table": ones(4, 8, dtype="float16")}, DTYPE,
     "float32 or bfloat16"),
    ("norm", "interpret", {"weight": ones(7)}, SHAPE, r"weight has shape \(7,\), not"),
    ("norm", "interpret", {"weight": ones(8, dtype="float32")}, SHAPE,
     "rows are bfloat16 but the weight is float32"),
    *(
        ("norm", "interpret", {"x": ones(2, D), "weight": ones(D)}, SHAPE,
         rf"rows of {D} elements are not in 1\.\.16384")
        for D in (0, 16_385)
    ),
    *(
        ("project", impl, change, error, words)
        for impl in BOTH
        for change, error, words in (
            ({"w": ones(5, 8)}, SHAPE, r"w has shape \(5, 8\), not"),
            ({"residual": ones(4, 5)}, SHAPE, "residual has shape"),
            ({"num_active": whole(1)}, SHAPE, "num_active has shape"),
            ({"out_dtype": "float16"}, DTYPE, "cannot give float16"),
        )
    ),
    ("project", "portable", {"norm": ones(6)}, SHAPE, "norm has shape"),
    ("project", "portable", {"w": ones(5, 7, dtype="float16")}, DTYPE, "float16"),
    ("project", "portable", {"w": ones(5, 7, dtype="float32")}, DTYPE, "one of them"),
    ("project", "sse", {}, SHAPE, "isa='sse' is not one of amx"),
    ("project", "interpret", {"w": ones(5, 7, dtype="float32")}, DTYPE, "w is float32"),
    ("project", "xla", {"out_dtype": "float32", "residual": ones(3, 5)}, SHAPE,
     "a residual of bfloat16 cannot give float32"),
    ("project", "xla", {"x": ones(1, 7)}, SHAPE, "at least 2 rows, got 1"),
    ("project", "xla", {"w": ones(5, 7, dtype="float32")}, SHAPE,
     "weights are float32"),
    ("move", "portable", {"pools": (ones(7, 4, 2, 6), ones(6, 4, 2, 6))}, SHAPE,
     "pool has shape"),
    ("move", "portable", {"page_table": whole(3)}, SHAPE, "page_table has shape"),
    ("move", "portable",
     {"pools": (ones(7, 4, 2, 6), ones(7, 4, 2, 6, dtype="float32"))}, DTYPE,
     "one of them"),
    ("attend", "interpret", {"H": 258}, DTYPE, "size 258 is odd, below 16 or above"),
    ("attend", "interpret", {"N": 34}, DTYPE, "17 query heads to a key/value head"),
    ("attend", "interpret", {"heads": jnp.ones((8, 128))}, DTYPE, "pages of one d"),
    ("attend", "portable", {"H": 258}, DTYPE, "head size 258 is odd, or above 256"),
    ("attend", "portable", {"q_norm": jnp.ones(16)}, DTYPE, "one of them"),
    ("attend", "portable", {"q_norm": None}, SHAPE, "of queries and of keys: both"),
    ("attend", "portable", {"page_table": whole(3)}, SHAPE, "page_table has shape"),
    *(
        ("attend", impl, change, SHAPE, words)
        for impl in BOTH
        for change, words in (
            ({"N": 3}, "3 query heads for 2 key/value heads"),
            ({"cos": ones(8, 9)}, r"cos has shape \(8, 9\)"),
            ({"slots": whole(3)}, "slots has shape"),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize(("operation", "impl", "change", "error", "words"), REFUSALS)
def test_refusals(operation, impl, change, error, words):
    """Fails if a kernel runs on arrays of a shape or dtype that it does not expect."""
    with pytest.raises(error, match=words):
        if operation == "attend":
            sizes = {name: size for name, size in change.items() if type(size) is int}
            slab = slabs.small_slab(np.random.default_rng(0), **sizes)
            arrays = {name: change[name] for name in change.keys() - sizes}
            slabs.run(impl, dataclasses.replace(slab, **arrays), 8)
        else:
            kernel = KERNELS.get((operation, impl))
            kernel = kernel or row_contract.compiled(operation, impl)
            kernel(**DEFAULTS[operation] | change)
