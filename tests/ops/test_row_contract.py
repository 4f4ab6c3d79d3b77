"""Each operation on rows keeps the row contract, in every implementation."""

import numpy as np
import pytest
from native import emulation, native_oracle as oracle
from ops import products, row_contract

from spec_jax.ops import rope


ROWS = 9  # more than a native group


def product(rng, impl, **shape):
    made = products.Product(**shape)
    rows, weights = made.inputs(rng, ROWS)
    call = row_contract.compiled("gate" if made.is_gate else "project", impl)
    return lambda rows, live: call(**made.arguments(rows, weights, live)), rows


def project(rng, impl):
    dtype = "bfloat16" if impl == "interpret" else "float32"
    return product(rng, impl, K=129, N=40, dtype=dtype, has_residual=True)


def gate(rng, impl):
    return product(rng, impl, K=33, N=26, is_gate=True)


def byte_project(rng, impl, form="q8_0"):
    sizes = {"K": 129, "N": 40, "form": form, "has_residual": True}
    return product(rng, impl, **sizes)


def byte_gate(rng, impl, form="q8_0"):
    return product(rng, impl, K=65, N=26, is_gate=True, form=form)


def four_bits_project(rng, impl):
    return byte_project(rng, impl, "q4_1")


def four_bits_gate(rng, impl):
    return byte_gate(rng, impl, "q4_1")


def argmax(rng, impl):
    call = row_contract.compiled("argmax", impl)
    logits = rng.standard_normal((ROWS, 700)).astype(np.float32)
    return lambda rows, live: call(rows, num_active=np.int32(live)), logits


def norm(rng, impl):
    call = row_contract.compiled("norm", impl)
    weight = oracle.normal(rng, 80, "bfloat16")
    x = oracle.normal(rng, (ROWS, 80), "bfloat16")
    run = lambda x, live: call(x, weight, num_active=np.int32(live), eps=1e-3)
    return run, x


def angles(rng, impl):
    call = row_contract.compiled("angles", impl)
    frequencies = rope.inverse_frequencies(96, 1e6)
    positions = rng.integers(0, 40_960, ROWS).astype(np.int32)
    return lambda x, live: call(x, frequencies, scale=1.0, dtype="float32"), positions


KERNELS = {
    **dict.fromkeys((project, gate, argmax), ("interpret", *emulation.every())),
    **dict.fromkeys((byte_project, byte_gate), ("interpret", *emulation.every())),
    **dict.fromkeys((four_bits_project, four_bits_gate), emulation.every()),
    **dict.fromkeys((norm, angles), ("interpret",)),
}
"""Whose kernels each operation has, besides XLA."""


@pytest.mark.parametrize(
    ("impl", "operation"),
    [(impl, one) for one, kernels in KERNELS.items() for impl in ("xla", *kernels)],
    indirect=["impl"],
)
def test_a_row_is_that_row_alone(rng, impl, operation):
    """Fails if a row depends on its place, on others, or on how many there are; or, of
    few bits, if it is rounded by others, or its blocks are added in another order."""
    run, rows = operation(rng, impl)
    row_contract.assert_row_contract(run, rows, is_alone=impl != "xla")


FAULTS = {
    "the number of rows": lambda x, live: x * (1 + live),
    "its neighbour": lambda x, live: x + np.roll(x, 1, axis=0),
    "its place": lambda x, live: x + np.arange(len(x))[:, None],
    "padding": lambda x, live: x + 0 * x.sum(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_depend_on_others_are_caught(rng, fault):
    """Negative control: what the contract forbids."""
    rows = rng.standard_normal((ROWS, 3))
    row_contract.assert_row_contract(lambda x, live: 2 * x, rows)
    with pytest.raises(AssertionError, match="elements differ"):
        row_contract.assert_row_contract(FAULTS[fault], rows)
