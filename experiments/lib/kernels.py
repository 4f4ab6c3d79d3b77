"""The kernels of a model's step at its own shapes, called again and again.

Knows shapes, memory and calls; knows neither clocks nor tables. Many calls are one
compiled scan of static length, so that neither Python nor dispatch nor, on a GPU, the
host's part in a loop is in the numbers. On a CPU and with XLA's own products each
call's first element comes from the call before it: nothing can be moved out of the
loop, and no two calls can run at once. Our kernels on a GPU are fed once a pass, since
feeding takes a kernel too. Weights are separate arrays, as a model's layers are; a
slice of a stacked array would be a copy of it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import kernel_plans, noise, subjects, timing
from spec_jax.model import config as config_lib, params as params_lib, rotary
from spec_jax.ops import (
    argmax,
    dispatch,
    draw,
    gated_projection,
    projection,
    rms_norm,
    rope,
    row_attention,
    skinny_gemm,
    weights,
)
from spec_jax.paging import index
from spec_jax.pallas import (
    attention_plan,
    row_jobs,
)
from spec_jax.rules import sampling


IMPLS = {"cpu": ("native", "xla"), "gpu": ("triton", "xla")}
"""Implementations by the platform that they run on: our kernels, then XLA's."""

CONTEXTS = {"cpu": (256, 1024, 4096), "gpu": (128, 1024, 4096, 16_384, 32_768)}
PAGE_SIZE = 16

STREAMED_CACHES = 4
"""A large model reads more than as many last-level caches in a step."""

MOST_COPIES = 128
_UNKNOWN_CACHE_BYTES = 64 * 2**20

