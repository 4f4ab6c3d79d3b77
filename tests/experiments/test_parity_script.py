"""The microscope: it names every planted fault, and finds none in equal runs."""

import dataclasses
import functools

import decoding
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from script_runs import rows_from
from slow_cases import slow

from experiments import parity, plot
from experiments.lib import microscope
from spec_jax import testing
from spec_jax.model import decoder, llama, observe, params as params_lib, row_model


START = len(decoding.PROMPT) - 1
WINDOW = (decoding.PROMPT[-1], 4, 9, 33)
CONFIG = decoding.make_config(num_layers=2, dtype="bfloat16")
PARAMS = params_lib.init(jax.random.key(0), CONFIG, stddev=0.3)


def path(name=microscope.ROWS, *, dtype="bfloat16", impl="native", slab=5):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    model = row_model.RowModel(config=config, impl=impl, slab=slab)
    return microscope.Path(name=name, model=model)


@functools.cache
def prefix(dtype="bfloat16"):
    """Returns a cache with the prompt's K/V, and NaN in all other places."""
    model = path(dtype=dtype).model
    kv = model.new_cache(capacity=32, page_size=decoding.PAGE_SIZE)
    spoil = lambda pools: tuple(jnp.full_like(pool, jnp.nan) for pool in pools)
    kv = kv.replace(k=spoil(kv.k), v=spoil(kv.v))
    params = params_lib.cast(PARAMS, dtype)
    known = decoding.PROMPT[:START]
    return model.prefill(params, kv, list(known), by_rows=True)[0]


@functools.cache
def record(one, fault=None, window=WINDOW) -> microscope.Record:
    kv = prefix(one.model.config.dtype)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            patch.setattr(microscope, "_keep", fault)
        return microscope.record(one, one.weights(PARAMS), kv, window, START)


@pytest.mark.parametrize("other", [path(), path(microscope.DECODE, slab=8)])
def test_equal_runs_have_no_difference(other):
    """Fails if recording moves a bit, or a row depends on the rows beside it."""
    one = record(path(microscope.DECODE))
    found = microscope.compare(one, record(other), START)
    assert found["first"] is None and record(other).moved == one.moved == 0
    assert {*found["operations"], *found["outside"]} == {*observe.LEAVES_ROWS}
    cells = [*sum(found["cells"], []), *found["outside"].values()]
    assert len(cells) == 2 + CONFIG.num_layers * (len(observe.LEAVES_ROWS) - 2)
    assert all(cell["differing"] == 0 for cell in cells)


def test_a_recording_that_moves_bits_says_so(monkeypatch):
    """Negative control: the forward pass is another one while it is recorded."""
    real = decoder.forward_rows

    def shy(params, config, rows, kv, *, observe=None, **keywords):
        if observe is not None:
            params = params.replace(final_norm=params.final_norm * 2)
        return real(params, config, rows, kv, observe=observe, **keywords)

    monkeypatch.setattr(decoder, "forward_rows", shy)
    assert record(path(slab=6)).moved > 0  # Nothing is compiled yet for this slab.


def fault_of(of_layer: int | None, name: str):
    """Returns a fault: one element of an operation's last row, an ULP too large."""

    def fault(layer, operation, value):
        if (layer, operation) != (of_layer, name):
            return value
        at = len(WINDOW) - 1, value.shape[1] // 2
        unsigned = {2: jnp.uint16, 4: jnp.uint32}[value.dtype.itemsize]
        raised = jax.lax.bitcast_convert_type(value[at], unsigned) + unsigned(1)
        raised = jax.lax.bitcast_convert_type(raised, value.dtype)
        return value.at[at].set(raised)

    return fault


@pytest.mark.parametrize(
    ("layer", "name"), [(None, "embed"), (0, "k_cache"), slow(1, "swiglu")]
)
def test_every_planted_fault_is_named(layer, name):
    """Fails if an operation is not seen, or is named as another one."""
    sound, faulty = record(path()), record(path(), fault_of(layer, name))
    found = microscope.compare(sound, faulty, START)["first"]
    assert (found["layer"], found["operation"]) == (layer, name)
    # The fault is in one element of the last row.
    assert found["position"] == START + len(WINDOW) - 1
    assert found["differing"] == found["max_ulp"] == 1


