"""Operations on rows: the row contract of every implementation, and values of some."""

import decimal
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from native import emulation, native_oracle as oracle
from ops import row_contract
from slow_cases import slow

from spec_jax import testing
from spec_jax.ops import rope


ROWS = 9  # more than one group of rows of the native kernels


class Case(NamedTuple):
    """The call of an implementation, and its arguments, one entry a row; the results in
    float64, unless another file compares them, and the terms of their longest sum."""

    run: Callable[[Any, int], Any]
    rows: Any
    expected: Any = None
    reduction: int = 1


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


def product(rng, impl, name) -> Case:
    is_wide = name == "project" and impl != "interpret"
    dtype = "float32" if is_wide else "bfloat16"
    made = row_contract.Product(dtype=dtype, **PRODUCTS[name])
    rows, weights = made.inputs(rng, ROWS)
    call = row_contract.compiled("gate" if made.is_gate else "project", impl)
    return Case(lambda rows, live: call(**made.arguments(rows, weights, live)), rows)


def argmax(rng, impl) -> Case:
    call = row_contract.compiled("argmax", impl)
    logits = rng.standard_normal((ROWS, 700)).astype(np.float32)
    return Case(lambda rows, live: call(rows, num_active=np.int32(live)), logits)


def norm(rng, impl, *, dtype="bfloat16", width=80) -> Case:
    """Makes rows of very different size: the small ones show `eps`."""
    call, eps = row_contract.compiled("norm", impl), 1e-3
    weight = oracle.normal(rng, width, dtype)
    sizes = np.resize([1e-2, 1.0, 1e3], ROWS)[:, None]
    x = oracle.normal(rng, (ROWS, width), dtype, sizes)
    return Case(
        run=lambda x, live: call(x, weight, num_active=np.int32(live), eps=eps),
        rows=x,
        expected=oracle.rms_norm(*oracle.wide(x, weight), eps, x.dtype),
        reduction=width,
    )


def angles(rng, impl, *, dtype="float32", scale=1.0) -> Case:
    call = row_contract.compiled("angles", impl)
    frequencies = rope.inverse_frequencies(96, 1e6)
    # The last position of Qwen3, and the first ones.
    positions = np.array([0, 1, 7, 128, 5000, 40_959, 3, 2, 900], np.int32)
    # Products are rounded to float32, as in every implementation.
    radians = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    how = {"scale": scale, "dtype": dtype}
    return Case(
        run=lambda x, live: np.concatenate(call(x, frequencies, **how), axis=1),
        rows=positions,
        expected=oracle.rounded(
            scale * np.concatenate([np.cos(radians), np.sin(radians)], axis=1), dtype
        ),
    )


OPERATIONS = {name: functools.partial(product, name=name) for name in PRODUCTS}
VALUES = {
    "norm": norm,
    "norm of one": functools.partial(norm, width=1),
    "norm of float32": functools.partial(norm, dtype="float32"),
    "angles": angles,
    "angles of bfloat16": functools.partial(angles, dtype="bfloat16", scale=1.25),
}
OPERATIONS |= VALUES | {"argmax": argmax}
KERNELS = {
    **dict.fromkeys(PRODUCTS, ("interpret", *emulation.every(amx=True))),
    "argmax": ("interpret", *emulation.every()),
    **dict.fromkeys(("four_bits_project", "four_bits_gate"), emulation.every()),
    **dict.fromkeys(("norm", "angles"), ("interpret",)),
}
"""The implementations of each operation besides XLA, for the row contract."""
CASES = [(impl, one) for one, kernels in KERNELS.items() for impl in ("xla", *kernels)]
SLOW = ("interpret", "byte_gate")  # Its tiles are those of `byte_project`.


@pytest.mark.parametrize(
    ("impl", "operation"),
    [slow(*case) if case == SLOW else case for case in CASES],
    indirect=["impl"],
)
def test_a_row_is_that_row_alone(rng, impl, operation):
    """Fails if a row depends on its place, on others, or on their number, or if, with
    weights of few bits, others change its rounding or the order of its blocks."""
    case = OPERATIONS[operation](rng, impl)
    row_contract.assert_row_contract(case.run, case.rows, is_alone=impl != "xla")


@pytest.mark.parametrize("impl", ["xla", "interpret"], indirect=True)
@pytest.mark.parametrize("operation", VALUES)
def test_values_are_those_of_float64(rng, impl, operation):
    """Fails if a mean is over a padded block, or squares are summed in bfloat16, if the
    weight is multiplied before the cast back, or an angle is that of another position,
    frequency or half, or lacks its scale."""
    case = OPERATIONS[operation](rng, impl)
    found = np.asarray(case.run(case.rows, ROWS))
    near = {"dtype": found.dtype, "reduction": case.reduction}
    testing.assert_rows_close(found, case.expected, **near)
    if found.dtype == "bfloat16":
        oracle.assert_rounded_alike(found, case.expected)
    with pytest.raises(AssertionError, match="rows are off"):  # Negative control.
        testing.assert_rows_close(found, case.expected * 1.03, **near)


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


@pytest.mark.parametrize(
    ("head_dim", "theta"), [(64, 1e4), (80, 1e4), (128, 1e6), (128, 5e6)]
)
def test_frequencies_have_the_same_bits_everywhere(head_dim, theta):
    """Compares with powers that have 50 digits and are rounded once. Fails on
    processors with AVX-512 if the power is NumPy's in float32.
    """
    with decimal.localcontext(prec=50):
        base = decimal.Decimal(float(np.float32(theta)))
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = [float(base ** decimal.Decimal(float(x))) for x in exponents]
    expected = np.float32(1) / np.array(powers, np.float32)
    testing.assert_same_bits(rope.inverse_frequencies(head_dim, theta), expected)
