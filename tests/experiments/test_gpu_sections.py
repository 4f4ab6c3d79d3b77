"""Parts of the GPU report's sections, on tiny shapes and without processes."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from experiments.support import (
    forced_drafter,
    gpu_arrays,
    gpu_bits,
    gpu_bitwise,
    gpu_clock,
    gpu_compile,
    gpu_kernels,
    gpu_plans,
    gpu_rounds,
    gpu_task,
    gpu_transformers,
)
from spec_jax.model import sequence
from spec_jax.pallas import skinny_gemm_triton as triton


class Rows(list):
    """In the place of a file of rows."""

    write = list.append


def make_task(impl: str = "xla", **more) -> gpu_task.Task:
    return gpu_task.Task(
        section="x",
        sizes=gpu_task.TINY,
        impl=impl,
        out=Rows(),
        budget_s=1000,
        where={},
        **more,
    )


def rows_of(task: gpu_task.Task) -> list[dict]:
    return task._out


def test_bits_are_compared_as_integers():
    """Fails if NaN equals nothing, or zeros of both signs are one."""
    x = jnp.asarray([[1.0, jnp.nan], [0.0, 2.0]], jnp.bfloat16)
    assert gpu_bits.differing({"x": x}, {"x": x}) == 0
    assert gpu_bits.differing(x, x.at[1, 0].set(-0.0)) == 1
    assert gpu_bits.differing(x, x.at[0, 1].set(jnp.inf)) == 1


def test_rows_are_compared_where_they_should_be():
    expected = jnp.arange(12.0).reshape(4, 3)
    actual = jnp.roll(expected, -1, axis=0).at[3].set(jnp.nan)
    compare = gpu_bits.compare_rows
    assert compare(actual, expected, at=[1, 2, 3, 0], live=3) == (0, 9)
    assert compare(actual, expected, at=[1, 2, 3, 0], live=4) == (3, 12)
    assert compare(actual, expected, at=[0, 1, 2, 3], live=2) == (6, 6)


def depends_on(what: str):
    """Rows whose bits depend on something that they must not know."""

    def call(rows, fixed, num_live):
        x = rows["x"]
        extra = {
            "nothing": 0.0,
            "live rows": num_live.astype(jnp.float32) * 1e-3,
            "places": jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] * 1e-3,
            "others": jnp.sum(x) * 1e-3,
            "height": x.shape[0] * 1e-3,
        }[what]
        return x * 2 + extra

    return call


@pytest.mark.parametrize(
    ("what", "caught"),
    [
        ("nothing", set()),
        ("live rows", {"live rows", "alone", "other heights"}),
        ("places", {"alone", "other places"}),
        ("others", {"live rows", "alone", "other heights", "other places"}),
        ("height", {"other heights"}),
    ],
)
def test_every_grid_catches_what_it_is_for(what, caught):
    """Negative controls: a kernel with a fault, one grid or more that differs."""
    task = make_task()
    rows = {"x": gpu_arrays.normal(0, (16, 8), "float32")}
    case = gpu_bitwise.Case("faulty", depends_on(what), rows, {})
    gpu_bitwise.check_rows(case, task)
    hash_, *checks = rows_of(task)
    assert hash_["kind"] == "hash" and len(hash_["sha256"]) == 64
    found = {row["check"].partition(": ")[2] for row in checks if not row["equal"]}
    # Sums of rows in another order may happen to be the same.
    assert found - {"other places"} == caught - {"other places"}
    assert ("other places" in found) or what != "places"
    assert task.failures == len(found)


def test_only_hashes_where_no_more_is_wanted():
    """They are those of the process that checks everything."""
    hashes = []
    for only_hashes in (False, True):
        task = make_task(only_hashes=only_hashes)
        rows = {"x": gpu_arrays.normal(0, (16, 8), "float32")}
        case = gpu_bitwise.Case("sound", depends_on("nothing"), rows, {})
        gpu_bitwise.check_rows(case, task)
        hashes.append(rows_of(task)[0]["sha256"])
        assert len(rows_of(task)) == (1 if only_hashes else 5)
    assert hashes[0] == hashes[1]


def test_a_product_passes_and_a_plan_by_rows_is_seen():
    """The interpreted kernel, and the section's own negative control."""
    task = make_task("interpret")
    cases = gpu_bitwise.row_cases(task)
    gpu_bitwise.check_rows(cases["target out"](), task)
    gpu_bitwise.check_control(task)
    *checks, control = rows_of(task)[1:]
    assert len(checks) == 4 and all(row["equal"] for row in checks)
    assert control["kind"] == "control" and control["differing"] > 0
    assert task.failures == 0


