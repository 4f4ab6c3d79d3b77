"""The microscope: it names every planted fault, and finds nothing where none is."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import scenes
from spec_jax import testing
from spec_jax.debug.microscope import (
    compare,
    faults,
    fused,
    history,
    record as record_lib,
    scene as scene_lib,
)
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


@functools.cache
def scene() -> scene_lib.Scene:
    model = path().model
    kv = model.new_cache(capacity=32, page_size=decoding.PAGE_SIZE)
    kv = prompt_lib.prefill(model, PARAMS, kv, list(PREFIX), by_rows=True)
    return scene_lib.capture(kv, PREFIX, WINDOW)


def path(
    name="paged-decode",
    *,
    dtype="bfloat16",
    slab=5,
    page_size=8,
    window_rows=None,
    tree=None,
):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    model = row_model.RowModel(config=config, impl="native", slab=slab)
    return scenes.record_path(
        name, model, page_size=page_size, window_rows=window_rows, tree=tree
    )


def params_of(path) -> params_lib.Params:
    return params_lib.cast(PARAMS, path.model.config.dtype)


@functools.cache
def record(path) -> record_lib.Record:
    return record_lib.take(path, params_of(path), scene())


@functools.cache
def first_fault(fault, path) -> compare.First | None:
    """Where the same path with a fault is the first to differ."""
    wrong = record_lib.take_with_fault(path, params_of(path), scene(), fault)
    return compared(record(path), wrong).first


def compared(one, other, dtypes=("bfloat16", "bfloat16"), layers=LAYERS):
    return compare.compare(one, other, dtypes=dtypes, layers=layers)


#
# Equal runs
#


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "other",
    [
        path(),
        path("row-loop", page_size=16),
        path("decode", slab=8),  # Rows of our own kernels know no slab.
        path(tree=TREE),
    ],
)
def test_equal_runs_have_no_difference(other):
    """Fails if recording moves a bit, or a tap depends on who is live beside it."""
    found = compared(record(path("decode")), record(other))
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
            scenes.record_path(name, model, page_size=8, tree=tree), params, alone
        )
        for name, tree in (
            ("decode", None),
            ("paged-decode", None),
            ("paged-decode", TREE),
        )
    )
    for other in others:
        assert compared(one, other, layers=(0,)).first is None
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


def sites() -> list[faults.Fault]:
    """Every operation once, over the first, the middle and the last layer."""
    planted = [
        faults.Fault(layer=number % CONFIG.num_layers, operation=name)
        for number, name in enumerate(observe.LAYER_OPERATIONS)
    ]
    return planted + [faults.Fault(layer=None, operation=n) for n in observe.OUTSIDE]


@pytest.mark.few(6)
@pytest.mark.parametrize("fault", sites(), ids=lambda fault: fault.key)
def test_every_planted_fault_is_named(fault):
    """Fails if any operation of a layer is not seen, or is taken for another."""
    first = first_fault(fault, path())
    assert (first.layer, first.operation) == (fault.layer, fault.operation)
    assert first.cell.differing and first.cell.max_ulp
    if fault.operation in observe.LEAVES_ROWS:
        # One element of the last active row.
        assert first.row == len(WINDOW) - 1 and first.cell.differing == 1


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "spec",
    ["1:swiglu:stale", "0:q_rope:swap-rows"]
    # Weights know no rows; they need no program of their own.
    + [f"{layer}:gate:zero-head" for layer in LAYERS]
    + ["2:q_norm:zero-head", "0:mlp_norm:zero-head", "final_norm:zero-head"],
)
def test_other_kinds_of_faults_are_named(spec):
    fault = faults.parse(spec)
    first = first_fault(fault, path())
    assert (first.layer, first.operation) == (fault.layer, fault.operation)


@pytest.mark.parametrize(
    "spec",
    ["1:q_rope:by-place", "0:k_rope:by-place", "1:attention:parent"]
    + ["0:attention:swapped-keys", "2:v", "1:k:swap-rows"],
)
def test_faults_of_trees_are_named(spec):
    """Fails if what a row sees of its tree is not seen, or taken for another fault."""
    fault = faults.parse(spec)
    of_tree, window = path(dtype="float32", tree=TREE), len(WINDOW)
    wrong = record_lib.take_with_fault(of_tree, params_of(of_tree), scene(), fault)
    found = compared(record(path("decode", dtype="float32")), wrong)
    assert (found.first.layer, found.first.operation) == (fault.layer, fault.operation)
    assert found.first.row == window - 1, "its siblings are decoys"


def test_a_fault_in_a_path_that_fuses_nothing_is_named():
    """Fails if a path of the library is read by the tricks of the rows."""
    flash = path("flash", dtype="float32")
    first = first_fault(faults.parse("1:q_rope:swap-rows"), flash)
    assert (first.layer, first.operation) == (1, "q_rope")
    assert record(flash).moved == 0


def test_a_path_with_other_numerics_differs_from_the_first_layer_on():
    one, other = (
        record(path("decode", dtype="float32")),
        record(path("flash", dtype="float32")),
    )
    found = compared(one, other, dtypes=("float32", "float32"))
    assert found.cells["embed"].differing == 0
    # Products that add in the order of k may have the same bits at these sizes.
    assert found.first.layer == 0
    assert found.first.operation in ("input_norm", "q", "q_norm")
    assert all(step.cell.differing for step in found.growth)
    assert all(0 < step.cell.relative < 1e-4 for step in found.growth)


def test_layers_that_are_not_looked_at_are_left_out():
    wrong = record_lib.take_with_fault(
        path(), PARAMS, scene(), faults.parse("0:gate:zero-head")
    )
    found = compared(record(path()), wrong, layers=(1, 2))
    assert set(found.cells) == {
        key for key in observe.keys(3) if not key.startswith("0:")
    }
    assert (found.first.layer, found.first.operation) == (1, "input_norm")


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
        ("", "operation '' is not one of"),
    ],
)
def test_faults_that_do_not_exist(text, message):
    with pytest.raises(ValueError, match=message):
        faults.parse(text)


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        ("3:v", "paged-decode", "no layer 3 .* layers 0 to 2"),
        ("1:gate:stale", "paged-decode", "only its weight"),
        ("1:v:stale", "decode", "needs two active rows"),
        ("1:q_rope:by-place", "paged-decode", "these are a chain: give the path a"),
        ("1:v:parent", TREE, "a fault of attention, not of v"),
        ("1:attention:swapped-keys", (0, 0, 0), "row of depth 2, and the last one"),
        ("1:attention:parent", (0, 0, 0), "window of 4 tokens, and the path .* has 2"),
        ("1:v", (0, 0, 2), "column 2 has parent 2"),
    ],
)
def test_faults_that_cannot_be_planted(spec, name, message):
    where = path(name) if isinstance(name, str) else path(tree=name)
    with pytest.raises(ValueError, match=message):
        record_lib.take_with_fault(where, PARAMS, scene(), faults.parse(spec))


def test_scenes_and_paths_that_cannot_be_used():
    with pytest.raises(ValueError, match="path='sideways' is not one of decode"):
        path("sideways")
    with pytest.raises(ValueError, match="not of rows needs a target"):
        record_lib.Path(model=path().model, page_size=8, is_rows=False)
    with pytest.raises(ValueError, match="leave one_by_one and target out"):
        path("decode", tree=TREE)
    with pytest.raises(ValueError, match="4 rows does not fit a slab of 3"):
        record_lib.take(path(slab=3), PARAMS, scene())
    with pytest.raises(ValueError, match="6 rows does not fit a slab of 5"):
        record_lib.take(path(window_rows=6), PARAMS, scene())
    with pytest.raises(ValueError, match="4 tokens does not fit window_rows=3"):
        record_lib.take(path(window_rows=3), PARAMS, scene())
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
    kv = history.write(path, params, kv, tokens=PREFIX, starts=starts)
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
    assert (first.position, first.layer, first.part) == (2, 0, "k")
    assert 0 < first.cell.differing < found.differing < found.elements


def test_windows_that_do_not_follow_the_cache():
    with pytest.raises(ValueError, match="invalid and refused"):
        kv = path().model.new_cache(capacity=16, page_size=8)
        history.write(path(), PARAMS, kv, tokens=PREFIX, starts=(2, 6, 10))


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
    assert (first.layer, first.part, first.position) == (1, "v", 3)
    shorter = dataclasses.replace(scene(), k=tuple(x[:-1] for x in scene().k))
    with pytest.raises(ValueError, match="shape"):
        compare.compare_prefixes(scene(), shorter)


def test_a_flipped_argmax_is_found():
    one = record(path())
    logits = one.logits.copy()
    logits[2, np.argmin(logits[2])] = logits[2].max() + 1
    other = dataclasses.replace(one, values=one.values | {"logits": logits})
    found = compared(one, other)
    assert found.flips == (2,) and found.first.operation == "logits"
    assert found.first.row == 2 and found.cells["logits"].rows == (2,)
