"""Bits of kernels from the command line: grids, planted faults, the model's shapes."""

import json

import jax
import jax.numpy as jnp
import pytest
import tiny_pair
from script_runs import rows_of

from experiments import kernels as script
from experiments.lib import kernel_checks, kernels, subjects
from spec_jax.model import config as config_lib


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder without weights: none are needed."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_pair.config(num_layers=2)
    (folder / "config.json").write_text(json.dumps(config_lib.to_dict(config)))
    return folder


def test_kernels_are_those_of_a_step():
    """Fails if one is left out, or a context that the model does not have is taken."""
    config = subjects.read_config("qwen3-0.6b", dtype=None)
    products = ["qkv", "attention out", "gate and up", "down", "head"]
    for impl, more in (("native", []), ("triton", ["norm", "argmax", "draw"])):
        made = kernels.cases(config, impl, contexts=(300, 10**6))
        assert list(made) == [*products, "context 300", *more]


def depends_on(what: str):
    """Rows whose bits depend on something that they must not know."""

    def run(inputs, pages):
        x, height = inputs["x"], inputs["x"].shape[0]
        extra = {
            "nothing": 0.0,
            "active rows": inputs["num_active"].astype(jnp.float32) * 1e-3,
            "places": jnp.arange(height, dtype=jnp.float32)[:, None] * 1e-3,
            "height": height * 1e-3,
        }[what]
        return x * 2 + extra, pages

    return run


@pytest.mark.parametrize(
    ("what", "caught"),
    [
        ("nothing", set()),
        ("active rows", {"active rows", "alone", "other heights"}),
        # Past sixteen, rows come again at other places.
        ("places", {"alone", "other places", "other heights"}),
        ("height", {"other heights"}),
    ],
)
def test_every_grid_catches_what_it_is_for(what, caught):
    """Negative controls: a kernel with a fault, one grid or more that differs."""
    inputs = {"x": jax.random.normal(jax.random.key(0), (16, 8))}
    inputs["num_active"] = jnp.int32(16)
    case = kernel_checks.Case(run=depends_on(what), inputs=inputs)
    first, *checks = kernel_checks.check("faulty", case)
    assert first["kind"] == "hash" and len(first["sha256"]) == 64
    found = {row["check"].partition(": ")[2] for row in checks if not row["equal"]}
    assert len(checks) == 4 and found == caught


def test_bits_are_compared_as_integers():
    """Fails if NaN equals nothing, or zeros of both signs are one."""
    x = jnp.asarray([[1.0, jnp.nan], [0.0, 2.0]], jnp.bfloat16)
    assert kernel_checks.differing({"x": x}, {"x": x}) == 0
    assert kernel_checks.differing(x, x.at[1, 0].set(-0.0)) == 1
    compare = kernel_checks.compare_rows
    expected = jnp.arange(12.0).reshape(4, 3)
    actual = jnp.roll(expected, -1, axis=0).at[3].set(jnp.nan)
    assert compare(actual, expected, at=[1, 2, 3, 0], live=3) == (0, 9)
    assert compare(actual, expected, at=[1, 2, 3, 0], live=4) == (3, 12)


@pytest.mark.parametrize(
    ("impl", "only", "grids"),
    [
        pytest.param("interpret", "attention out", 4, marks=pytest.mark.slow),
        ("native", "context", 6),
    ],
)
def test_bits_from_the_command_line(folder, tmp_path, impl, only, grids):
    """Fails if a row of our kernels depends on another, or a grid is left out."""
    out = tmp_path / "out.jsonl"
    given = ["--shapes", str(folder), "--contexts", "16", "--dtype", "bfloat16"]
    given += ["--impl", impl, "--only", f"^{only}", "--out", str(out)]
    assert script.main(given) == script.EQUAL == 0
    rows = rows_of(out)
    if impl == "interpret":
        control = rows.pop(0)
        assert control["kind"] == "control" and control["seen"]
    assert [row["kind"] for row in rows] == ["hash"] + ["bitwise"] * grids
    assert all(row["equal"] and row["impl"] == impl for row in rows[1:])
