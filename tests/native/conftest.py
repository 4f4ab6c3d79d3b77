"""The instruction sets that the tests of the kernels run."""

import emulation
import pytest

from spec_jax.native import build


@pytest.fixture(params=emulation.every())
def isa(request, monkeypatch) -> str:
    """Loads each instruction set of this machine in turn, and each emulated one."""
    return emulation.load(request.param, monkeypatch)


@pytest.fixture
def unloaded(monkeypatch):
    """Makes `build` act as in a process that has loaded nothing, for one test."""
    monkeypatch.setattr(build, "_load", build._load.__wrapped__)
    monkeypatch.setattr(build, "_in_use", None)
    monkeypatch.setenv(build.ISA_VARIABLE, "")
