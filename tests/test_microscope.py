"""The microscope: it names every planted fault, and finds nothing where none is."""

import dataclasses
import functools

import decoding
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.lib import questions
from experiments.lib.microscope import (
    compare,
    faults,
    fused,
    record as record_lib,
    scene as scene_lib,
    texts,
)
from spec_jax import testing
from spec_jax.model import (
    observe,
    params as params_lib,
    prompt as prompt_lib,
    qwen3,
    row_model,
)


PREFIX = tuple(decoding.PROMPT[:-1])
WINDOW = (decoding.PROMPT[-1], 4, 9, 33)
CONFIG = decoding.make_config(num_layers=3, dtype="bfloat16")
PARAMS = params_lib.init(jax.random.key(0), CONFIG, stddev=0.3)
LAYERS = tuple(range(CONFIG.num_layers))
TREE = (0, 0, 0, 2, 2, 3, 4)  # the window is its columns 0, 2, 4, 6


ROWS = questions.ROWS


@functools.cache
def scene() -> scene_lib.Scene:
    model = path().model
    kv = model.new_cache(capacity=32, page_size=decoding.PAGE_SIZE)
    kv = prompt_lib.prefill(model, PARAMS, kv, list(PREFIX), by_rows=True)
    return scene_lib.capture(kv, PREFIX, WINDOW)


def path(
    name="paged-decode", *, dtype="bfloat16", impl="native", slab=5, page_size=8, **how
):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    model = row_model.RowModel(config=config, impl=impl, slab=slab)
    return questions.path_of(name, model, page_size=page_size, **how)


def params_of(path) -> params_lib.Params:
    return params_lib.cast(PARAMS, path.dtype)


@functools.cache
def record(path, fault=None) -> record_lib.Record:
    return record_lib.take(path, params_of(path), scene(), fault)


def place(first: compare.First) -> tuple[int | None, str]:
    """The layer and the operation of a first difference."""
    return first.layer, first.operation


#
# Equal runs
#


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "other",
    [
        path(page_size=16),
        path("decode", slab=8),  # Rows of our own kernels know no slab.
        path(tree=TREE),
    ],
)
def test_equal_runs_have_no_difference(other):
    """Fails if recording moves a bit, or a tap depends on who is live beside it."""
    found = compare.compare(record(path("decode")), record(other))
    assert found.first is None and found.flips == ()
    assert all(cell.differing == cell.max_ulp == 0 for cell in found.cells.values())
    sizes = [value.size for value in record(path("decode")).values.values()]
    assert found.num_values == sum(sizes) and len(sizes) == len(found.cells)
    assert record(other).moved == 0 and record(other).unexplained == {}


@pytest.mark.slow
def test_equal_runs_of_xla_have_no_difference():
    """One layer is enough, and compiled in a third of the time; a tree in two slabs."""
    params = params_lib.cast(PARAMS.replace(layers=PARAMS.layers[:1]), "float32")
    alone = dataclasses.replace(scene(), k=scene().k[:1], v=scene().v[:1])
    config = dataclasses.replace(CONFIG, num_layers=1, dtype="float32")
    model = row_model.RowModel(config=config, impl="xla", slab=5)
    one, *others = (
        record_lib.take(
            questions.path_of(name, model, page_size=8, tree=tree), params, alone
        )
        for name, tree in (("decode", None), (ROWS, None), (ROWS, TREE))
    )
    for other in others:
        assert compare.compare(one, other).first is None
        assert one.moved == other.moved == 0
        assert one.unexplained == other.unexplained == {}


