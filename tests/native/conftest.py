"""The instruction sets that the tests of the kernels run."""

import emulation
import pytest

from spec_jax.native import build


@pytest.fixture(params=[*build.available_isas(), *emulation.lacking()])
def isa(request, monkeypatch) -> str:
    """Every instruction set of this machine in turn, and those that are emulated."""
    try:
        if request.param in emulation.FLAGS:
            emulation.install(request.param, monkeypatch)
        return build.load(request.param)
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def unloaded(monkeypatch):
    """As in a process that has loaded nothing; later tests find what was loaded."""
    monkeypatch.setattr(build, "_load", build._load.__wrapped__)
    monkeypatch.setattr(build, "_in_use", None)
    monkeypatch.setenv(build.ISA_VARIABLE, "")
