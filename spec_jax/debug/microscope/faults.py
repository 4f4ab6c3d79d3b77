"""Faults to plant in one operation of one layer: the microscope must name them.

Where the value of an operation leaves its kernel, the value is changed. Inside a fused
kernel the operation is made wrong through what it alone reads: the weight of a norm or
of a product, the angles of a rotation.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.debug.microscope import fused
from spec_jax.model import config as config_lib, observe, params as params_lib
from spec_jax.ops import row_attention
from spec_jax.paging import cache


OF_TREES = ("by-place", "parent", "swapped-keys")
"""Faults of a tree's rows alone; `KINDS` says what they are."""

KINDS = ("ulp", "zero-head", "swap-rows", "stale", *OF_TREES)
"""Faults that can be planted in the last active row:

    ulp         one element is a unit in the last place too large; of a weight or of
                angles, all elements are
    zero-head   the first `H` elements are zero; of a weight, its first `H` rows
    swap-rows   it is exchanged with the row before
    stale       it holds what the row before holds
    by-place    it is rotated by the place where it is stored, not by its position
    parent      it attends to the column before its parent in its parent's place
    swapped-keys  it attends to its parent's key before that of the parent's parent
"""

_TREE_OPERATIONS = {
    "by-place": ("q_rope", "k_rope"),
    "parent": ("attention",),
    "swapped-keys": ("attention",),
}

OF_WEIGHTS = KINDS[:2]
"""Faults that a weight can have, which knows no rows."""

WEIGHTS = {
    "input_norm": "input_norm",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "attention_out": "attention_out",
    "mlp_norm": "mlp_norm",
    "gate": "gate_up",
    "up": "gate_up",
    "down": "down",
    "final_norm": "final_norm",
}
"""The field of the parameters that only this operation reads, where it is fused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. `layer` is None for an operation outside of the layers."""

    layer: int | None
    operation: str
    kind: str = "ulp"

    @property
    def key(self) -> str:
        """As `observe.key`."""
        return observe.key(self.layer, self.operation)


def parse(text: str) -> Fault:
    """Reads `LAYER:OPERATION[:KIND]`, or `OPERATION[:KIND]` outside of the layers.

    Raises:
      ValueError: another form, or an operation or a kind that does not exist.
    """
    parts = text.split(":")
    layer = int(parts.pop(0)) if parts[0].isascii() and parts[0].isdigit() else None
    if not 1 <= len(parts) <= 2:
        raise ValueError(f"fault {text!r} is not of the form LAYER:OPERATION[:KIND]")
    fault = Fault(layer=layer, operation=parts[0], kind=[*parts, "ulp"][1])
    if fault.operation not in observe.OPERATIONS:
        raise ValueError(
            f"fault {text!r}: operation {fault.operation!r} is not one of "
            f"{', '.join(observe.OPERATIONS)}"
        )
    if (layer is None) != (fault.operation in observe.OUTSIDE):
        where = "no layer" if layer is not None else "a layer, as in 0:q"
        raise ValueError(f"fault {text!r}: {fault.operation} takes {where}")
    if fault.kind not in KINDS:
        raise ValueError(
            f"fault {text!r}: kind {fault.kind!r} is not one of {', '.join(KINDS)}"
        )
    return fault


def check(
    fault: Fault,
    config: config_lib.ModelConfig,
    *,
    is_fused: bool,
    num_rows: int,
    depth: int | None = None,
) -> None:
    """Raises `ValueError` where the fault cannot be planted.

    Args:
      is_fused: whether the operation's value never leaves its kernel.
      num_rows: active rows of a call.
      depth: of the last row, where rows are a tree; None: they are a chain.
    """
    if fault.kind in OF_TREES:
        _check_of_tree(fault, depth)
    if fault.layer is not None and fault.layer >= config.num_layers:
        raise ValueError(
            f"there is no layer {fault.layer} to plant a fault in: the model has "
            f"layers 0 to {config.num_layers - 1}"
        )
    if is_fused and fault.operation in WEIGHTS and fault.kind not in OF_WEIGHTS:
        raise ValueError(
            f"{fault.operation} is inside a fused kernel, where only its weight can "
            f"be wrong: {fault.kind!r} is not one of {', '.join(OF_WEIGHTS)}"
        )
    needs_two = fault.kind not in (*OF_WEIGHTS, *OF_TREES)
    if needs_two and num_rows < 2:
        raise ValueError(
            f"{fault.kind!r} needs two active rows in a call, and there is {num_rows}: "
            "draft a token, or run a path that takes the window at once"
        )