def test_a_recording_that_moves_bits_says_so(monkeypatch):
    """Negative control: a forward pass that is another one when it is looked at."""
    real = qwen3.forward_rows

    def shy(params, config, rows, kv, *, observe=None, **keywords):
        if observe is not None:
            params = params.replace(embed=params.embed * 2)
        return real(params, config, rows, kv, observe=observe, **keywords)

    monkeypatch.setattr(qwen3, "forward_rows", shy)
    unseen = path(page_size=4)  # one that nothing was compiled for
    assert record_lib.take(unseen, PARAMS, scene()).moved > 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("spoiled", "caught"),
    [
        ("input_norm", {"q", "k", "v"}),
        ("k_rope", {"k_cache"}),
        ("attention_out", {"attention_residual"}),
        ("mlp_norm", {"gate", "up"}),
        ("gate", {"gate", "swiglu"}),
        ("up", {"up", "swiglu"}),
        ("down", {"mlp_residual"}),
    ],
)
def test_a_wrong_reading_is_not_explained(spoiled, caught):
    """Negative control: a value that the kernel did not use leads elsewhere."""
    layer = {
        name: jnp.asarray(record(path("decode")).values[observe.key(1, name)])
        for name in observe.LAYER_OPERATIONS
    }
    x = jnp.asarray(record(path("decode")).values["0:mlp_residual"])

    def found(values):
        wrong = fused.unexplained(
            PARAMS.layers[1],
            CONFIG,
            values,
            x=x,
            num_active=jnp.int32(len(WINDOW)),
            impl="native",
        )
        return {name for name, differs in wrong.items() if bool(differs.any())}

    assert found(layer) == set()
    assert found(layer | {spoiled: layer[spoiled] * 2}) == caught


#
# Planted faults
#


SITES = [
    # Every operation once, over the first, the middle and the last layer.
    *(f"{n % CONFIG.num_layers}:{x}" for n, x in enumerate(observe.LAYER_OPERATIONS)),
    *observe.OUTSIDE,
]


@pytest.mark.few(6)
@pytest.mark.parametrize("spec", SITES)
def test_every_planted_fault_is_named(spec):
    """Fails if any operation of a layer is not seen, or is taken for another."""
    fault = faults.parse(spec)
    first = compare.compare(record(path()), record(path(), fault)).first
    assert place(first) == (fault.layer, fault.operation)
    assert first.cell.differing and first.cell.max_ulp
    if fault.operation in observe.LEAVES_ROWS:
        # One element of the last active row.
        assert first.row == len(WINDOW) - 1 and first.cell.differing == 1


@pytest.mark.parametrize(
    "spec", ["1:q_rope", "0:k_rope", "1:attention:parent", "2:v", "1:gate"]
)
def test_faults_of_trees_are_named(spec):
    """Fails if what a row sees of its tree is not seen, or taken for another fault."""
    fault, one = faults.parse(spec), path("decode", dtype="float32")
    wrong = record(path(dtype="float32", tree=TREE), fault)
    first = compare.compare(record(one), wrong).first
    assert place(first) == (fault.layer, fault.operation)
    if fault.operation not in faults.WEIGHTS:
        assert first.row == len(WINDOW) - 1, "its siblings are decoys"


def test_a_path_of_the_library():
    """Fails if it is read by the tricks of the rows: it fuses nothing. Its numerics
    differ from the first layer on."""
    flash, decode = path("flash", dtype="float32"), path("decode", dtype="float32")
    wrong = record(flash, faults.parse("1:q_rope"))
    first = compare.compare(record(flash), wrong).first
    assert place(first) == (1, "q_rope") and first.cell.differing == 1
    assert record(flash).moved == 0
    found = compare.compare(record(decode), record(flash))
    assert found.cells["embed"].differing == 0
    # Products that add in the order of k may have the same bits at these sizes.
    assert found.first.layer == 0
    assert found.first.operation in ("input_norm", "q", "q_norm")
    for layer in range(CONFIG.num_layers):
        cell = found.cells[observe.key(layer, "mlp_residual")]
        assert cell.differing and 0 < cell.relative < 1e-4


