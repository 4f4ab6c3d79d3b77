"""jax's interpreter of Mosaic: the GPU's memories, copies and barriers on a CPU."""

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


def params():
    """What a kernel takes as `interpret`; skips the tests of a module on jax 0.10.

    There the interpreter has no views of references.
    """
    if jax.__version_info__ < (0, 11):
        pytest.skip(
            f"jax {jax.__version__} cannot interpret these kernels: 0.11 can",
            allow_module_level=True,
        )
    return plgpu.InterpretGPUParams()
