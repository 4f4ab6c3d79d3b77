"""Whole steps of a model as JAX functions, each one foreign call.

Their bits are those of the functions of `calls`, one by one.
"""

import dataclasses
import itertools
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
    """A layer; matrices as panels.

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
        if self.head is None and not isinstance(self.embed, panels.Panels):
            raise ValueError("a table that is the head, too, is to be of panels")

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

    def _arrays(
        self, layer: LayerWeights, pools: tuple[jax.Array, jax.Array]
    ) -> list[jax.Array]:
        """Returns a layer's weights as the kernels take them."""
        (N, F), D, (P, C, K, H) = self._sizes(), self.size, self.pages[0][0].shape
        calls.check_heads((N, K, H), layer.q_norm, layer.k_norm)
        calls.check_dtypes(*layer, *pools, self.final_norm)
        k_pages, v_pages = ((pool, (P, C, K, H)) for pool in pools)
        calls.check_shapes(k_pages=k_pages, v_pages=v_pages)
        fused = 2 * K * H if layer.kv is None else 0
        return calls.arrays(
            {
                "input_norm": (layer.input_norm, (D,)),
                "qkv": (calls.matrix(layer.qkv), (N * H + fused, self.row_size)),
                "q_norm": (layer.q_norm, (H,)),
                "k_norm": (layer.k_norm, (H,)),
                "attention_out": (calls.matrix(layer.attention_out), (D, N * H)),
                "mlp_norm": (layer.mlp_norm, (D,)),
                "gate_up": (calls.matrix(layer.gate_up), (2 * F, D)),
                "down": (calls.matrix(layer.down), (D, F)),
                "kv": (calls.matrix(layer.kv), (2 * K * H, D)),
            }
        )

    def call(
        self,
        target: str,
        outputs: list,
        given: dict[str, Any],
        *,
        angles: Angles,
        num_rows: int,
        **attributes,
    ) -> tuple[tuple[jax.Array, ...], Pages]:
        """Calls a kernel that takes `given`, the weights, and the pages.

        Args:
          angles: of `num_rows` rows.

        Returns:
          The kernel's results, as `calls.call` takes `outputs`, and the pages.
        """
        calls.check_dtypes(self.embed, self.final_norm, self.head)
        turn = num_rows, self.pages[0][0].shape[3] // 2
        cos, sin = ((values.astype(jnp.float32), turn) for values in angles)
        head = calls.matrix(self.head), (self.num_logits, self.size)
        given |= {"page_table": (self.page_table, (None, None)), "cos": cos, "sin": sin}
        given |= {"embed": self.embed, "final_norm": (self.final_norm, (self.size,))}
        layers = map(self._arrays, self.layers, self.pages)
        num_heads, mlp_size = self._sizes()
        found = calls.call(
            target,
            outputs,
            given | {"head": head},
            *itertools.chain(*layers),
            updated=[*itertools.chain(*self.pages)],
            entries=self.embed.shape[0],
            own_entries=self.num_logits,
            num_heads=num_heads,
            mlp_size=mlp_size,
            eps=self.eps,
            scale=self.scale,
            **attributes,
        )
        pools = found[len(outputs) :]
        return found[: len(outputs)], list(zip(pools[::2], pools[1::2], strict=True))

    def run(
        self,
        target: str,
        outputs: list,
        given: dict[str, Any],
        *,
        rows: Any,
        **how: Any,
    ) -> tuple[tuple[jax.Array, ...], Pages]:
        """Calls a kernel that runs rows, a `model.decoder.Rows`, as `call` does."""
        (R,) = rows.tokens.shape
        given |= {
            "tokens": rows.tokens,
            "slots": (rows.slots, (R,)),
            "positions": (rows.positions, (R,)),
            "num_active": (rows.num_active, ()),
            "branch": (rows.branch, (R, None), jnp.int32),
        }
        return self.call(target, outputs, given, num_rows=R, **how)


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
        ((R if with_logits else 0, V), jnp.float32),
        ((R, len(taps), D), model.final_norm.dtype),
    ]
    how = {"rows": rows, "angles": angles, "taps": np.asarray(taps, np.int64)}
    (logits, features), pages = model.run("step", outputs, {}, **how)
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
    target: str = "chains",
    own: dict[str, Any] | None = None,
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
    calls.check_shapes(page_table=(model.page_table, (S, None)))
    # The kernel indexes by both.
    counts = jnp.where((pending > 0) & (pending <= W), jnp.minimum(counts, most), 0)
    texts = {
        "tokens": tokens,
        "starts": (starts, (S,)),
        "pending": (pending, (S,)),
        "counts": (counts, (S,)),
    }
    how, attributes = draws_lib.arguments(draws, S)
    (drafts, log_weights), pages = model.call(
        target,
        draws_lib.chain_results(draws, (S, most, model.num_logits)),
        {**(own or {}), **texts, **how},
        angles=angles,
        num_rows=S * (W + most - 1),
        **attributes,
    )
    return drafts, draws_lib.given(log_weights), pages