#
# Input that cannot be used
#


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3:nothing", "operation 'nothing' is not one of"),
        ("3:v:shift", "kind 'shift' is not one of ulp"),
        ("v", "v takes a layer"),
        ("2:logits", "logits takes no layer"),
        ("1:v:ulp:1", "not of the form"),
        ("1:v:parent", "a fault of attention alone"),
        ("", "operation '' is not one of"),
    ],
)
def test_faults_that_do_not_exist(text, message):
    with pytest.raises(ValueError, match=message):
        faults.parse(text)


@pytest.mark.parametrize(
    ("spec", "how", "message"),
    [
        ("3:v", {}, "no layer 3 .* layers 0 to 2"),
        ("1:attention:parent", {}, "these are a chain: give the path a tree"),
        ("1:v", {"tree": (0, 0, 0)}, "window of 4 tokens, and the path .* has 2"),
        ("1:v", {"tree": (0, 0, 2)}, "column 2 has parent 2"),
        (None, {"name": "sideways"}, "path='sideways' is not one of decode"),
        (None, {"name": "decode", "tree": TREE}, "not by decode: leave the tree out"),
        (None, {"slab": 3}, "4 rows does not fit a slab of 3"),
        (None, {"window_rows": 6}, "6 rows does not fit a slab of 5"),
        (None, {"window_rows": 3}, "4 tokens does not fit window_rows=3"),
    ],
)
def test_what_cannot_be_run(spec, how, message):
    with pytest.raises(ValueError, match=message):
        record(path(**how), None if spec is None else faults.parse(spec))


def test_scenes_that_cannot_be_used():
    kv = path().model.new_cache(capacity=8, page_size=8)
    with pytest.raises(ValueError, match="holds 0 positions, not 2"):
        scene_lib.capture(kv, (1, 2), (3,))
    with pytest.raises(ValueError, match="window is empty"):
        scene_lib.capture(kv, (), ())
    with pytest.raises(ValueError, match="shape"):
        compare.cell_of(np.zeros((2, 3)), np.zeros((2, 4)))


#
# Histories
#


def written(path, starts) -> scene_lib.Scene:
    """The scene after windows of the path from `starts[0]`, prefilled by rows."""
    model, params = path.model, params_of(path)
    sizes = {"capacity": qwen3.bucket(len(PREFIX + WINDOW)), "page_size": 8}
    kv = model.new_cache(**sizes)
    known = decoding.PROMPT[: starts[0]]
    kv = prompt_lib.prefill(model, params, kv, known, by_rows=True)
    kv = texts.write(path, params, kv, tokens=PREFIX, starts=starts)
    return scene_lib.capture(kv, PREFIX, WINDOW)


def test_windows_of_rows_write_what_decoding_writes():
    """Fails if a window begins in another place, or a row is lost between two."""
    for starts in ((2, 6, 10), (10,)):
        found = written(path(), starts)
        testing.assert_same_bits((found.k, found.v), (scene().k, scene().v))


def test_windows_of_another_path_write_something_else():
    """Negative control."""
    flash = path("flash", dtype="float32")
    found = compare.compare_prefixes(written(flash, (10,)), written(flash, (2, 6, 10)))
    first = found.first
    assert (first.row, first.layer, first.operation) == (2, 0, "k")
    assert 0 < first.cell.differing < found.differing < found.elements


def test_windows_that_do_not_follow_the_cache():
    with pytest.raises(ValueError, match="invalid and refused"):
        kv = path().model.new_cache(capacity=16, page_size=8)
        texts.write(path(), PARAMS, kv, tokens=PREFIX, starts=(2, 6, 10))