@pytest.mark.parametrize("name", ["flash", slow("library-rows")])
def test_superseded_windows_have_the_values_of_rows(name):
    """Fails if a window lacks its prefix, a mask, a norm or a rotation."""
    design, decode = path(name, dtype="float32"), path("decode", dtype="float32")
    ours, theirs = record(design), record(decode)
    assert ours.moved == 0 and [*ours.values] == [*theirs.values]
    assert microscope.compare(theirs, ours, START)["first"]["layer"] == 0
    # Each operation sums at most 96 terms, and two layers pass an error on.
    close = {"dtype": "float32", "reduction": 96 * 8}
    for key, value in theirs.values.items():
        testing.assert_rows_close(ours.values[key], value, **close)
    # A later row changes no earlier one.
    others = record(design, None, (*WINDOW[:2], 1, 2)).values[None, "logits"]
    testing.assert_same_bits(others[:2], ours.values[None, "logits"][:2])
    assert (others[2:] != ours.values[None, "logits"][2:]).any(axis=1).all()


def test_what_cannot_be_run():
    with pytest.raises(ValueError, match="4 rows does not fit a slab of 3"):
        record(path(slab=3))
    own = {one.name for one in dataclasses.fields(llama.LlamaConfig)}
    config = {name: value for name, value in vars(CONFIG).items() if name in own}
    model = dataclasses.replace(path().model, config=llama.LlamaConfig(**config))
    with pytest.raises(NotImplementedError, match="this is a llama model"):
        microscope.Path(name="flash", model=model)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@hypothesis.given(st.lists(FLOATS, min_size=2, max_size=2))
def test_ulps_count_the_numbers_between(pair):
    one, other = (np.float32([x]) for x in pair)
    far = int(microscope.ulps(one, other)[0])
    assert far == int(microscope.ulps(other, one)[0])
    assert (far == 0) == bool(one[0] == other[0])
    towards = np.nextafter(one, other)
    assert int(microscope.ulps(towards, other)[0]) == max(far - 1, 0)


def test_relative_differences():
    """Checks errors relative to the norm of all values; None if they are not finite."""
    ones = np.ones((2, 2), np.float32)
    compared = lambda one, other: microscope.cell_of(np.float32(one), np.float32(other))
    relative = lambda one, other: compared(one, other)["relative"]
    assert relative(ones, [[1, 1], [1, 1.5]]) == pytest.approx(0.5 / 2)
    assert relative(ones, ones) == 0.0
    # A change of sign near zero is small beside the norm, and 2e9 ULPs.
    over = compared([[1e3, 1e-3]], [[1e3, -1e-3]])
    assert over["max_ulp"] > 2**30 and over["relative"] == pytest.approx(2e-6)
    for one, other in ((ones * 0, ones), (ones, ones * np.nan), (ones * np.inf, ones)):
        assert relative(one, other) is None
    zeros = compared([0.0, 1.0], [-0.0, 1.0])
    assert zeros["differing"] == 1 and zeros["relative"] == 0.0


def test_equal_runs_and_a_superseded_one(folders, tmp_path):
    """Fails if equal runs differ, or a difference is not counted, named and drawn."""
    given = f"--target {folders[0]} --impl native --gen-tokens 9 --gamma 3 --prompts 2"
    (row,) = rows_from(parity.main, tmp_path, given.split())
    assert row["equal"] and row["first"] is None
    # Each text has two whole windows, from the prompt's last token on.
    assert (row["choices"], row["mismatches"], row["matched_prompts"]) == (16, 0, 2)
    cells = [*row["cells"][0], *row["cells"][1], *row["outside"].values()]
    assert row["layers"] == [0, 1] and len(row["window"]) == 4
    assert sum(cell["elements"] for cell in cells) == row["num_values"]
    assert row["moved_by_recording"] == [0, 0]
    given += " --verify-path library-rows"
    (row,) = rows_from(parity.main, tmp_path, given.split(), 2)
    assert row["first"]["layer"] == 0
    assert row["start"] <= row["first"]["position"] < row["start"] + 4
    pytest.importorskip("matplotlib")
    assert plot.main([str(tmp_path / "out.jsonl"), "--out", str(tmp_path)]) == 0
    drawn = (tmp_path / "divergence.svg").read_text()
    assert f"layer 0, {row['first']['operation']}" in drawn


def test_choices_that_differ_are_found():
    """Negative control of the count: one token of a text is another."""
    model, params = path().model, params_lib.prepare(PARAMS, "native")
    tokens, kv = [*decoding.PROMPT], prefix()
    for position in range(START, START + 9):
        row = tokens[position : position + 1]
        kv, logits = decoding.forward(model, params, kv, row, position)
        tokens.append(int(logits[0].argmax()))
    text = parity.Text(name="t", num_prompt=START + 1, tokens=tokens, kv=kv)
    assert [start for start, _ in text.windows(4)] == [START, START + 4]
    assert parity.differing(path(), params, text, 4) == []
    tokens[START + 7] = (tokens[START + 7] + 1) % CONFIG.vocab_size
    assert START + 6 in parity.differing(path(), params, text, 4)