def test_seconds_are_of_one_call():
    """Fails if calls or dispatches are counted otherwise than they are made."""
    made = []
    loop = gpu_clock.Loop(run=lambda: made.append(0), calls=4, num_bytes=8)
    timings = gpu_clock.measure({"x": loop}, repeats=3, timed_s=1e-9)
    assert len(timings.seconds["x"]) == 3
    # One before each timing; the first call times one to find out how many.
    assert len(made) == 2 + 2 + 3 * 2


def test_shares_are_of_the_copy_in_the_same_turn():
    copy = gpu_clock.Loop(run=None, calls=1, num_bytes=100)
    loop = gpu_clock.Loop(run=None, calls=4, num_bytes=50)
    timings = gpu_clock.timing.Timings(
        warm_up={"copy": 1.0, "x": 1.0},
        seconds={"copy": [1.0, 2.0, 4.0], "x": [1.0, 1.0, 4.0]},
    )
    rows = gpu_clock.rows({"copy": copy, "x": loop}, timings)
    assert rows["x"]["copy_share"] == 0.5  # of 0.5, 1 and 0.5
    assert rows["x"]["us"] == 1e6 and rows["x"]["gb_s"] == pytest.approx(50e-9)
    assert rows["copy"]["copy_share"] == 1


def test_what_cannot_be_compiled_is_left_aside():
    def fail():
        raise RuntimeError("spills")

    lowered = {
        "good": types.SimpleNamespace(compile=lambda: "executable"),
        "bad": types.SimpleNamespace(compile=fail),
    }
    compiled, failed = gpu_clock.compile_all(lowered)
    assert compiled == {"good": "executable"} and str(failed["bad"]) == "spills"


@pytest.mark.parametrize("model", ["target", "draft"])
def test_candidates_of_the_real_shapes_can_be_launched(model):
    """Fails if the kernel's own plan is missing, or one is there twice or too large."""
    for matrix in gpu_kernels.matrices(model, gpu_task.REAL):
        shape = matrix.columns, matrix.terms
        plans = gpu_plans.triton_plans(*shape, parts=matrix.parts, most=12)
        assert plans[0] == triton.plan_for(*shape, parts=matrix.parts)
        assert 6 <= len(plans) <= 12 and len(set(plans)) == len(plans)
        for plan in plans:
            triton.check_plan(plan, matrix.terms, parts=matrix.parts)
        assert gpu_plans.mosaic_plans(*shape, most=3)
        labels = [
            variant.label for variant in gpu_kernels.variants(matrix, real_task())
        ]
        assert len(set(labels)) == len(labels) and labels[-1] == "xla"
    configs = gpu_plans.attention_configs(128, "bfloat16", interpret=False, most=12)
    assert len({gpu_plans.describe(config) for config in configs}) == 12


def real_task() -> types.SimpleNamespace:
    """What a section asks of its task where there is a GPU."""
    return types.SimpleNamespace(sizes=gpu_task.REAL, impl="triton", interpret=False)


def test_weights_fill_many_caches():
    for matrix in gpu_kernels.matrices("draft", gpu_task.REAL):
        copies = gpu_kernels.num_copies(matrix.num_bytes, gpu_task.REAL)
        assert copies * matrix.num_bytes >= 300 * 2**20


def test_a_chain_uses_every_weight_and_other_rows_each_pass():
    """Fails if a product could be computed once for two calls."""
    pairs = lambda x, w, *_: (x, w)
    run = gpu_kernels.chain(pairs, shares_rows=True)
    found = run(list(range(6)), [1.5, 2.5, 3.5], None, None)
    expected = [(0, 1.5), (0, 2.5), (0, 3.5), (1, 1.5), (1, 2.5), (1, 3.5)]
    assert jax.tree.map(float, found) == expected
    run = gpu_kernels.chain(pairs, shares_rows=False)
    found = run(list(range(4)), [1.5, 2.5], None, None)
    assert jax.tree.map(float, found) == [(0, 1.5), (1, 2.5), (2, 1.5), (3, 2.5)]


@pytest.mark.parametrize(
    ("rate", "gamma"), list(itertools.product((0.39, 0.6, 0.8), (1, 4, 7)))
)
def test_masks_accept_what_is_asked(rate, gamma):
    """Fails if the rate is taken for that of each draft alone."""
    mask = forced_drafter.choose_mask(rate, start=128, limit=256, gamma=gamma, size=300)
    proposed, accepted = forced_drafter.simulate(
        mask, start=128, limit=256, gamma=gamma
    )
    assert accepted / proposed == pytest.approx(rate, abs=0.01)
    p = forced_drafter.conditional(rate, gamma)
    assert sum(p**i for i in range(1, gamma + 1)) == pytest.approx(rate * gamma)


