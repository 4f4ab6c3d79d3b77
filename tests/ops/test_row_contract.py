"""Each operation on rows keeps the row contract, in every implementation."""

import functools

import numpy as np
import pytest
from native import emulation, native_oracle as oracle
from ops import products, row_contract

from spec_jax.ops import rope


ROWS = 9  # more than one group of rows of the native kernels


PROJECT = {"K": 129, "N": 40, "has_residual": True}
GATE = {"K": 65, "N": 26, "is_gate": True}
PRODUCTS = {
    "project": PROJECT,
    "gate": GATE,
    "byte_project": PROJECT | {"form": "q8_0"},
    "byte_gate": GATE | {"form": "q8_0"},
    "four_bits_project": PROJECT | {"form": "q4_1"},
    "four_bits_gate": GATE | {"form": "q4_1"},
}


def product(rng, impl, name):
    is_wide = name == "project" and impl != "interpret"
    dtype = "float32" if is_wide else "bfloat16"
    made = products.Product(dtype=dtype, **PRODUCTS[name])
    rows, weights = made.inputs(rng, ROWS)
    call = row_contract.compiled("gate" if made.is_gate else "project", impl)
    return lambda rows, live: call(**made.arguments(rows, weights, live)), rows


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


OPERATIONS = {name: functools.partial(product, name=name) for name in PRODUCTS}
OPERATIONS |= {"argmax": argmax, "norm": norm, "angles": angles}
KERNELS = {
    **dict.fromkeys(PRODUCTS, ("interpret", *emulation.every(amx=True))),
    "argmax": ("interpret", *emulation.every()),
    **dict.fromkeys(("four_bits_project", "four_bits_gate"), emulation.every()),
    **dict.fromkeys(("norm", "angles"), ("interpret",)),
}
"""The implementations of each operation besides XLA."""

SLOW = ("interpret", "byte_gate")  # Its tiles are those of `byte_project`.


@pytest.mark.parametrize(
    ("impl", "operation"),
    [
        pytest.param(impl, one, marks=[pytest.mark.slow] * ((impl, one) == SLOW))
        for one, kernels in KERNELS.items()
        for impl in ("xla", *kernels)
    ],
    indirect=["impl"],
)
def test_a_row_is_that_row_alone(rng, impl, operation):
    """Fails if a row depends on its place, on others, or on their number, or if, with
    weights of few bits, others change its rounding or the order of its blocks."""
    run, rows = OPERATIONS[operation](rng, impl)
    row_contract.assert_row_contract(run, rows, is_alone=impl != "xla")


FAULTS = {
    "the number of rows": lambda x, live: x * (1 + live),
    "its neighbour": lambda x, live: x + np.roll(x, 1, axis=0),
    "its place": lambda x, live: x + np.arange(len(x))[:, None],
    "padding": lambda x, live: x + 0 * x.sum(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_depend_on_others_are_caught(rng, fault):
    """Negative control: dependences that the contract forbids."""
    rows = rng.standard_normal((ROWS, 3))
    row_contract.assert_row_contract(lambda x, live: 2 * x, rows)
    with pytest.raises(AssertionError, match="elements differ"):
        row_contract.assert_row_contract(FAULTS[fault], rows)