def _check_of_tree(fault: Fault, depth: int | None) -> None:
    operations = _TREE_OPERATIONS[fault.kind]
    if depth is None:
        raise ValueError(
            f"{fault.kind!r} is a fault of a tree's rows, and these are a chain: give "
            "the path a tree"
        )
    if fault.operation not in operations:
        raise ValueError(
            f"{fault.kind!r} is a fault of {' or '.join(operations)}, not of "
            f"{fault.operation}"
        )
    if fault.kind == "swapped-keys" and depth < 2:
        raise ValueError(
            f"{fault.kind!r} needs a row of depth 2, and the last one has {depth}: "
            "give a deeper tree"
        )


def next_up(x: jax.Array) -> jax.Array:
    """Moves each element one unit in the last place further from zero."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    raised = jax.lax.bitcast_convert_type(x, unsigned) + unsigned(1)
    return jax.lax.bitcast_convert_type(raised, x.dtype)


def of_rows(value: jax.Array, kind: str, *, num_active: jax.Array, H: int) -> jax.Array:
    """Plants the fault in the last active row of `value` `[R, ...]`."""
    flat = value.reshape(value.shape[0], -1)
    last, middle = num_active - 1, flat.shape[1] // 2
    if kind == "ulp":
        wrong = flat.at[last, middle].set(next_up(flat[last, middle]))
    elif kind == "zero-head":
        wrong = flat.at[last, :H].set(0)
    elif kind == "swap-rows":
        wrong = flat.at[last].set(flat[last - 1]).at[last - 1].set(flat[last])
    else:
        wrong = flat.at[last].set(flat[last - 1])
    return wrong.reshape(value.shape)


def of_branch(branch: jax.Array, kind: str, *, num_active: jax.Array) -> jax.Array:
    """Branches `[R, A]` with the fault in the last active row."""
    last = num_active - 1
    if kind == "parent":
        return branch.at[last, -2].add(-1)
    return branch.at[last, -3:-1].set(branch[last, -3:-1][::-1])


def of_angles(
    angles: fused.Angles,
    kind: str,
    *,
    num_active: jax.Array,
    by_place: fused.Angles,
) -> fused.Angles:
    """Plants the fault in cosines and sines of the last active row.

    Args:
      by_place: angles of the places where the rows are stored.
    """
    last = num_active - 1
    if kind == "by-place":
        cos, sin = (
            x.at[last].set(wrong[last])
            for x, wrong in zip(angles, by_place, strict=True)
        )
        return cos, sin

    def spoil(x: jax.Array) -> jax.Array:
        if kind == "ulp":
            return x.at[last].set(next_up(x[last]))
        return of_rows(x, kind, num_active=num_active, H=x.shape[1])

    cos, sin = angles
    return spoil(cos), spoil(sin)


def of_params(
    params: params_lib.Params, config: config_lib.ModelConfig, fault: Fault
) -> params_lib.Params:
    """Plants the fault in the weight of a fused operation.

    Operations that read no weight of their own leave them as they are.
    """
    field = WEIGHTS.get(fault.operation)
    if field is None:
        return params
    if fault.layer is None:
        return params.replace(final_norm=_spoil(params.final_norm, fault, config))
    layer = params.layers[fault.layer]
    weight, F = getattr(layer, field), config.intermediate_size
    if fault.operation == "gate":
        weight = weight.at[:F].set(_spoil(weight[:F], fault, config))
    elif fault.operation == "up":
        weight = weight.at[F:].set(_spoil(weight[F:], fault, config))
    else:
        weight = _spoil(weight, fault, config)
    layers = list(params.layers)
    layers[fault.layer] = layer.replace(**{field: weight})
    return params.replace(layers=tuple(layers))


def _spoil(weight, fault, config):
    if fault.kind == "ulp":
        return next_up(weight)
    return weight.at[: config.head_dim].set(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """Inputs of a wrong rotation inside the fused attention of `forward_rows`.

    Attributes:
      kv: the cache as it is before the forward pass, with pages reserved.
      angles: of the rows, as they should be.
      positions: of the rows `[R]`; all are of `slot`.
      branch: of the rows of a tree, `[R, A]`; None: a chain.
      by_place: as `angles`, of the places where the rows are stored.
    """

    params: params_lib.Params
    config: config_lib.Qwen3Config
    impl: str
    kv: cache.PagedKV
    positions: jax.Array
    branch: jax.Array | None
    slot: int
    angles: fused.Angles
    by_place: fused.Angles


class Injector:
    """A hook that plants a fault, and hands what it makes of a value to another hook.

    Args:
      then: sees the values with the fault in them; `observe.pass_on` if none does.
      rotation: for paths whose rotations are fused, None for others. Then of two runs
        of the attention, a good one and one with wrong angles or a wrong branch, a
        fault in `q_rope` or of a branch takes what is attended from the wrong one, and
        a fault in `k_rope` takes the keys that are stored.
    """

    def __init__(
        self,
        fault: Fault,
        *,
        config: config_lib.Qwen3Config,
        num_active: jax.Array,
        then: observe.Observe,
        rotation: Rotation | None,
    ):
        self._fault, self._config, self._num_active = fault, config, num_active
        self._then, self._rotation = then, rotation
        self._heads: dict[str, jax.Array] = {}

    def __call__(
        self, layer: int | None, operation: str, value: jax.Array
    ) -> jax.Array:
        fault, H = self._fault, self._config.head_dim
        is_of_branch = fault.kind in OF_TREES
        if (layer, operation) == (fault.layer, fault.operation) and not is_of_branch:
            value = of_rows(value, fault.kind, num_active=self._num_active, H=H)
        elif layer == fault.layer and self._rotation is not None:
            value = self._rotate(operation, value)
        return self._then(layer, operation, value)

    def _rotate(self, operation, value):
        """Plants a fault of the rotation that is fused with the value's operation."""
        if operation in ("q", "k", "v"):
            self._heads[operation] = value
        if (operation, self._fault.operation) == ("attention", "q_rope"):
            return self._attend_wrongly()
        if (operation, self._fault.operation) == ("attention", "attention"):
            # That row alone: jobs of kernels are shared along branches.
            last = self._num_active - 1
            return value.at[last].set(self._attend_wrongly()[last])
        if (operation, self._fault.operation) == ("k_cache", "k_rope"):
            return self._rotate_wrongly().reshape(value.shape)
        return value

    def _known(self) -> tuple[Rotation, int]:
        """Returns the inputs of a fault of a fused rotation, and its layer's number."""
        if self._rotation is None or self._fault.layer is None:
            raise ValueError(f"{self._fault} needs a layer and a fused rotation")
        return self._rotation, self._fault.layer

    def _shared(self):
        """Returns the layer's parameters, wrong angles, and what both kernels take."""
        known, number = self._known()
        # Behind a barrier, as the taps have them: nothing is fused with their making.
        angles = jax.lax.optimization_barrier(
            of_angles(
                known.angles,
                self._fault.kind,
                num_active=self._num_active,
                by_place=known.by_place,
            )
            if self._fault.operation in ("q_rope", "k_rope")
            else known.angles
        )
        eps = known.config.rms_norm_eps
        shared = {"num_active": self._num_active, "eps": eps, "impl": known.impl}
        return known.params.layers[number], angles, shared

    def _attend_wrongly(self):
        """Returns the layer's attended heads, `[R, N * H]`, with a fault."""
        known, number = self._known()
        layer, (cos, sin), shared = self._shared()
        branch = known.branch
        if branch is not None and self._fault.operation == "attention":
            kind = self._fault.kind
            branch = of_branch(branch, kind, num_active=self._num_active)
        attended, _, _ = row_attention.row_attention(
            jnp.concatenate([self._heads[name] for name in "qkv"], axis=1),
            layer.q_norm,
            layer.k_norm,
            known.kv.k[number],
            known.kv.v[number],
            page_table=known.kv.page_table,
            slots=jnp.full_like(known.positions, known.slot),
            positions=known.positions,
            cos=cos,
            sin=sin,
            scale=known.config.head_dim**-0.5,
            branch=branch,
            **shared,
        )
        return attended

    def _rotate_wrongly(self):
        """Rotates the layer's keys `[R, K * H]` by wrong angles."""
        layer, angles, shared = self._shared()
        keys = jax.lax.optimization_barrier(self._heads["k"])
        return fused.rotated(keys, layer.k_norm, angles=angles, **shared)