def test_prefixes_are_compared_by_position_then_by_layer():
    """Fails if a later position of an earlier layer is taken for the first."""
    same = compare.compare_prefixes(scene(), scene())
    sizes = [x.size for x in (*scene().k, *scene().v)]
    assert (same.differing, same.elements, same.first) == (0, sum(sizes), None)
    k, v = ([x.copy() for x in xs] for xs in (scene().k, scene().v))
    for pool, position in ((k[0], 7), (k[2], 3), (v[1], 3)):
        testing.bits(pool)[position, 1, 4] ^= 1
    other = dataclasses.replace(scene(), k=tuple(k), v=tuple(v))
    found = compare.compare_prefixes(scene(), other)
    first = found.first
    assert (found.differing, first.cell.differing, first.cell.max_ulp) == (3, 1, 1)
    assert (first.layer, first.operation, first.row) == (1, "v", 3)
    shorter = dataclasses.replace(scene(), k=tuple(x[:-1] for x in scene().k))
    with pytest.raises(ValueError, match="shape"):
        compare.compare_prefixes(scene(), shorter)


#
# Distances
#


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_a_flipped_argmax_is_found():
    one = record(path())
    logits = one.logits.copy()
    logits[2, np.argmin(logits[2])] = logits[2].max() + 1
    other = dataclasses.replace(one, values=one.values | {"logits": logits})
    found = compare.compare(one, other)
    assert found.flips == (2,) and found.first.operation == "logits"
    assert found.first.row == 2 and found.cells["logits"].rows == (2,)


@hypothesis.given(st.lists(FLOATS, min_size=2, max_size=2))
def test_ulps_count_the_numbers_between(pair):
    one, other = (np.float32([x]) for x in pair)
    far = int(compare.ulps(one, other)[0])
    assert far == int(compare.ulps(other, one)[0])
    assert (far == 0) == bool(one[0] == other[0])
    towards = np.nextafter(one, other)
    assert int(compare.ulps(towards, other)[0]) == max(far - 1, 0)


def test_two_dtypes_are_compared_in_the_wider_one():
    exact = np.float32([[1.0, 2.5, 3.0]])
    rounded = exact.astype(ml_dtypes.bfloat16)
    assert compare.cell_of(exact, rounded).differing == 0
    near = exact + np.float32(2.0**-16)
    cell = compare.cell_of(near, rounded)
    assert cell.differing == 3 and cell.max_ulp == 0  # nothing, in bfloat16
    assert compare.cell_of(exact * 2, rounded).max_ulp == 128


def test_relative_differences():
    """Of norms, and None where there is no number: what ULPs near zero do not say."""
    ones = np.ones((2, 2), np.float32)
    tiny = np.float32([[1, 1], [1, 1.5]])
    cell = compare.cell_of(ones, tiny)
    assert cell.relative == pytest.approx(0.5 / 2)
    assert compare.cell_of(ones, ones).relative == 0.0
    # A step over zero is nothing beside the rest, and two thousand million ULPs.
    large = np.float32([[1e3, 1e-3]])
    over = compare.cell_of(large, np.float32([[1e3, -1e-3]]))
    assert over.max_ulp > 2**30 and over.relative == pytest.approx(2e-6)
    for one, other in ((ones * 0, ones), (ones, ones * np.nan), (ones * np.inf, ones)):
        assert compare.cell_of(one, other).relative is None
    zeros = compare.cell_of(np.float32([[0.0, 1.0]]), np.float32([[-0.0, 1.0]]))
    assert zeros.differing == 1 and zeros.relative == 0.0


def test_margins_are_in_ulps_of_the_models_dtype():
    logits = np.float32([3.0, 3.125, -1.0, 3.125])
    choice = compare.choice_of(logits, "bfloat16")
    assert choice.token == 1 and [token for token, _ in choice.top] == [1, 3, 0, 2]
    assert choice.margin_ulp == 0
    assert compare.choice_of(logits[:3], "bfloat16").margin_ulp == 0.125 / 2**-6
    assert compare.choice_of(logits[:3], "float32").margin_ulp == 0.125 / 2**-22
    spoiled = compare.choice_of(np.float32([1.0, np.nan, 2.0]), "float32")
    assert spoiled.token == 1 and spoiled.margin_ulp is None
