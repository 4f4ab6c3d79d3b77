"""Kernel subjects: the kernels of a model at its own shapes, called again and again.

Knows shapes, memory and calls; knows neither clocks nor tables. Many calls are one
compiled loop, so that what Python and the dispatch of an executable cost is in no
number. Each call's first element comes from the call before it: nothing can be moved
out of the loop, and no two calls can run at once. Weights are separate arrays that
the loop reads where they lie, as a model's layers do; a slice of a stacked array
would be a copy of it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.support import bandwidth
from spec_jax.model import (
    config as config_lib,
    params as params_lib,
    rotary,
)
from spec_jax.ops import (
    dispatch,
    gated_projection,
    projection,
    rope,
    row_attention,
    skinny_gemm,
    weights,
)
from spec_jax.paging import index


IMPLS = {"cpu": ("native", "xla"), "cuda": ("triton", "mosaic", "xla")}
"""Implementations by the device that they are measured on: our kernels, then XLA's."""

CONTEXTS = (256, 1024, 4096)
PAGE_SIZE = 16

STREAMED_CACHES = 4
"""A large model reads more than as many last-level caches in a step."""

_UNKNOWN_CACHE_BYTES = 64 * 2**20
_GPU_CACHE_BYTES = 64 * 2**20  # a little more than the L2 of an H100 or H200
_NOISE_SIZE = 2**20

Arrays = Mapping[str, Any]


