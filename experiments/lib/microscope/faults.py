"""Faults to plant in one operation of one layer: the microscope must name them.

A value that leaves its kernel is changed. Inside a fused kernel the operation is made
wrong through what it alone reads: the weight of a norm or of a product, the angles of a
rotation, the branch of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.lib.microscope import fused
from spec_jax.model import observe, params as params_lib, row_model
from spec_jax.ops import row_attention
from spec_jax.paging import cache


KINDS = ("ulp", "parent")
"""Faults that can be planted in the last active row:

    ulp         one element is a unit in the last place too large; of a weight or of
                angles, all elements are
    parent      of a tree's row: it attends to the column before its parent
"""

WEIGHTS = {
    **{name: name for name in ("input_norm", "q_norm", "k_norm", "attention_out")},
    **{name: name for name in ("mlp_norm", "down", "final_norm")},
    **{"gate": "gate_up", "up": "gate_up"},
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
        """Returns the name of the operation, see `observe.key`."""
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
    if fault.kind == "parent" and fault.operation != "attention":
        raise ValueError(f"fault {text!r}: 'parent' is a fault of attention alone")
    return fault


def check(fault: Fault, *, num_layers: int, is_tree: bool) -> None:
    """Raises `ValueError` where the fault cannot be planted."""
    if fault.layer is not None and fault.layer >= num_layers:
        raise ValueError(
            f"there is no layer {fault.layer} to plant a fault in: the model has "
            f"layers 0 to {num_layers - 1}"
        )
    if fault.kind == "parent" and not is_tree:
        raise ValueError(
            "'parent' is a fault of a tree's rows, and these are a chain: give the "
            "path a tree"
        )


def next_up(x: jax.Array) -> jax.Array:
    """Moves each element one unit in the last place further from zero."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    raised = jax.lax.bitcast_convert_type(x, unsigned) + unsigned(1)
    return jax.lax.bitcast_convert_type(raised, x.dtype)


def of_angles(angles: fused.Angles, num_active: jax.Array) -> fused.Angles:
    """Plants the fault in cosines and sines of the last active row."""
    last = num_active - 1
    cos, sin = (x.at[last].set(next_up(x[last])) for x in angles)
    return cos, sin


def of_params(params: params_lib.Params, fault: Fault) -> params_lib.Params:
    """Plants the fault in the weight of a fused operation.

    Operations that read no weight of their own leave them as they are.
    """
    field = WEIGHTS.get(fault.operation)
    if field is None:
        return params
    if fault.layer is None:
        return params.replace(final_norm=next_up(params.final_norm))
    layers = list(params.layers)
    weight = getattr(layers[fault.layer], field)
    middle = weight.shape[0] // 2
    if fault.operation == "gate":
        weight = weight.at[:middle].set(next_up(weight[:middle]))
    elif fault.operation == "up":
        weight = weight.at[middle:].set(next_up(weight[middle:]))
    else:
        weight = next_up(weight)
    layers[fault.layer] = layers[fault.layer].replace(**{field: weight})
    return params.replace(layers=tuple(layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Inputs of the fused attention of `forward_rows`, to be run again with a fault.

    Attributes:
      kv: the cache as it is before the forward pass, with pages reserved.
      positions: of the rows `[R]`; all are of `row_model.SLOT`.
      branch: of the rows of a tree, `[R, A]`; None: a chain.
      angles: of the rows, as they should be.
    """

    model: row_model.RowModel
    params: params_lib.Params
    kv: cache.PagedKV
    positions: jax.Array
    branch: jax.Array | None
    angles: fused.Angles

    def wrong(
        self, fault: Fault, heads: dict[str, jax.Array], num_active: jax.Array
    ) -> jax.Array:
        """Returns `[R, width]`: keys if `fault` is in "k_rope", else attended heads.

        Args:
          heads: queries, keys and values of the layer, projected.
        """
        layer, config = self.params.layers[fault.layer], self.model.config
        angles, branch = self.angles, self.branch
        if fault.operation in ("q_rope", "k_rope"):
            angles = of_angles(angles, num_active)
        elif branch is not None:
            branch = branch.at[num_active - 1, -2].add(-1)
        # Behind a barrier, as the taps have them: nothing is fused with their making.
        cos, sin = angles = jax.lax.optimization_barrier(angles)
        eps, impl = config.rms_norm_eps, self.model.impl
        shared = {"num_active": num_active, "eps": eps, "impl": impl}
        if fault.operation == "k_rope":
            keys = jax.lax.optimization_barrier(heads["k"])
            return fused.rotated(keys, layer.k_norm, angles=angles, **shared)
        attended, _, _ = row_attention.row_attention(
            jnp.concatenate([heads[name] for name in "qkv"], axis=1),
            layer.q_norm,
            layer.k_norm,
            self.kv.k[fault.layer],
            self.kv.v[fault.layer],
            page_table=self.kv.page_table,
            slots=jnp.full_like(self.positions, row_model.SLOT),
            positions=self.positions,
            cos=cos,
            sin=sin,
            scale=config.head_dim**-0.5,
            branch=branch,
            **shared,
        )
        return attended


_SHOWS = {"q_rope": "attention", "k_rope": "k_cache", "attention": "attention"}
"""The operation in whose value a fault inside the fused attention is seen."""


def hook(
    fault: Fault,
    then: observe.Observe,
    *,
    num_active: jax.Array,
    attention: Attention | None,
) -> observe.Observe:
    """Returns a hook that plants a fault, and hands every value on to another hook.

    Args:
      then: sees the values with the fault in them.
      attention: of paths that fuse their operations, None for others. A fault inside
        it takes the last row from a run of the kernel that is wrong.
    """
    last, heads = num_active - 1, {}
    is_inside = attention is not None and (
        fault.kind == "parent" or fault.operation in ("q_rope", "k_rope")
    )

    def see(layer: int | None, operation: str, value: jax.Array) -> jax.Array:
        if layer != fault.layer:
            return then(layer, operation, value)
        heads[operation] = value
        flat = value.reshape(value.shape[0], -1)
        if is_inside and operation == _SHOWS[fault.operation]:
            flat = flat.at[last].set(attention.wrong(fault, heads, num_active)[last])
        elif operation == fault.operation and not is_inside:
            middle = flat.shape[1] // 2
            flat = flat.at[last, middle].set(next_up(flat[last, middle]))
        return then(layer, operation, flat.reshape(value.shape))

    return see
