"""Which implementation runs."""

import jax
import pytest

from spec_jax.native import build
from spec_jax.ops import dispatch
from spec_jax.typing import IMPLS


def test_the_reference_stands_for_itself():
    """Fails if a named implementation is quietly replaced by another."""
    assert dispatch.resolve("xla") == "xla"


def test_auto_is_an_implementation():
    """Fails if "auto" is left to be decided later, call by call."""
    chosen = dispatch.resolve("auto")
    assert chosen in set(IMPLS) - {"auto"}
    assert dispatch.resolve(chosen) == chosen


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a choice on the CPU")
@pytest.mark.parametrize("compiles", [True, False])
def test_auto_is_native_where_that_compiles(compiles, monkeypatch, caplog):
    """Fails if "auto" is slow without a reason, or does not say the reason."""

    def load():
        if not compiles:
            raise build.BuildError("no C++ compiler found\nand more")

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(dispatch, "_choose", dispatch._choose.__wrapped__)
    assert dispatch.resolve("auto") == ("native" if compiles else "xla")
    said = [record.getMessage() for record in caplog.records]
    line = "no native kernels, XLA runs instead: no C++ compiler found"
    assert said == ([] if compiles else [line])


@pytest.mark.parametrize("impl", ["triton", "mosaic"])
def test_implementations_that_cannot_run_raise(impl):
    """Fails if a named implementation falls through to another."""
    with pytest.raises(NotImplementedError, match=f"impl='{impl}'.*use xla"):
        dispatch.resolve(impl)


@pytest.mark.parametrize("impl", ["XLA", "", "cuda", None])
def test_unknown_names_raise(impl):
    """Fails if a misspelt name runs the default."""
    with pytest.raises(ValueError, match=f"impl={impl!r} is not one of auto, xla"):
        dispatch.resolve(impl)
