"""Whole steps of a model as JAX functions, each one foreign call.

Their bits are those of the functions of `calls`, one by one.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls, draws as draws_lib, panels


Pages = list[tuple[jax.Array, jax.Array]]
Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines `[R, H / 2]` of rows."""


class LayerWeights(typing.NamedTuple):
    """A layer, in the order of the kernels' arrays; matrices as panels.

    Give both norms of heads, or neither.
    """

    input_norm: jax.Array  # [D]
    qkv: calls.Weight  # [(N + 2K) * H, D], or with `kv` of queries alone [N * H, D]
    q_norm: jax.Array | None  # [H]
    k_norm: jax.Array | None  # [H]
    attention_out: calls.Weight  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: calls.Weight  # [2F, D]
    down: calls.Weight  # [D, F]
    kv: calls.Weight | None = None  # [2K * H, D], keys first


_SHARED = [name for name in LayerWeights._fields if name not in ("qkv", "kv")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A step's weights, and the pages that it updates.

    Raises:
      ValueError: shapes that do not fit each other.
      NotImplementedError: dtypes or sizes of heads that the kernels do not have.
    """

    embed: calls.Weight  # [V, D]
    layers: Sequence[LayerWeights]
    final_norm: jax.Array  # [D]
    head: calls.Weight | None  # [V, D]; None: `embed`, which is then of panels
    pages: Sequence[tuple[jax.Array, jax.Array]]  # keys and values [P, C, K, H]
    page_table: jax.Array  # [S, M] int32
    eps: float
    scale: float
    heads: ClassVar[dict[str, str]] = {"qkv": "qkv"}
    """The parameters of queries, keys and values, by fields of `LayerWeights`."""
    has_own_tokens: ClassVar[bool] = False
    """Whether a head has tokens of its own, of which `head` has a row each."""

    @classmethod
    def of(cls, params: Any, layers: Any, config: Any, kv: Any, **more: Any) -> Self:
        """Returns a model of these parameters, layers, sizes and pages."""
        names = dict(zip(_SHARED, _SHARED, strict=True)) | cls.heads
        return cls(
            embed=params.embed,
            layers=[
                LayerWeights(**{name: getattr(x, names[name]) for name in names})
                for x in layers
            ],
            final_norm=params.final_norm,
            head=params.lm_head,
            pages=list(zip(kv.k, kv.v, strict=True)),
            page_table=kv.page_table,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            **more,
        )

    def __post_init__(self) -> None:
        if self.has_own_tokens and self.head is None:
            raise ValueError("head=None: a head has logits of its own tokens")
        D = self.size
        P, C, K, H = self.pages[0][0].shape
        N, F = self._sizes()
        if self.head is None and not isinstance(self.embed, panels.Panels):
            raise ValueError("a table that is the head, too, is to be of panels")
        head_shape = self.num_logits, D
        calls.check_shapes(
            final_norm=(self.final_norm, (D,)), head=(self.head, head_shape)
        )
        calls.check_dtypes(self.embed, self.final_norm, self.head)
        for layer, (k, v) in zip(self.layers, self.pages, strict=True):
            calls.check_heads((N, K, H), layer.q_norm, layer.k_norm)
            fused = 2 * K * H if layer.kv is None else 0
            calls.check_shapes(
                input_norm=(layer.input_norm, (D,)),
                qkv=(layer.qkv, (N * H + fused, self.row_size)),
                kv=(layer.kv, (2 * K * H, D)),
                q_norm=(layer.q_norm, (H,)),
                k_norm=(layer.k_norm, (H,)),
                attention_out=(layer.attention_out, (D, N * H)),
                mlp_norm=(layer.mlp_norm, (D,)),
                gate_up=(layer.gate_up, (2 * F, D)),
                down=(layer.down, (D, F)),
                k_pages=(k, (P, C, K, H)),
                v_pages=(v, (P, C, K, H)),
            )
            calls.check_dtypes(*layer, k, v, self.final_norm)

    @property
    def size(self) -> int:
        """The width of a row between layers, `D`."""
        return self.embed.shape[1]

    @property
    def row_size(self) -> int:
        """The values that a layer reads of a row."""
        return self.size

    @property
    def num_logits(self) -> int:
        """The logits of a row."""
        own = self.head if self.has_own_tokens else None
        return (self.embed if own is None else own).shape[0]

    def _sizes(self) -> tuple[int, int]:
        """Returns query heads, and the width of the MLP."""
        first, H = self.layers[0], self.pages[0][0].shape[3]
        return first.attention_out.shape[1] // H, first.down.shape[1]

    def call(
        self,
        target: str,
        outputs: list,
        *own: jax.Array,
        angles: Angles,
        **attributes,
    ) -> tuple[list[jax.Array], Pages]:
        """Calls a kernel that takes `own`, the weights, and the pages.

        Args:
          angles: of the rows.

        Returns:
          The kernel's results, of the shapes `outputs`, and the pages.
        """
        none = jnp.zeros((0,), self.final_norm.dtype)  # as in `calls.project`

        def data_of(weight: calls.Weight | None) -> jax.Array:
            if weight is None:
                return none
            if len(weight.shape) == 1:
                return calls.data_of(weight)
            return calls.packed(weight, None).data

        cos, sin = (values.astype(jnp.float32) for values in angles)
        arguments = [*own, self.page_table, cos, sin, calls.data_of(self.embed)]
        arguments += [self.final_norm, data_of(self.head)]
        everything, aliases = list(outputs), {}
        for layer, pools in zip(self.layers, self.pages, strict=True):
            arguments += map(data_of, layer)
            for pool in pools:
                aliases[len(arguments)] = len(everything)
                arguments.append(pool)
                everything.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
        num_heads, mlp_size = self._sizes()
        found = calls.call(
            target,
            everything,
            *arguments,
            aliases=aliases,
            entries=np.int64(self.embed.shape[0]),
            own_entries=np.int64(self.num_logits),
            num_heads=np.int64(num_heads),
            mlp_size=np.int64(mlp_size),
            eps=np.float32(self.eps),
            scale=np.float32(self.scale),
            **attributes,
        )
        pools = found[len(outputs) :]
        return found[: len(outputs)], list(zip(pools[::2], pools[1::2], strict=True))

    def run(
        self,
        target: str,
        outputs: list,
        *own: jax.Array,
        rows: Any,
        angles: Angles,
        **attributes: Any,
    ) -> tuple[list[jax.Array], Pages]:
        """Calls a kernel that runs rows, as `call` does.

        Args:
          own: arrays that the kernel takes before the rows.
          rows: a `model.decoder.Rows`.

        Raises:
          ValueError: shapes that do not fit each other.
        """
        (R,), half = rows.tokens.shape, self.pages[0][0].shape[3] // 2
        table, (cos, sin) = self.page_table, angles
        calls.check_shapes(
            page_table=(table, (table.shape[0], table.shape[-1])),
            slots=(rows.slots, (R,)),
            positions=(rows.positions, (R,)),
            cos=(cos, (R, half)),
            sin=(sin, (R, half)),
            num_active=(rows.num_active, ()),
        )
        where = rows.tokens, rows.slots, rows.positions, rows.num_active
        branch = calls.branch_of(rows.branch, R)
        return self.call(
            target, outputs, *own, *where, branch, angles=angles, **attributes
        )


def step(
    rows: Any, model: Model, angles: Angles, *, taps: tuple[int, ...], with_logits: bool
) -> tuple[jax.Array, jax.Array, Pages]:
    """Runs the active rows through all layers in one call.

    The bits are those of the operations one by one.

    Args:
      rows: a `model.decoder.Rows`.
      taps: the layers before which the residual is a feature; their number is the
        output of the last one.
      with_logits: without them `[0, V]` is returned, and the head is not read.

    Returns:
      Logits `[R, V]` float32, whose padding rows are unspecified; features
      `[R, taps, D]`, whose padding rows are zeros; and the pages, updated in place.
    """
    (R,), (V, D) = rows.tokens.shape, model.embed.shape
    if not all(0 <= tap <= len(model.layers) for tap in taps):
        raise ValueError(f"{taps=} of {len(model.layers)} layers")
    outputs = [
        jax.ShapeDtypeStruct((R if with_logits else 0, V), jnp.float32),
        jax.ShapeDtypeStruct((R, len(taps), D), model.final_norm.dtype),
    ]
    (logits, features), pages = model.run(
        "spec_jax_step",
        outputs,
        rows=rows,
        angles=angles,
        taps=np.asarray(taps, np.int64),
    )
    return logits, features, pages


def chains(
    tokens: jax.Array,  # [S, W] int32
    model: Model,
    angles: Angles,  # [S * (W + most - 1), H / 2]
    *,
    starts: jax.Array,  # [S] int32
    pending: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    most: int,
    draws: draws_lib.Draws | None = None,
    target: str = "spec_jax_chains",
    own: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array | None, Pages]:
    """Continues texts in one call: as many steps as the longest of them takes.

    Args:
      tokens: the last tokens of each slot's text, whose K/V is not stored yet.
      angles: of the positions from `starts` on, slot after slot.
      starts: the position of each slot's first token.
      pending: how many of the tokens there are, at least one.
      counts: tokens to draft, `most` at most; 0: the slot sits out.
      draws: None: greedily.
      target: the kernel of the kind of model, and `own` its further arrays.

    Returns:
      Drafts `[S, most]` int32, 0 from `counts` on; of independent draws log weights
      `[S, most, N]` float32 that they were drawn from, unspecified from there on,
      otherwise None; and the pages, updated in place, in which all but the last draft
      of each slot are written.
    """
    S, W = tokens.shape
    shape = S * (W + most - 1), model.pages[0][0].shape[3] // 2
    calls.check_shapes(
        page_table=(model.page_table, (S, model.page_table.shape[1])),
        starts=(starts, (S,)),
        pending=(pending, (S,)),
        counts=(counts, (S,)),
        cos=(angles[0], shape),
        sin=(angles[1], shape),
    )
    # The kernel indexes by both.
    counts = jnp.where((pending > 0) & (pending <= W), jnp.minimum(counts, most), 0)
    how, attributes = draws_lib.arguments(draws, S)
    (drafts, log_weights), pages = model.call(
        target,
        draws_lib.chain_results(draws, (S, most, model.num_logits)),
        *(*own, tokens, starts, pending, counts, *how),
        angles=angles,
        **attributes,
    )
    return drafts, draws_lib.given(log_weights), pages
