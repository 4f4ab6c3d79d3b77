"""The implementations that tests of an operation run."""

import pytest
from native import emulation


def _loaded(request, monkeypatch) -> str:
    if request.param in ("xla", "interpret"):
        return request.param
    if request.param == "native":
        emulation.load(None, monkeypatch)
        return "native"
    return emulation.load(request.param, monkeypatch)


@pytest.fixture(params=["xla", "interpret", *emulation.every()])
def impl(request, monkeypatch) -> str:
    """Loads XLA, interpreted Triton kernels and each native instruction set, in turn. A
    test may ask for "native": the operation's own choice of an instruction set."""
    return _loaded(request, monkeypatch)


@pytest.fixture(params=["interpret", *emulation.every()])
def kernels(request, monkeypatch) -> str:
    """Loads the implementations of `impl` but XLA."""
    return _loaded(request, monkeypatch)