Arrays = Mapping[str, Any]
BY_ROW = ("x", "residual", "slots", "positions", "cos", "sin")
"""The inputs that have an entry for each row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A kernel at one shape. Hashable: `repeat` is compiled for it."""

    name: str  # unique; as the tables show it
    kernel: str  # which one: "project", "gate", "attend", or one of `Rows`
    shape: tuple[int, ...]  # of a call's weights `[N, K]`, keys `[T, K, H]` or rows
    dtype: str  # of what is read
    copies: int = 1  # sets of `num_bytes` that the calls take in turn
    # Positions that the last row attends to, where that matters
    context: int | None = None
    # Implementations that have this kernel; empty for all of them
    only: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that a call must read."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def for_impl(self, impl: str) -> "Subject":
        """The subject as `impl` is to be measured on it."""
        return self

    def plans(self, impl: str, most: int) -> Sequence[Any]:
        """Plans of the kernel to try besides its own, which is None and the first."""
        return (None,)

    def allocate(self) -> tuple[Any, Any]:
        """Makes what calls of all row counts share: what is read, what is written."""
        raise NotImplementedError(self.kernel)

    def inputs(self, impl: str, plan: Any, slab: int, num_rows: int) -> Arrays:
        """Makes random rows `x`, and what else belongs to them."""
        raise NotImplementedError(self.kernel)

    def call(
        self, impl: str, plan: Any, number: int, x, pages, fixed, inputs
    ) -> tuple[jax.Array, Any]:
        """Calls the kernel on copy `number`; returns its rows and the pages."""
        raise NotImplementedError(self.kernel)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection(Subject):
    """A weight matrix, with the norm, residual or gate that the model gives it.

    "xla" is XLA's product alone: norm, residual and gate would be other operations.

    Attributes:
      impl: for whose kernels `allocate` prepares the weights.
    """

    has_norm: bool = False
    has_residual: bool = False
    out_dtype: str | None = None
    eps: float = 1e-6
    impl: str = "xla"

    def for_impl(self, impl: str) -> "Projection":
        if impl != "native":
            return self  # Matrices, which all others share.
        return dataclasses.replace(self, impl=impl)

    def plans(self, impl: str, most: int) -> Sequence[Any]:
        parts = 2 if self.kernel == "gate" else 1
        return kernel_plans.of_product(impl, *self.shape, parts=parts, most=most)

    def allocate(self) -> tuple[Any, Any]:
        num_out, num_in = self.shape
        copies = tuple(
            weights.prepare(
                noise.normal(i, self.shape, self.dtype, stddev=num_in**-0.5), self.impl
            )
            for i in range(self.copies)
        )
        norm = jnp.ones((num_in,), self.dtype) if self.has_norm else None
        return {"weights": copies, "norm": norm}, ()

    def inputs(self, impl: str, plan: Any, slab: int, num_rows: int) -> Arrays:
        num_out, num_in = self.shape
        residual = None
        if self.has_residual:
            residual = noise.normal(2, (slab, num_out), self.dtype)
        return {
            "x": noise.normal(1, (slab, num_in), self.dtype),
            "residual": residual,
            "num_active": jnp.int32(num_rows),
        }

    def call(self, impl, plan, number, x, pages, fixed, inputs):
        w = fixed["weights"][number]
        if impl == "xla":
            return skinny_gemm.skinny_gemm(x, w), pages
        shared = {"num_active": inputs["num_active"], "norm": fixed["norm"]}
        shared["eps"] = self.eps
        if self.kernel == "gate":
            function = gated_projection.gated_projection
        else:
            function = projection.project
            shared["residual"] = inputs["residual"]
            shared["out_dtype"] = self.out_dtype
        if plan is None:
            return function(x, w, impl=impl, **shared), pages
        # What the op calls, with a plan that is not its own.
        kernels, interpret = dispatch.kernels("skinny_gemm", impl)
        shared |= {"plan": plan, "interpret": interpret}
        if self.kernel == "gate":
            return kernels.gate(x, w, **shared), pages
        shared["out_dtype"] = jnp.dtype(self.out_dtype or x.dtype)
        return kernels.project(x, w, **shared), pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Subject):
    """What reads nothing but its rows: "norm", "argmax", or all kernels of a "draw"."""

    def allocate(self) -> tuple[Any, Any]:
        return {"weight": jnp.ones((self.shape[1],), self.dtype)}, ()

    def inputs(self, impl: str, plan: Any, slab: int, num_rows: int) -> Arrays:
        x = noise.normal(1, (slab, self.shape[1]), self.dtype)
        positions = jnp.arange(slab, dtype=jnp.int32)
        return {"x": x, "positions": positions, "num_active": jnp.int32(num_rows)}

    def call(self, impl, plan, number, x, pages, fixed, inputs):
        if self.kernel == "draw":
            slab = x.shape[0]
            settings = sampling.make_settings(temperature=0.7, top_k=20, top_p=0.8)
            settings = jax.tree.map(lambda leaf: jnp.full((slab,), leaf), settings)
            draws = jnp.arange(slab, dtype=jnp.int32) < inputs["num_active"]
            where = {"positions": inputs["positions"], "draws": draws}
            return draw.draw(x, settings, **where, impl=impl)[:, None], pages
        if self.kernel == "argmax":
            found = argmax.argmax(x, num_active=inputs["num_active"], impl=impl)
            return found[:, None], pages
        how = {"num_active": inputs["num_active"], "eps": 1e-6, "impl": impl}
        return rms_norm.row_norm(x, fixed["weight"], **how), pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Subject):
    """The attention of a layer over pages that lie in no order.

    The copies are slots of one pool: their pages are reached through a table, and so
    need not be arrays of their own. XLA has one slot: it converts all of the pool in
    every call, and would be charged for pages that are not its row's. On a GPU the
    list of jobs is made outside: a step makes it once for all its layers.
    """

    config: config_lib.Qwen3Config
    spread: int = 1  # how many times more pages there are than the slots own
    seed: int = 0  # of the order of the pages

    @property
    def num_bytes(self) -> int:
        return 2 * super().num_bytes

    def for_impl(self, impl: str) -> "Attention":
        return dataclasses.replace(self, copies=1) if impl == "xla" else self

    def plans(self, impl: str, most: int) -> Sequence[Any]:
        if impl not in dispatch.PALLAS:
            return (None,)
        return kernel_plans.of_attention(self.config, most=most)

    def allocate(self) -> tuple[Any, Any]:
        config, width = self.config, index.pages_for(self.context, PAGE_SIZE)
        num_pages = self.spread * self.copies * width
        order = np.random.default_rng(self.seed).permutation(num_pages)
        tables = order.astype(np.int32)[: self.copies * width]
        tables = tuple(map(jnp.asarray, tables.reshape(self.copies, 1, width)))
        shape = (num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        pages = tuple(noise.normal(i, shape, config.dtype) for i in (1, 2))
        return {
            "tables": tables,
            "norm": jnp.ones(config.head_dim, config.dtype),
        }, pages

    def inputs(self, impl: str, plan: Any, slab: int, num_rows: int) -> Arrays:
        first = self.context - num_rows
        positions = first + jnp.arange(slab, dtype=jnp.int32)
        slots = jnp.zeros((slab,), jnp.int32)
        return self.rows_at(slots, positions) | {"num_active": jnp.int32(num_rows)}

    def rows_at(self, slots: jax.Array, positions: jax.Array) -> dict[str, Any]:
        """Makes random rows of these slots and positions, with their angles."""
        config, slab = self.config, slots.shape[0]
        frequencies, scale = rotary.rope_table(config)
        cos, sin = rope.angles(
            positions, jnp.asarray(frequencies), scale=scale, dtype=config.dtype
        )
        return {
            "x": noise.normal(3, (slab, config.qkv_size), config.dtype),
            **{"slots": slots, "positions": positions, "cos": cos, "sin": sin},
        }

    def call(self, impl, plan, number, x, pages, fixed, inputs):
        config, table, norm = self.config, fixed["tables"][number], fixed["norm"]
        places = ("slots", "positions", "num_active", "cos", "sin")
        shared = {name: inputs[name] for name in places}
        shared["eps"] = config.rms_norm_eps
        shared["scale"] = config.head_dim**-0.5
        if impl in dispatch.PALLAS:
            kernels, shared["interpret"] = dispatch.kernels("row_attention", impl)
            attend = kernels.attend
            shared["jobs"] = inputs["jobs"][number] if "jobs" in inputs else None
            shared["config"] = plan
        else:
            attend = functools.partial(row_attention.row_attention, impl=impl)
        y, *pages = attend(x, norm, norm, *pages, page_table=table, **shared)
        return y, tuple(pages)

    def with_jobs(self, impl: str, plan: Any, fixed: Any, inputs: Arrays) -> Arrays:
        """The inputs with the job list of each table, where `impl` has one."""
        if impl not in dispatch.PALLAS:
            return inputs
        config, slab = self.config, inputs["slots"].shape[0]
        group = config.num_heads // config.num_kv_heads
        plan = plan or attention_plan.default_config(
            config.head_dim, config.dtype, interpret=impl == "interpret"
        )
        lay = attention_plan.layout(slab, group, config.head_dim, tile=plan.tile)
        num_pages = self.spread * self.copies * fixed["tables"][0].shape[1]
        places = [inputs[name] for name in ("slots", "positions", "num_active")]
        jobs = functools.partial(
            _jobs,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            split=plan.split,
            tile_rows=lay.tile_rows,
            num_kv_heads=config.num_kv_heads,
            interpret=impl == "interpret",
        )
        made = tuple(jobs(table, *places) for table in fixed["tables"])
        return {**inputs, "jobs": made}


_jobs = jax.jit(
    row_jobs.row_jobs,
    static_argnames=(
        "num_pages",
        "page_size",
        "split",
        "tile_rows",
        "num_kv_heads",
        "interpret",
    ),
)


@functools.partial(
    jax.jit,
    static_argnames=("subject", "impl", "plan", "passes", "is_serial"),
    donate_argnames=("pages",),
)
def repeat(
    subject: Subject,
    impl: str,
    plan: Any,
    passes: int,
    is_serial: bool,
    pages: Any,
    fixed: Any,
    inputs: Arrays,
) -> tuple[jax.Array, Any]:
    """Runs `passes` times over all copies; returns the last rows and the pages."""
    # Traced and lowered once where the copies are alike, however many they are.
    call = jax.jit(subject.call, static_argnums=(0, 1, 2))

    def one_pass(carry, _):
        x, pages = carry
        firsts = []
        for number in range(subject.copies):
            own_fixed = {
                name: (value[number],) if isinstance(value, tuple) else value
                for name, value in fixed.items()
            }
            own = {
                name: (value[number],) if name == "jobs" else value
                for name, value in inputs.items()
            }
            y, pages = call(impl, plan, 0, x, pages, own_fixed, own)
            if is_serial:
                x = x.at[0, 0].set(y[0, 0].astype(x.dtype))
            else:
                firsts.append(y[0, 0].astype(x.dtype))
        if firsts:
            count = min(len(firsts), x.shape[1])
            x = x.at[0, :count].set(jnp.stack(firsts[:count]))
        return (x, pages), None

    carry, _ = jax.lax.scan(one_pass, (inputs["x"], pages), None, length=passes)
    return carry


def slab_of(impl: str, num_rows: int) -> int:
    """Rows that `impl` computes for `num_rows` active ones, as in the model."""
    height = dispatch.slab_rows(impl)
    if height is not None:
        return math.ceil(num_rows / height) * height
    return max(num_rows, skinny_gemm.MIN_ROWS) if impl == "xla" else num_rows


def all_subjects(
    config: config_lib.Qwen3Config,
    *,
    contexts: Sequence[int],
    platform: str,
    streamed_bytes: int | None = None,
) -> list[Subject]:
    """What a step of the model calls: five products, attention over `contexts`.
    And the smallest product, which costs what any call costs; on a GPU norm, argmax and
    a draw, which are kernels there.

    Between two reads of a weight a step reads all others, so calls take turns in
    reading as many copies as a step has bytes: what of them a cache still holds, it
    holds in the model too. No more than fill `STREAMED_CACHES` last-level caches, of
    which none holds anything.
    """
    shapes = params_lib.shapes(config)
    if streamed_bytes is None:
        cache = timing.cache_bytes() or _UNKNOWN_CACHE_BYTES
        streamed_bytes = min(subjects.step_bytes(shapes), STREAMED_CACHES * cache)
    layer, dtype, eps = shapes.layers[0], config.dtype, config.rms_norm_eps
    product = functools.partial(Projection, kernel="project", dtype=dtype, eps=eps)
    made: list[Subject] = [
        product(name="qkv", shape=layer.qkv.shape, has_norm=True),
        product(
            name="attention out", shape=layer.attention_out.shape, has_residual=True
        ),
        product(
            name="gate and up", kernel="gate", shape=layer.gate_up.shape, has_norm=True
        ),
        product(name="down", shape=layer.down.shape, has_residual=True),
        product(
            name="head", shape=shapes.head.shape, has_norm=True, out_dtype="float32"
        ),
    ]
    made += [
        Attention(
            name=f"context {context}",
            kernel="attend",
            shape=(context, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            context=context,
            config=config,
            only=("native", "triton", "interpret", "xla"),
        )
        for context in contexts
        if context <= config.max_position_embeddings
    ]
    made = [
        dataclasses.replace(
            subject,
            copies=min(math.ceil(streamed_bytes / subject.num_bytes), MOST_COPIES),
        )
        for subject in made
    ]
    smallest = product(name="a call", shape=(48, 32), copies=8, has_norm=True)
    if platform == "cpu":
        return [*made, smallest]
    rows, ours = slab_of("triton", 1), ("triton", "interpret")
    width, vocabulary = (rows, config.hidden_size), (rows, config.vocab_size)
    of = functools.partial(Rows, copies=8)
    logits = {"shape": vocabulary, "dtype": "float32"}
    return [
        *made,
        of(name="norm", kernel="norm", shape=width, dtype=dtype, only=(*ours, "xla")),
        of(name="argmax", kernel="argmax", **logits, only=(*ours, "xla")),
        of(name="draw", kernel="draw", **logits, only=ours),
    ]
