"""What a block drafter does in a round as JAX functions, three foreign calls.

See `steps`, and `model.block_draft` for what a drafter computes.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls


class LayerWeights(typing.NamedTuple):
    """A layer, in the order of the kernels' arrays; matrices as panels."""

    input_norm: jax.Array  # [D]
    q: calls.Weight  # [N * H, D]
    kv: calls.Weight  # [2K * H, D]
    q_norm: jax.Array  # [H]
    k_norm: jax.Array  # [H]
    attention_out: calls.Weight  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: calls.Weight  # [2F, D]
    down: calls.Weight  # [D, F]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockModel:
    """The layers of a drafter, and the pages that they update.

    Raises:
      ValueError: shapes that do not fit each other.
      NotImplementedError: dtypes or sizes of heads that the kernels do not have.
    """

    layers: Sequence[LayerWeights]
    pages: Sequence[tuple[jax.Array, jax.Array]]  # keys and values [P, C, K, H]
    eps: float
    scale: float

    def __post_init__(self) -> None:
        (P, C, K, H), D = self.pages[0][0].shape, self.size
        N, F = self._sizes()
        if H % 2 or H > calls.MAX_HEAD:
            raise NotImplementedError(
                f"head size {H} is odd, or above {calls.MAX_HEAD}"
            )
        if N < 1 or N % K:
            raise ValueError(f"{N} query heads for {K} key/value heads")
        for layer, (k, v) in zip(self.layers, self.pages, strict=True):
            calls.check_shapes(
                input_norm=(layer.input_norm, (D,)),
                q=(layer.q, (N * H, D)),
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
            calls.check_dtypes(*layer, k, v)

    @property
    def size(self) -> int:
        """The width of a row, `D`."""
        return self.layers[0].q.shape[1]

    def _sizes(self) -> tuple[int, int]:
        """Query heads, and the width of the MLP."""
        first, H = self.layers[0], self.pages[0][0].shape[3]
        return first.q.shape[0] // H, first.down.shape[1]

    def call(
        self,
        target: str,
        outputs: list,
        *own: jax.Array,
        slots: jax.Array,
        positions: jax.Array,
        at: tuple[jax.Array, jax.Array, jax.Array],
        isa: str | None,
        **attributes,
    ) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
        """Calls a kernel that takes `own`, the weights, and the pages.

        Args:
          slots, positions: of the rows, `[R]`.
          at: the page table, and cosines and sines of the rows.

        Returns:
          What it gives, as `outputs` says, and the pages.
        """
        page_table, cos, sin = at
        shape = *slots.shape, self.pages[0][0].shape[3] // 2
        calls.check_shapes(
            positions=(positions, slots.shape), cos=(cos, shape), sin=(sin, shape)
        )
        angles = (x.astype(jnp.float32) for x in (cos, sin))
        arguments = [*own, page_table, *angles]
        everything, aliases = list(outputs), {}
        for layer, pools in zip(self.layers, self.pages, strict=True):
            arguments += (
                weight if len(weight.shape) == 1 else calls.packed(weight, isa).data
                for weight in layer
            )
            for pool in pools:
                aliases[len(arguments)] = len(everything)
                arguments.append(pool)
                everything.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
        num_heads, mlp_size = self._sizes()
        found = calls.call(
            target,
            everything,
            *arguments,
            isa=isa,
            aliases=aliases,
            width=np.int64(self.size),
            num_heads=np.int64(num_heads),
            mlp_size=np.int64(mlp_size),
            eps=np.float32(self.eps),
            scale=np.float32(self.scale),
            **attributes,
        )
        pools = found[len(outputs) :]
        return found[: len(outputs)], list(zip(pools[::2], pools[1::2], strict=True))


def append_context(
    features: jax.Array,  # [R, taps * D]
    model: BlockModel,
    *,
    fc: calls.Weight,  # [D, taps * D]
    hidden_norm: jax.Array,  # [D]
    at: tuple[jax.Array, jax.Array, jax.Array],
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> list[tuple[jax.Array, jax.Array]]:
    """Writes the keys and values of context in one call; see `ops.step.append_context`.

    Returns:
      The pages, which are updated in place.
    """
    D = model.size
    calls.check_shapes(
        slots=(slots, features.shape[:1]),
        num_active=(num_active, ()),
        fc=(fc, (D, features.shape[1])),
        hidden_norm=(hidden_norm, (D,)),
    )
    calls.check_dtypes(features, fc, hidden_norm, model.layers[0].q)
    _, pages = model.call(
        "spec_jax_append_context",
        [],
        *(features, slots, positions, num_active),
        *(calls.packed(fc, isa).data, hidden_norm),
        slots=slots,
        positions=positions,
        at=at,
        isa=isa,
    )
    return pages


def blocks(
    tokens: jax.Array,  # [R] int32
    model: BlockModel,
    *,
    block_size: int,
    embed: calls.Weight,  # [V, D]
    final_norm: jax.Array,  # [D]
    head: calls.Weight,  # [Vd, D]
    at: tuple[jax.Array, jax.Array, jax.Array],
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Runs whole blocks in one call; see `ops.step.blocks`.

    Returns:
      Hidden states `[R, D]`, logits `[R, Vd]` float32, and the pages, which are updated
      in place.
    """
    (R,), D = tokens.shape, model.size
    calls.check_shapes(
        slots=(slots, (R,)),
        num_active=(num_active, ()),
        embed=(embed, (embed.shape[0], D)),
        final_norm=(final_norm, (D,)),
        head=(head, (head.shape[0], D)),
    )
    calls.check_dtypes(embed, final_norm, head, model.layers[0].q)
    if R % block_size:
        raise ValueError(f"{R} rows are no whole blocks of {block_size}")
    (hidden, logits), pages = model.call(
        "spec_jax_blocks",
        [
            jax.ShapeDtypeStruct((R, D), final_norm.dtype),
            jax.ShapeDtypeStruct((R, head.shape[0]), jnp.float32),
        ],
        *(tokens, slots, positions, num_active, calls.data_of(embed), final_norm),
        calls.packed(head, isa).data,
        slots=slots,
        positions=positions,
        at=at,
        isa=isa,
        block_size=np.int64(block_size),
        entries=np.int64(embed.shape[0]),
    )
    return hidden, logits, pages


def slots_greedily(
    logits: jax.Array,  # [S, most, Vd] float32
    anchors: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    *,
    names: jax.Array | None,  # [Vd] int32
    embed: jax.Array | None,  # [V, r]
    out: calls.Weight | None,  # [Vd, r]
    isa: str | None = None,
) -> jax.Array:
    """Goes over the slots of blocks in one call; see `ops.step.slots_greedily`.

    Returns:
      Tokens `[S, most]` int32, 0 from `counts` on.
    """
    S, most, Vd = logits.shape
    calls.check_shapes(anchors=(anchors, (S,)), counts=(counts, (S,)))
    if names is None:
        names = jnp.zeros((0,), jnp.int32)
    else:
        calls.check_shapes(names=(names, (Vd,)))
    if embed is None or out is None:
        table = data = jnp.zeros((0, 0), jnp.float32)
        entries = rank = 0
    else:
        entries, rank = embed.shape
        calls.check_shapes(out=(out, (Vd, rank)))
        calls.check_dtypes(embed, out)
        table, data = calls.data_of(embed), calls.packed(out, isa).data
    return calls.call(
        "spec_jax_slots",
        jax.ShapeDtypeStruct((S, most), jnp.int32),
        *(logits, anchors, jnp.minimum(counts, most), names, table, data),
        isa=isa,
        entries=np.int64(entries),
        rank=np.int64(rank),
    )