class Subject(Protocol):
    """A kernel at one shape. Frozen and hashable: `repeat` is compiled for it.

    Attributes:
      name: unique; as the tables show it.
      kernel: which one: "project", "gate" or "attend".
      shape: of a call's weights `[N, K]`, or of its keys `[T, K, H]`.
      context: positions that the last row attends to, where that matters.
      num_bytes: of weights, or of keys and values, that a call reads.
      copies: sets of so many bytes that the calls take in turn.
    """

    name: str
    kernel: str
    copies: int

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def context(self) -> int | None: ...

    @property
    def num_bytes(self) -> int: ...

    def allocate(self) -> tuple[Any, Any]:
        """What the calls of all row counts share: what is read, what is written."""

    def for_impl(self, impl: str) -> "Subject":
        """The subject as `impl` is to be measured on it."""

    def inputs(self, slab: int, num_rows: int) -> Arrays:
        """Random rows `x`, and what else belongs to them."""

    def one_pass(
        self, impl: str, x: jax.Array, pages: Any, fixed: Any, inputs: Arrays
    ) -> tuple[jax.Array, Any]:
        """Calls the kernel on every copy once, each call fed by the one before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """A weight matrix, with the norm, residual or gate that the model gives it.

    "xla" is XLA's product alone: norm, residual and gate would be other operations.

    Attributes:
      impl: for whose kernels `allocate` prepares the weights.
    """

    name: str
    kernel: str
    num_out: int  # N
    num_in: int  # K
    dtype: str
    copies: int
    has_norm: bool = False
    has_residual: bool = False
    out_dtype: str | None = None
    eps: float = 1e-6
    impl: str = "xla"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_out, self.num_in

    @property
    def context(self) -> None:
        return None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def for_impl(self, impl: str) -> "Projection":
        if impl != "native":
            return self  # Matrices, which all others share.
        return dataclasses.replace(self, impl=impl)

    def allocate(self) -> tuple[Any, Any]:
        noise = _noise(self.num_in**-0.5, self.dtype)
        copies = tuple(
            weights.prepare(jnp.array(np.resize(noise, self.shape)), self.impl)
            for _ in range(self.copies)
        )
        norm = jnp.ones((self.num_in,), self.dtype) if self.has_norm else None
        return {"weights": copies, "norm": norm}, ()

    def inputs(self, slab: int, num_rows: int) -> Arrays:
        noise = _noise(1.0, self.dtype)
        residual = np.resize(noise[::-1], (slab, self.num_out))
        return {
            "x": jnp.asarray(np.resize(noise, (slab, self.num_in))),
            "residual": jnp.asarray(residual) if self.has_residual else None,
            "num_live": jnp.int32(num_rows),
        }

    def one_pass(
        self, impl: str, x: jax.Array, pages: Any, fixed: Any, inputs: Arrays
    ) -> tuple[jax.Array, Any]:
        for w in fixed["weights"]:
            x = _feed(x, self._call(impl, x, w, fixed["norm"], inputs))
        return x, pages

    def _call(self, impl, x, w, norm, inputs) -> jax.Array:
        if impl == "xla":
            return skinny_gemm.skinny_gemm(x, w, impl=impl)
        shared = {"num_live": inputs["num_live"], "norm": norm, "eps": self.eps}
        if self.kernel == "gate":
            return gated_projection.gated_projection(x, w, impl=impl, **shared)
        return projection.project(
            x,
            w,
            residual=inputs["residual"],
            out_dtype=self.out_dtype,
            impl=impl,
            **shared,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a layer over pages that lie in no order.

    The copies are slots of one pool: their pages are reached through a table, and so
    need not be arrays of their own. XLA has one slot: it converts all of the pool in
    every call, and would be charged for pages that are not its row's.
    """

    name: str
    kernel: str
    config: config_lib.Qwen3Config
    context: int
    copies: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.context, self.config.num_kv_heads, self.config.head_dim

    @property
    def num_bytes(self) -> int:
        return 2 * math.prod(self.shape) * jnp.dtype(self.config.dtype).itemsize

    def for_impl(self, impl: str) -> "Attention":
        return dataclasses.replace(self, copies=1) if impl == "xla" else self

    def allocate(self) -> tuple[Any, Any]:
        config, num_pages = self.config, index.pages_for(self.context, PAGE_SIZE)
        order = np.random.default_rng(0).permutation(self.copies * num_pages)
        tables = order.astype(np.int32).reshape(self.copies, 1, num_pages)
        shape = (order.size, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        noise = _noise(1.0, config.dtype)
        pages = tuple(jnp.asarray(np.resize(noise, shape)) for _ in ("keys", "values"))
        norm = jnp.ones((config.head_dim,), config.dtype)
        return {"tables": jnp.asarray(tables), "norm": norm}, pages

    def inputs(self, slab: int, num_rows: int) -> Arrays:
        config = self.config
        first = self.context - num_rows
        positions = first + jnp.arange(slab, dtype=jnp.int32)
        frequencies, scale = rotary.rope_table(config)
        cos, sin = rope.angles(
            positions, jnp.asarray(frequencies), scale=scale, dtype=config.dtype
        )
        x = np.resize(_noise(1.0, config.dtype), (slab, config.qkv_size))
        return {
            "x": jnp.asarray(x),
            "slots": jnp.zeros((slab,), jnp.int32),
            "positions": positions,
            "num_live": jnp.int32(num_rows),
            "cos": cos,
            "sin": sin,
        }

    def one_pass(
        self, impl: str, x: jax.Array, pages: Any, fixed: Any, inputs: Arrays
    ) -> tuple[jax.Array, Any]:
        rest = {name: array for name, array in inputs.items() if name != "x"}

        def one_call(copy: jax.Array, carry):
            x, (k, v) = carry
            y, k, v = row_attention.row_attention(
                x,
                fixed["norm"],
                fixed["norm"],
                k,
                v,
                page_table=fixed["tables"][copy],
                eps=self.config.rms_norm_eps,
                scale=self.config.head_dim**-0.5,
                impl=impl,
                **rest,
            )
            return _feed(x, y), (k, v)

        return jax.lax.fori_loop(0, self.copies, one_call, (x, pages))


def _feed(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` with one element of `y`: the next call cannot begin before this one ends."""
    return x.at[0, 0].set(y[0, 0].astype(x.dtype))


def _noise(stddev: float, dtype: str) -> np.ndarray:
    """Normal numbers, to be repeated: what a call costs does not depend on them."""
    noise = np.random.default_rng(0).standard_normal(_NOISE_SIZE, np.float32)
    return (stddev * noise).astype(jnp.dtype(dtype))


@functools.partial(
    jax.jit, static_argnames=("subject", "impl"), donate_argnames=("pages",)
)
def repeat(
    subject: Subject,
    impl: str,
    pages: Any,
    fixed: Any,
    inputs: Arrays,
    passes: jax.Array,  # [] int32
) -> tuple[jax.Array, Any]:
    """Runs `passes` times over all copies; returns the last rows and the pages."""

    def one_pass(_, carry):
        x, pages = carry
        return subject.one_pass(impl, x, pages, fixed, inputs)

    return jax.lax.fori_loop(0, passes, one_pass, (inputs["x"], pages))


def slab_of(impl: str, num_rows: int) -> int:
    """Rows that `impl` computes for `num_rows` live ones, as in the model."""
    height = dispatch.slab_rows(impl)
    if height is not None:
        return math.ceil(num_rows / height) * height
    return max(num_rows, skinny_gemm.MIN_ROWS) if impl == "xla" else num_rows


def cache_bytes() -> int | None:
    """Size of the cache that JAX's device has before its memory, where it is known."""
    if jax.default_backend() == "gpu":
        return _GPU_CACHE_BYTES
    return bandwidth.last_level_cache_bytes()


def all_subjects(config: config_lib.Qwen3Config) -> Sequence[Subject]:
    """What a step of the model calls: five products, and attention over `CONTEXTS`.
    And the smallest product, which costs what any call costs.

    Between two reads of a weight a step reads all others, so calls take turns in
    reading as many copies as a step has bytes: what of them a cache still holds, it
    holds in the model too. No more than fill `STREAMED_CACHES` last-level caches, of
    which none holds anything.
    """
    step_bytes = bandwidth.step_bytes(params_lib.shapes(config))
    streamed_bytes = STREAMED_CACHES * (cache_bytes() or _UNKNOWN_CACHE_BYTES)
    between = min(step_bytes, streamed_bytes)

    def rotated(subject: Subject) -> Subject:
        copies = math.ceil(between / subject.num_bytes)
        return dataclasses.replace(subject, copies=copies)

    attentions = [
        Attention(
            name=f"context {context}",
            kernel="attend",
            config=config,
            context=context,
            copies=1,
        )
        for context in CONTEXTS
        if context <= config.max_position_embeddings
    ]
    return [
        *map(rotated, _layer_projections(config)),
        rotated(_head(config)),
        *map(rotated, attentions),
        _smallest(config),
    ]


def _layer_projections(config: config_lib.Qwen3Config) -> list[Projection]:
    layer = params_lib.shapes(config).layers[0]

    def subject(name: str, kernel: str, leaf: jax.ShapeDtypeStruct, **extras):
        num_out, num_in = leaf.shape
        return Projection(
            name=name,
            kernel=kernel,
            num_out=num_out,
            num_in=num_in,
            dtype=config.dtype,
            copies=1,
            eps=config.rms_norm_eps,
            **extras,
        )

    return [
        subject("qkv", "project", layer.qkv, has_norm=True),
        subject("attention out", "project", layer.attention_out, has_residual=True),
        subject("gate and up", "gate", layer.gate_up, has_norm=True),
        subject("down", "project", layer.down, has_residual=True),
    ]


def _head(config: config_lib.Qwen3Config) -> Projection:
    num_out, num_in = params_lib.shapes(config).head.shape
    return Projection(
        name="head",
        kernel="project",
        num_out=num_out,
        num_in=num_in,
        dtype=config.dtype,
        copies=1,
        has_norm=True,
        out_dtype="float32",
        eps=config.rms_norm_eps,
    )


def _smallest(config: config_lib.Qwen3Config) -> Projection:
    """A product that is hardly there, of two panels of the kernels."""
    return Projection(
        name="a call",
        kernel="project",
        num_out=48,
        num_in=32,
        dtype=config.dtype,
        copies=8,
        has_norm=True,
        eps=config.rms_norm_eps,
    )