@pytest.mark.parametrize("rate", [0.0, 1.0, 39.0])
def test_rates_that_cannot_be_forced(rate):
    with pytest.raises(ValueError, match=f"{rate}"):
        forced_drafter.choose_mask(rate, start=1, limit=9, gamma=2, size=20)


def test_forced_rounds_do_what_the_mask_says():
    """Fails if acceptance is not the mask's, or a token is not plain decoding's."""
    task = make_task()
    runs = gpu_rounds.make_runs(task, generated=12)
    trace = runs.plain()
    drafter = forced_drafter.ForcedDrafter(inner=runs.models.drafter, vocab_size=256)
    for pattern in ([True, False, True, True, False, False], [True], [False]):
        mask = np.resize(np.asarray(pattern), trace.size + drafter.gamma_max)
        params = forced_drafter.ForcedParams(
            draft=runs.params[1], trace=jnp.asarray(trace), kept=jnp.asarray(mask)
        )
        state = runs.run_rounds(
            runs.round_state(drafter.gamma_max), drafter, params, gamma=2
        )
        expected = forced_drafter.simulate(
            mask, start=runs.start, limit=runs.limit, gamma=2
        )
        assert (int(state.num_proposed), int(state.num_accepted)) == expected
        assert np.array_equal(np.asarray(state.tokens), trace)
    # A text that differs is not passed over.
    wrong = (trace + 1) % 256
    gpu_rounds._report(
        task,
        runs,
        wrong,
        gamma=2,
        rate=0.5,
        state=state,
        timings=types.SimpleNamespace(
            seconds={0.5: [1.0], "plain": [2.0]}, warm_up={0.5: 3.0}
        ),
    )
    (row,) = rows_of(task)
    assert not row["matched"] and row["differing_tokens"] > 0 and task.failures == 1
    assert row["speedup"] == 2


def test_a_cache_can_be_set_to_any_length():
    """Fails if a length leaves the books wrong, or pages hold zeros."""
    models = gpu_rounds.gpu_models.models(make_task())
    box = gpu_arrays.CacheBox(models.target, capacity=40, page_size=16)
    for length in (0, 33, 7, 48):
        kv = box.at(length)
        assert int(kv.length[0]) == length
        assert int(kv.num_owned[0]) == max(1, -(-length // 16))
        assert not bool(kv.refused.any())
    assert float(jnp.min(jnp.abs(box.kv.k[0].astype(jnp.float32)))) >= 0
    assert float(jnp.std(box.kv.v[0].astype(jnp.float32))) == pytest.approx(1, abs=0.1)
    with pytest.raises(ValueError, match="49 positions in a cache of 48"):
        box.at(49)


def test_launches_are_counted_outside_of_fusions():
    hlo = """
HloModule step
%fused (p: f32[4]) -> f32[4] {
  %a = f32[4]{0} dynamic-slice(p), x
}
%body (s: f32[4]) -> f32[4] {
  %b = f32[4]{0} fusion(s), kind=kLoop, calls=%fused
  %c = f32[4]{0} custom-call(b), custom_call_target="triton"
}
ENTRY %main (s: f32[4]) -> f32[4] {
  %w = f32[4]{0} while(s), condition=%cond, body=%body
  ROOT %d = f32[4]{0} copy(w)
}
"""
    assert gpu_compile.count_launches(hlo) == 3


def test_what_is_missing_of_torch_is_said(monkeypatch):
    monkeypatch.setattr(gpu_transformers.importlib.util, "find_spec", lambda name: None)
    assert gpu_transformers.missing("gpu") == "torch is not installed"
    task = make_task()
    gpu_transformers.run(task)
    (row,) = rows_of(task)
    assert row["kind"] == "left out" and task.failures == 0


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_torch_are_ours(tied):
    """Fails if a matrix is under another's name, or the halves are exchanged."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = tiny_pair.config(num_layers=2, tie_word_embeddings=tied)
    params = gpu_arrays.weights(config, seed=0)
    model = gpu_transformers.to_torch(config, params, device="cpu")
    tokens = np.asarray(gpu_arrays.tokens(9, config.vocab_size))[None]
    with torch.inference_mode():
        theirs = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    ours = jax.jit(sequence.logits, static_argnums=1)(params, config, tokens)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
