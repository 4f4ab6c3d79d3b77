"""The choice of the implementation that runs."""

import dataclasses

import decoding
import jax
import pytest

from spec_jax.model import row_model
from spec_jax.native import build
from spec_jax.ops import dispatch


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
