"""The instruction sets that the tests of the kernels run."""

import pytest

from spec_jax.native import build


@pytest.fixture(params=build.available_isas())
def isa(request) -> str:
    """Every instruction set of this machine in turn."""
    try:
        return build.load(request.param)
    except build.BuildError as error:
        pytest.skip(str(error))
