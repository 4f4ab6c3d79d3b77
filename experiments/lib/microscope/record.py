"""A record: every operation of one path over a scene, and whether that moved a bit.

The recorded pass is the one that ran: the path's own, seen through its hook. The
values that its fused kernels keep to themselves are read afterwards, `fused`.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.lib.microscope import faults, fused, scene as scene_lib, trees
from spec_jax import compilation, testing
from spec_jax.model import observe, params as params_lib, qwen3, row_model
from spec_jax.ops import projection
from spec_jax.paging import allocator, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """A way to run a window, static and hashable.

    Attributes:
      name: of the way, for tables and rows.
      model: a model of Qwen3; says config, implementation and slab.
      page_size: of the cache that it runs on.
      window_rows: the height of the array that a window comes in, active or not, for
        which the library's products are compiled; that of its tokens if None.
      one_by_one: each row of the window is a call of its own.
      target: None: the window is a run of `qwen3.forward_rows`, whose kernels fuse
        operations. Otherwise a `baseline.RowTarget` that runs it and fuses none; its
        `forward` takes `observe`, see `model.observe`.
      tree: parents of the columns of the tree in which the window is verified, see
        `trees`; None: the window is a chain.

    Raises:
      ValueError: a tree for what is not one forward of the model's rows.
      NotImplementedError: a model of another family than Qwen3.
    """

    name: str
    model: row_model.RowModel
    page_size: int
    window_rows: int | None = None
    one_by_one: bool = False
    target: Any = None
    tree: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.model.config.model_type != "qwen3":
            raise NotImplementedError(
                f"the microscope knows the operations of qwen3 models, and this is a "
                f"{self.model.config.model_type} model"
            )
        if self.tree is not None and (self.one_by_one or self.target is not None):
            raise ValueError(
                f"a tree is verified by the model's rows, all of them at once, and not "
                f"by {self.name}: leave the tree out"
            )

    @property
    def dtype(self) -> str:
        """The model's."""
        return self.model.config.dtype

    def to_row(self) -> dict[str, Any]:
        """Returns the JSON form."""
        sizes = {name: getattr(self, name) for name in ("page_size", "window_rows")}
        model = {"impl": self.model.impl, "dtype": self.dtype, "slab": self.model.slab}
        return {"path": self.name, **model, **sizes, "tree": self.tree}

    @property
    def height(self) -> int:
        """Rows of each call of the model, active or not."""
        if self.tree is None:
            return self.model.slab
        return trees.target(self.model).tile_rows(len(self.tree))

    @property
    def fused(self) -> tuple[str, ...]:
        """The operations whose values never leave a kernel."""
        if self.target is not None:
            return ()
        return tuple(
            name for name in observe.OPERATIONS if name not in observe.LEAVES_ROWS
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Results of every operation of a path for each row of a window.

    Attributes:
      values: by `observe.key`, `[rows, width]`, a row for each token of the window.
      moved: elements of the logits and of the K/V that were written which differ from
        those of the same run uninstrumented. Not 0: the record is of another
        program than the one that runs.
      unexplained: by operation, elements of all layers that `fused.unexplained`
        counts, where there are any: what was read inside the kernel before it is not
        what the kernel used.
    """

    values: dict[str, np.ndarray]
    moved: int
    unexplained: dict[str, int]

    @property
    def logits(self) -> np.ndarray:
        """`[rows, V]` float32."""
        return self.values["logits"]

    @property
    def dtype(self) -> np.dtype:
        """The model's."""
        return self.values["embed"].dtype


def take(
    path: Path,
    params: params_lib.Params,
    scene: scene_lib.Scene,
    fault: faults.Fault | None = None,
) -> Record:
    """Runs a scene on a path, uninstrumented and recorded.

    Args:
      fault: planted in what is recorded; the checks are of the path without it.

    Raises:
      ValueError: a window that does not fit the slab, or is not as long as the tree's
        path; or a fault that cannot be planted on this path.
    """
    if fault is not None:
        is_tree, num_layers = path.tree is not None, path.model.config.num_layers
        faults.check(fault, num_layers=num_layers, is_tree=is_tree)
    real_kv, logits = _run_unseen(path, params, scene)
    kv, values, wrong = _record(path, params, scene, fault=None)
    moved = _count(values["logits"], logits) + _count_kv(kv, real_kv)
    if fault is not None:
        _, values, _ = _record(path, params, scene, fault=fault)
    return Record(values=values, moved=moved, unexplained=wrong)


def calls(
    path: Path, tokens: Sequence[int], start: int
) -> Iterator[dict[str, np.ndarray | jax.Array]]:
    """Returns the arguments of each `run` over tokens at positions from `start`.

    Raises:
      ValueError: more tokens than the rows they come in, or more rows than the slab.
    """
    num_rows = 1 if path.one_by_one else len(tokens)
    height = num_rows if path.window_rows is None else path.window_rows
    if num_rows > height:
        raise ValueError(
            f"a window of {num_rows} tokens does not fit window_rows={height}"
        )
    if height > path.model.slab:
        raise ValueError(
            f"a window of {height} rows does not fit a slab of {path.model.slab}"
        )
    for first in range(0, len(tokens), num_rows):
        live = np.asarray(tokens[first : first + num_rows], np.int32)
        yield {
            "tokens": np.pad(live, (0, height - num_rows)),
            "start": jnp.int32(start + first),
            "num_active": jnp.int32(num_rows),
        }


def _run_unseen(path, params, scene):
    """Returns the cache and the logits of the window's rows, uninstrumented."""
    kv, found = _filled(path, scene), []
    if path.tree is not None:
        kv, logits = trees.verify(path.model, params, kv, scene, path.tree)
        return kv, np.asarray(logits)
    for where in calls(path, scene.window, scene.start):
        kv, logits = run(path, params, kv, **where)
        found.append(np.asarray(logits)[: int(where["num_active"])])
    return kv, np.concatenate(found)


def _filled(path: Path, scene: scene_lib.Scene) -> cache.PagedKV:
    num_rows = len(scene.window if path.tree is None else path.tree)
    return scene_lib.fill(
        scene, path.model, page_size=path.page_size, num_rows=num_rows
    )


def _record(path, params, scene, *, fault):
    """Returns the cache after the window, values by key, and unexplained ones."""
    kv, planted = _filled(path, scene), fault
    if fault is not None and path.fused and fault.operation in faults.WEIGHTS:
        # The program is as without it.
        params, planted = faults.of_params(params, fault), None
    records: list[dict[str, np.ndarray]] = []
    wrong: collections.Counter[str] = collections.Counter()
    passes = calls(path, scene.window, scene.start)
    if path.tree is not None:
        passes = trees.calls(scene, path.tree, path.model, height=path.height)
    for where in passes:
        num_rows = int(where["num_active"])
        kv, values = _run_seen(path, params, kv, fault=planted, **where)
        if path.fused:
            values |= _read_fused(path, params, values, fault=fault, **where)
        if path.fused and fault is None:
            wrong.update(_unexplained(path, params, values, num_rows))
        records.append({name: np.asarray(x[:num_rows]) for name, x in values.items()})
    values = {
        name: np.concatenate([record[name] for record in records])
        for name in observe.keys(path.model.config.num_layers)
    }
    if path.tree is not None:
        columns = list(trees.columns(path.tree))
        values = {name: x[columns] for name, x in values.items()}
        kv = trees.keep(path.model, kv, scene, path.tree)
    return kv, values, {name: count for name, count in wrong.items() if count}


@functools.partial(compilation.jit, static_argnames=("path",))
def run(
    path: Path,
    params: params_lib.Params,
    kv: cache.PagedKV,
    *,
    tokens: Int[Array, " window"],
    start: Int[Array, ""],
    num_active: Int[Array, ""],
) -> tuple[cache.PagedKV, Float[Array, "rows V"]]:
    """Runs the path uninstrumented, see `baseline.RowTarget.forward`."""
    return (path.target or path.model).forward(
        params, kv, tokens=tokens, start=start, num_active=num_active
    )


@functools.partial(compilation.jit, static_argnames=("path", "fault"))
def _run_seen(path, params, kv, *, tokens, start, num_active, fault, layout=None):
    """Returns the cache, and the values that leave kernels, `[R, width]` by key.

    Args:
      layout: positions and branches of a tree's rows, which are stored from `start` on.
    """
    where = {"tokens": tokens, "start": start, "num_active": num_active}
    values = {}

    def record(layer, operation, value):
        # Behind a barrier, so that nothing is fused with the recording of it.
        kept = jax.lax.optimization_barrier(value)
        values[observe.key(layer, operation)] = kept.reshape(kept.shape[0], -1)
        return value

    hook = record
    if fault is not None:
        hook = faults.hook(
            fault,
            record,
            num_active=num_active,
            attention=_attention(path, params, kv, start, layout),
        )
    kv = _forward(path, params, kv, hook, layout=layout, **where)
    return kv, values


def _layout(path, start, layout):
    """Returns positions of a call's rows, and their branches, None for chains."""
    if layout is not None:
        return layout
    return start + jnp.arange(path.height, dtype=jnp.int32), None


def _forward(path, params, kv, hook, *, tokens, start, num_active, layout):
    """Runs the path's forward pass with a hook in it; returns the cache."""
    if path.target is not None:
        where = {"tokens": tokens, "start": start, "num_active": num_active}
        return path.target.forward(params, kv, observe=hook, **where)[0]
    height, slot = path.height, row_model.SLOT
    positions, branch = _layout(path, start, layout)
    rows = qwen3.Rows(
        tokens=jnp.pad(tokens, (0, height - tokens.shape[0])),
        slots=jnp.full((height,), slot, jnp.int32),
        positions=positions,
        num_active=num_active,
        branch=branch,
    )
    kv, _ = qwen3.forward_rows(
        params, path.model.config, rows, kv, impl=path.model.impl, observe=hook
    )
    return allocator.extend(kv, slot, start + num_active)


def _attention(path, params, kv, start, layout):
    """Returns what a fault inside the fused attention needs; None for other paths."""
    if not path.fused:
        return None
    positions, branch = _layout(path, start, layout)
    return faults.Attention(
        model=path.model,
        params=params,
        kv=kv,
        positions=positions,
        branch=branch,
        angles=_all_angles(path.model, positions),
    )


def _read_fused(path, params, values, *, tokens, start, num_active, fault, layout=None):
    """Recomputes the values that a pass's kernels kept to themselves, by key."""
    del tokens
    model = path.model
    good = _angles(path, start, layout)
    read: dict[str, jax.Array] = {}
    x = values["embed"]
    for number, layer in enumerate(params.layers):
        angles = {"q_rope": good, "k_rope": good}
        if fault is not None and fault.layer == number and fault.operation in angles:
            angles[fault.operation] = faults.of_angles(good, num_active)
        seen = {
            name: values[observe.key(number, name)]
            for name in observe.LAYER_OPERATIONS
            if name in observe.LEAVES_ROWS
        }
        inside = _layer_values(
            layer,
            model.config,
            seen,
            x=x,
            q_angles=angles["q_rope"],
            k_angles=angles["k_rope"],
            num_active=num_active,
            impl=model.impl,
        )
        read |= {observe.key(number, name): value for name, value in inside.items()}
        x = seen["mlp_residual"]
    read["final_norm"] = _normed(
        x,
        params.final_norm,
        num_active=num_active,
        eps=model.config.rms_norm_eps,
        impl=model.impl,
    )
    return read


# One executable for all layers.
_layer_values = compilation.jit(fused.layer_values, static_argnames=("config", "impl"))
_layer_unexplained = compilation.jit(
    fused.unexplained, static_argnames=("config", "impl")
)
_normed = compilation.jit(fused.normed, static_argnames=("eps", "impl"))
_project = compilation.jit(projection.project, static_argnames=("out_dtype", "impl"))


@functools.partial(compilation.jit, static_argnames=("path",))
def _angles(path, start, layout):
    """Returns the angles of a call's rows."""
    return _all_angles(path.model, _layout(path, start, layout)[0])


def _all_angles(model, positions):
    dtype = jnp.dtype(model.config.dtype)
    return qwen3.row_angles(model.config, positions, dtype=dtype, impl=model.impl)


def _unexplained(path, params, values, num_rows) -> dict[str, int]:
    """Counts differing elements of active rows by operation, logits included."""
    total: collections.Counter[str] = collections.Counter()
    model, x = path.model, values["embed"]
    shared = {"num_active": jnp.int32(num_rows), "impl": model.impl}
    for number, layer in enumerate(params.layers):
        own = {
            name: values[observe.key(number, name)] for name in observe.LAYER_OPERATIONS
        }
        wrong = _layer_unexplained(layer, model.config, own, x=x, **shared)
        for name, differs in wrong.items():
            total[name] += int(np.asarray(differs)[:num_rows].sum())
        x = own["mlp_residual"]
    logits = _project(values["final_norm"], params.head, out_dtype="float32", **shared)
    differs = np.asarray(logits != values["logits"])
    total["logits"] += int(differs[:num_rows].sum())
    return total


def _count(one: np.ndarray, other: np.ndarray) -> int:
    return int((testing.bits(one) != testing.bits(other)).sum())


def _count_kv(one: cache.PagedKV, other: cache.PagedKV) -> int:
    """Counts differing elements of all pages of two caches with equal tables."""
    pools = zip((*one.k, *one.v), (*other.k, *other.v), strict=True)
    return sum(_count(np.asarray(x), np.asarray(y)) for x, y in pools)
