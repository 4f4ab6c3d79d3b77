"""Whole steps of a model as JAX functions, each one foreign call.

Their bits are those of the functions of `calls`, one by one.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls, draws as draws_lib, panels


Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines `[R, H / 2]` of rows."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A step's weights, and the cache whose pages it updates.

    Attributes:
      params: a `model.params.Params`, or what else has an embedding, layers, a final
        norm and a head; matrices as panels, and so the embedding where it is the head.
      config: the sizes of its layers.
      kv: a `paging.cache.PagedKV`.

    Raises:
      ValueError: no head where a model has its own, or no panels where they must be.
    """

    params: Any
    config: Any
    kv: Any
    queries: ClassVar[str] = "qkv"
    """The parameter of a layer that makes queries; `kv` makes keys and values if there
    is one, or else this, too."""
    has_own_tokens: ClassVar[bool] = False
    """Whether a head has tokens of its own, of which it has a row each."""

    def __post_init__(self) -> None:
        if self.params.lm_head is not None:
            return
        if self.has_own_tokens:
            raise ValueError("lm_head=None: a head has logits of its own tokens")
        if not isinstance(self.params.embed, panels.Panels):
            raise ValueError("a table that is the head, too, is to be of panels")

    @property
    def layers(self) -> Sequence[Any]:
        """The weights of the layers."""
        return self.params.layers

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of rows between layers."""
        return self.params.final_norm.dtype

    @property
    def size(self) -> int:
        """The width of a row between layers, `D`."""
        return self.params.embed.shape[1]

    @property
    def row_size(self) -> int:
        """The values that a layer reads of a row."""
        return self.size

    @property
    def num_logits(self) -> int:
        """The logits of a row."""
        params = self.params
        return (params.lm_head if self.has_own_tokens else params.embed).shape[0]

    def _sizes(self) -> tuple[int, int]:
        """Returns query heads, and the width of the MLP."""
        first, H = self.layers[0], self.kv.k[0].shape[3]
        return first.attention_out.shape[1] // H, first.down.shape[1]

    def _arrays(self, layer: Any, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """Returns a layer's weights as the kernels take them."""
        (N, F), D, (P, C, K, H) = self._sizes(), self.size, self.kv.k[0].shape
        calls.check_heads((N, K, H), layer.q_norm, layer.k_norm)
        calls.check_shapes(k_pages=(k, (P, C, K, H)), v_pages=(v, (P, C, K, H)))
        queries, kv = getattr(layer, self.queries), getattr(layer, "kv", None)
        fused = 2 * K * H if kv is None else 0
        given = {
            "input_norm": (layer.input_norm, (D,)),
            "qkv": (queries, (N * H + fused, self.row_size)),
            "q_norm": (layer.q_norm, (H,)),
            "k_norm": (layer.k_norm, (H,)),
            "attention_out": (layer.attention_out, (D, N * H)),
            "mlp_norm": (layer.mlp_norm, (D,)),
            "gate_up": (layer.gate_up, (2 * F, D)),
            "down": (layer.down, (D, F)),
            "kv": (kv, (2 * K * H, D)),
        }
        weights = [x for x, _ in given.values()]
        calls.check_dtypes(k, v, self.params.final_norm, *weights)
        for name, (x, shape) in given.items():
            if len(shape) == 2:
                given[name] = calls.matrix(x), shape
        return calls.arrays(given)

    def call(
        self,
        target: str,
        outputs: list,
        given: dict[str, Any],
        *,
        angles: Angles,
        num_rows: int,
        **attributes,
    ) -> tuple[Any, ...]:
        """Calls a kernel that takes `given`, the weights, and the pages.

        Args:
          angles: of `num_rows` rows.

        Returns:
          The cache, and the kernel's results, as `calls.call` takes `outputs`.

        Raises:
          ValueError: shapes that do not fit each other.
          NotImplementedError: dtypes or sizes of heads that the kernels do not have.
        """
        params, kv, config = self.params, self.kv, self.config
        calls.check_dtypes(params.embed, params.final_norm, params.lm_head)
        turn = num_rows, kv.k[0].shape[3] // 2
        cos, sin = ((values.astype(jnp.float32), turn) for values in angles)
        given |= {"page_table": (kv.page_table, (None, None)), "cos": cos, "sin": sin}
        given |= {
            "embed": params.embed,
            "final_norm": (params.final_norm, (self.size,)),
            "head": (calls.matrix(params.lm_head), (self.num_logits, self.size)),
        }
        layers = zip(self.layers, kv.k, kv.v, strict=True)
        num_heads, mlp_size = self._sizes()
        found = calls.call(
            target,
            outputs,
            given,
            *itertools.chain(*itertools.starmap(self._arrays, layers)),
            updated=[*kv.k, *kv.v],
            entries=params.embed.shape[0],
            own_entries=self.num_logits,
            num_heads=num_heads,
            mlp_size=mlp_size,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            **attributes,
        )
        results, pools = found[: len(outputs)], found[len(outputs) :]
        half = len(pools) // 2
        return kv.replace(k=pools[:half], v=pools[half:]), *results

    def run(
        self,
        target: str,
        outputs: list,
        given: dict[str, Any],
        *,
        rows: Any,
        **how: Any,
    ) -> tuple[Any, ...]:
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
) -> tuple[Any, jax.Array, jax.Array]:
    """Runs the active rows through all layers in one call.

    The bits are those of the operations one by one.

    Args:
      rows: a `model.decoder.Rows`.
      taps: the layers before which the residual is a feature; their number is the
        output of the last one.
      with_logits: without them `[0, V]` is returned, and the head is not read.

    Returns:
      The cache, its pages updated in place; logits `[R, V]` float32, whose padding rows
      are unspecified; and features `[R, taps, D]`, whose padding rows are zeros.
    """
    (R,) = rows.tokens.shape
    if not all(0 <= tap <= len(model.layers) for tap in taps):
        raise ValueError(f"{taps=} of {len(model.layers)} layers")
    outputs = [
        ((R if with_logits else 0, model.num_logits), jnp.float32),
        ((R, len(taps), model.size), model.dtype),
    ]
    how = {"rows": rows, "angles": angles, "taps": np.asarray(taps, np.int64)}
    return model.run("step", outputs, {}, **how)


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
) -> tuple[Any, jax.Array, jax.Array | None]:
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
      The cache, in whose pages all but the last draft of each slot are written; drafts
      `[S, most]` int32, 0 from `counts` on; and of independent draws log weights
      `[S, most, N]` float32 that they were drawn from, unspecified from there on,
      otherwise None.
    """
    S, W = tokens.shape
    calls.check_shapes(page_table=(model.kv.page_table, (S, None)))
    # The kernel indexes by both.
    counts = jnp.where((pending > 0) & (pending <= W), jnp.minimum(counts, most), 0)
    texts = {
        "tokens": tokens,
        "starts": (starts, (S,)),
        "pending": (pending, (S,)),
        "counts": (counts, (S,)),
    }
    how, attributes = draws_lib.arguments(draws, S)
    kv, drafts, log_weights = model.call(
        target,
        draws_lib.chain_results(draws, (S, most, model.num_logits)),
        {**(own or {}), **texts, **how},
        angles=angles,
        num_rows=S * (W + most - 1),
        **attributes,
    )
    return kv, drafts, draws_lib.given(log_weights)
