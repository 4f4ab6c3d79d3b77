"""The kernels of a model's step at its own shapes: what is called, timed and compared.

Many calls are one compiled scan of static length, so that neither Python nor dispatch
nor, on a GPU, the host's part in a loop is in the numbers. On a CPU and with XLA's own
products each call's first element comes from the call before it: nothing can be moved
out of the loop, and no two calls can run at once. Our kernels on a GPU are fed once a
pass, since feeding takes a kernel too. Weights are separate arrays, as a model's layers
are; a slice of a stacked array would be a copy of it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import bench, noise, subjects
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
from spec_jax.pallas import attention_plan, row_jobs
from spec_jax.rules import sampling


IMPLS = {"cpu": ("native", "xla"), "gpu": ("triton", "xla")}
"""Implementations by the platform that they run on: our kernels, then XLA's."""

CONTEXTS = {"cpu": (256, 1024, 4096), "gpu": (128, 1024, 4096, 16_384, 32_768)}
PAGE_SIZE = 16

STREAMED_CACHES = 4
"""A large model reads more than as many last-level caches in a step."""

MOST_COPIES = 128
_UNKNOWN_CACHE_BYTES = 64 * 2**20

BY_ROW = ("x", "residual", "slots", "positions", "cos", "sin")
"""The inputs that have an entry for each row."""

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A kernel at one shape. Hashable: `repeat` is compiled for it.

    Each kind has `allocate()`, what calls of all row counts share, read and written;
    `inputs(impl, fixed, slab, num_rows)`, random rows `x` and what belongs to them; and
    `call(impl, x, pages, fixed, inputs)`, the rows and pages of the first copy.
    """

    name: str  # unique; as the tables show it
    kernel: str  # "project", "gate", "attend", "norm", "argmax" or "draw"
    shape: tuple[int, ...]  # of a call's weights `[N, K]`, keys `[T, K, H]` or rows
    dtype: str  # of what is read
    copies: int = 1  # sets of `num_bytes` that the calls take in turn
    context: int | None = None  # positions that the last row attends to
    only: tuple[str, ...] = ()  # implementations that have it; empty for all of them

    @property
    def num_bytes(self) -> int:
        """Bytes that a call must read."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def has(self, impl: str) -> bool:
        """Whether `impl` has this kernel."""
        return not self.only or impl in self.only

    def for_impl(self, impl: str) -> "Subject":
        """Returns the subject as `impl` is to be measured on it."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection(Subject):
    """A weight matrix, with the norm, residual or gate that the model gives it.

    "xla" is XLA's product alone: norm, residual and gate would be other operations.
    """

    has_norm: bool = False
    has_residual: bool = False
    out_dtype: str | None = None
    eps: float = 1e-6
    impl: str = "xla"  # for whose kernels `allocate` prepares the weights

    def for_impl(self, impl: str) -> "Projection":
        # Matrices, which all others share.
        return dataclasses.replace(self, impl=impl) if impl == "native" else self

    def allocate(self) -> tuple[Any, Any]:
        stddev = self.shape[1] ** -0.5
        matrices = (
            noise.normal(i, self.shape, self.dtype, stddev=stddev)
            for i in range(self.copies)
        )
        norm = jnp.ones((self.shape[1],), self.dtype) if self.has_norm else None
        copies = tuple(weights.prepare(matrix, self.impl) for matrix in matrices)
        return {"weights": copies, "norm": norm}, ()

    def inputs(self, impl, fixed, slab, num_rows):
        num_out, num_in = self.shape
        residual = None
        if self.has_residual:
            residual = noise.normal(2, (slab, num_out), self.dtype)
        x = noise.normal(1, (slab, num_in), self.dtype)
        return {"x": x, "residual": residual, "num_active": jnp.int32(num_rows)}

    def call(self, impl, x, pages, fixed, inputs):
        w = fixed["weights"][0]
        if impl == "xla":
            return skinny_gemm.skinny_gemm(x, w), pages
        shared = {"num_active": inputs["num_active"], "norm": fixed["norm"]}
        shared |= {"eps": self.eps, "impl": impl}
        if self.kernel == "gate":
            return gated_projection.gated_projection(x, w, **shared), pages
        shared |= {"residual": inputs["residual"], "out_dtype": self.out_dtype}
        return projection.project(x, w, **shared), pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Subject):
    """What reads nothing but its rows: "norm", "argmax", or all kernels of a "draw"."""

    def allocate(self) -> tuple[Any, Any]:
        return {"weight": jnp.ones((self.shape[1],), self.dtype)}, ()

    def inputs(self, impl, fixed, slab, num_rows):
        x = noise.normal(1, (slab, self.shape[1]), self.dtype)
        positions = jnp.arange(slab, dtype=jnp.int32)
        return {"x": x, "positions": positions, "num_active": jnp.int32(num_rows)}

    def call(self, impl, x, pages, fixed, inputs):
        num_active = inputs["num_active"]
        if self.kernel == "draw":
            slab = x.shape[0]
            settings = sampling.make_settings(temperature=0.7, top_k=20, top_p=0.8)
            settings = jax.tree.map(lambda leaf: jnp.full((slab,), leaf), settings)
            draws = jnp.arange(slab, dtype=jnp.int32) < num_active
            where = {"positions": inputs["positions"], "draws": draws}
            return draw.draw(x, settings, **where, impl=impl)[:, None], pages
        if self.kernel == "argmax":
            found = argmax.argmax(x, num_active=num_active, impl=impl)
            return found[:, None], pages
        how = {"num_active": num_active, "eps": 1e-6, "impl": impl}
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

    def allocate(self) -> tuple[Any, Any]:
        config, width = self.config, index.pages_for(self.context, PAGE_SIZE)
        num_pages = self.spread * self.copies * width
        order = np.random.default_rng(self.seed).permutation(num_pages)
        tables = order.astype(np.int32)[: self.copies * width]
        tables = tuple(map(jnp.asarray, tables.reshape(self.copies, 1, width)))
        shape = (num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        pages = tuple(noise.normal(i, shape, config.dtype) for i in (1, 2))
        norm = jnp.ones(config.head_dim, config.dtype)
        return {"tables": tables, "norm": norm}, pages

    def inputs(self, impl, fixed, slab, num_rows):
        first = self.context - num_rows
        positions = first + jnp.arange(slab, dtype=jnp.int32)
        made = self.rows_at(jnp.zeros((slab,), jnp.int32), positions)
        made["num_active"] = jnp.int32(num_rows)
        if impl in dispatch.PALLAS:
            jobs = functools.partial(_jobs, self, impl, made)
            made["jobs"] = tuple(map(jobs, fixed["tables"]))
        return made

    def rows_at(self, slots: jax.Array, positions: jax.Array) -> dict[str, Any]:
        """Makes random rows of these slots and positions, with their angles."""
        config = self.config
        frequencies, scale = rotary.rope_table(config)
        cos, sin = rope.angles(
            positions, jnp.asarray(frequencies), scale=scale, dtype=config.dtype
        )
        return {
            "x": noise.normal(3, (slots.shape[0], config.qkv_size), config.dtype),
            **{"slots": slots, "positions": positions, "cos": cos, "sin": sin},
        }

    def call(self, impl, x, pages, fixed, inputs):
        config, norm = self.config, fixed["norm"]
        places = ("slots", "positions", "num_active", "cos", "sin")
        shared = {name: inputs[name] for name in places}
        shared |= {"eps": config.rms_norm_eps, "scale": config.head_dim**-0.5}
        if impl in dispatch.PALLAS:
            kernels, shared["interpret"] = dispatch.kernels("row_attention", impl)
            attend = kernels.attend
            shared["jobs"] = inputs["jobs"][0] if "jobs" in inputs else None
        else:
            attend = functools.partial(row_attention.row_attention, impl=impl)
        table = fixed["tables"][0]
        y, *pages = attend(x, norm, norm, *pages, page_table=table, **shared)
        return y, tuple(pages)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jobs(subject: Attention, impl: str, inputs: Arrays, table: jax.Array):
    """Makes the list of jobs of a table, for `subject` in slabs of these rows."""
    config, slab = subject.config, inputs["slots"].shape[0]
    interpret = impl == "interpret"
    plan = attention_plan.default_config(
        config.head_dim, config.dtype, interpret=interpret
    )
    group = config.num_heads // config.num_kv_heads
    layout = attention_plan.layout(slab, group, config.head_dim, tile=plan.tile)
    return row_jobs.row_jobs(
        table,
        *(inputs[name] for name in ("slots", "positions", "num_active")),
        num_pages=subject.spread * subject.copies * table.shape[1],
        page_size=PAGE_SIZE,
        split=plan.split,
        tile_rows=layout.tile_rows,
        num_kv_heads=config.num_kv_heads,
        interpret=interpret,
    )


@functools.partial(
    jax.jit,
    static_argnames=("subject", "impl", "passes", "is_serial"),
    donate_argnames=("pages",),
)
def repeat(
    subject: Subject,
    impl: str,
    passes: int,
    is_serial: bool,
    pages: Any,
    fixed: Any,
    inputs: Arrays,
) -> tuple[jax.Array, Any]:
    """Runs `passes` times over all copies; returns the last rows and the pages."""
    # Traced and lowered once where the copies are alike, however many they are.
    call = jax.jit(subject.call, static_argnums=0)

    def own(number: int, arrays: Arrays) -> Arrays:
        """Returns the arrays of one copy: tuples have an entry for each."""
        return {
            name: (value[number],) if isinstance(value, tuple) else value
            for name, value in arrays.items()
        }

    def one_pass(carry, _):
        x, pages = carry
        firsts = []
        for number in range(subject.copies):
            arrays = own(number, fixed), own(number, inputs)
            y, pages = call(impl, x, pages, *arrays)
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
    """Returns the rows of the slab of `num_rows` active ones, as in the model."""
    height = dispatch.slab_rows(impl)
    if height is not None:
        return math.ceil(num_rows / height) * height
    return max(num_rows, skinny_gemm.MIN_ROWS) if impl == "xla" else num_rows


def all_subjects(
    config: config_lib.Qwen3Config, *, contexts: Sequence[int], platform: str
) -> list[Subject]:
    """Returns what a step of the model calls: five products, attention over `contexts`.

    On a CPU the smallest product too, which costs what any call costs; on a GPU norm,
    argmax and a draw, which are kernels there.

    Between two reads of a weight a step reads all others, so calls take turns in
    reading as many copies as a step has bytes: what of them a cache still holds, it
    holds in the model too. No more than fill `STREAMED_CACHES` last-level caches, of
    which none holds anything.
    """
    shapes = params_lib.shapes(config)
    cache = bench.cache_bytes() or _UNKNOWN_CACHE_BYTES
    streamed_bytes = min(subjects.step_bytes(shapes), STREAMED_CACHES * cache)
    layer, dtype = shapes.layers[0], config.dtype
    product = functools.partial(
        Projection, kernel="project", dtype=dtype, eps=config.rms_norm_eps
    )
    norm, residual = {"has_norm": True}, {"has_residual": True}
    made: list[Subject] = [
        product(name="qkv", shape=layer.qkv.shape, **norm),
        product(name="attention out", shape=layer.attention_out.shape, **residual),
        product(name="gate and up", kernel="gate", shape=layer.gate_up.shape, **norm),
        product(name="down", shape=layer.down.shape, **residual),
        product(name="head", shape=shapes.head.shape, out_dtype="float32", **norm),
    ]
    made += [
        Attention(
            name=f"context {context}",
            kernel="attend",
            shape=(context, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            context=context,
            config=config,
        )
        for context in contexts
        if context <= config.max_position_embeddings
    ]
    copies = lambda s: min(math.ceil(streamed_bytes / s.num_bytes), MOST_COPIES)
    made = [dataclasses.replace(s, copies=copies(s)) for s in made]
    if platform == "cpu":
        return [*made, product(name="a call", shape=(48, 32), copies=8, **norm)]
    rows, ours = slab_of("triton", 1), dispatch.PALLAS
    of = functools.partial(Rows, copies=8)
    width = {"shape": (rows, config.hidden_size), "dtype": dtype}
    logits = {"shape": (rows, config.vocab_size), "dtype": "float32"}
    return [
        *made,
        of(name="norm", kernel="norm", **width, only=(*ours, "xla")),
        of(name="argmax", kernel="argmax", **logits, only=(*ours, "xla")),
        of(name="draw", kernel="draw", **logits, only=ours),
    ]
