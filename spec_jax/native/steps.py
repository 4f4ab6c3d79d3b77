"""Whole steps of a model as JAX functions, each one foreign call.

See `calls`, of whose functions they have the bits.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.native import calls, panels


class LayerWeights(typing.NamedTuple):
    """A layer of `step`, in the order of the kernel's arrays; matrices as panels.

    Both norms of heads, or neither.
    """

    input_norm: jax.Array  # [D]
    qkv: calls.Weight  # [(N + 2K) * H, D]
    q_norm: jax.Array | None  # [H]
    k_norm: jax.Array | None  # [H]
    attention_out: calls.Weight  # [D, N * H]
    mlp_norm: jax.Array  # [D]
    gate_up: calls.Weight  # [2F, D]
    down: calls.Weight  # [D, F]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What a step reads, but for its rows, and the pages that it updates.

    Raises:
      ValueError: shapes that do not fit each other.
      NotImplementedError: dtypes or sizes of heads that the kernels do not have.
    """

    embed: calls.Weight  # [V, D]
    layers: Sequence[LayerWeights]
    final_norm: jax.Array  # [D]
    head: calls.Weight | None  # [V, D]; None: `embed`, which is then of panels
    pages: Sequence[tuple[jax.Array, jax.Array]]  # keys and values [P, C, K, H]
    eps: float
    scale: float

    def __post_init__(self) -> None:
        D = self.embed.shape[1]
        P, C, K, H = self.pages[0][0].shape
        N, F = self._sizes()
        if H % 2 or H > calls.MAX_HEAD:
            raise NotImplementedError(
                f"head size {H} is odd, or above {calls.MAX_HEAD}"
            )
        if N < 1 or N % K:
            raise ValueError(f"{N} query heads for {K} key/value heads")
        if self.head is None and not isinstance(self.embed, panels.Panels):
            raise ValueError("a table that is the head, too, is to be of panels")
        calls.check_shapes(final_norm=(self.final_norm, (D,)))
        calls.check_dtypes(self.embed, self.final_norm)
        if self.head is not None:
            calls.check_shapes(head=(self.head, (self.num_logits, D)))
            calls.check_dtypes(self.head, self.final_norm)
        for layer, (k, v) in zip(self.layers, self.pages, strict=True):
            if layer.q_norm is not None and layer.k_norm is not None:
                calls.check_shapes(
                    q_norm=(layer.q_norm, (H,)), k_norm=(layer.k_norm, (H,))
                )
            calls.check_shapes(
                input_norm=(layer.input_norm, (D,)),
                qkv=(layer.qkv, ((N + 2 * K) * H, self.row_size)),
                attention_out=(layer.attention_out, (D, N * H)),
                mlp_norm=(layer.mlp_norm, (D,)),
                gate_up=(layer.gate_up, (2 * F, D)),
                down=(layer.down, (D, F)),
                k_pages=(k, (P, C, K, H)),
                v_pages=(v, (P, C, K, H)),
            )
            present = (weight for weight in layer if weight is not None)
            calls.check_dtypes(*present, k, v, self.final_norm)

    @property
    def row_size(self) -> int:
        """The values that a layer reads of a row."""
        return self.embed.shape[1]

    @property
    def num_logits(self) -> int:
        """The logits of a row."""
        return self.embed.shape[0]

    def _sizes(self) -> tuple[int, int]:
        """Query heads, and the width of the MLP."""
        first, H = self.layers[0], self.pages[0][0].shape[3]
        return first.attention_out.shape[1] // H, first.down.shape[1]

    def call(
        self,
        target: str,
        outputs: list,
        *rows: jax.Array,
        at: tuple[jax.Array, jax.Array, jax.Array],
        isa: str | None,
        **attributes,
    ) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
        """Calls a kernel that takes `rows`, the weights, and the pages.

        Args:
          at: the page table, and cosines and sines of the rows.

        Returns:
          What it gives, as `outputs` says, and the pages.
        """
        none = jnp.zeros((0,), self.final_norm.dtype)  # as in `calls.project`

        def data_of(weight: calls.Weight | None) -> jax.Array:
            if weight is None:
                return none
            if len(weight.shape) == 1:
                return calls.data_of(weight)
            return calls.packed(weight, isa).data

        page_table, cos, sin = at
        arguments = [*rows, page_table, cos.astype(jnp.float32)]
        arguments += [sin.astype(jnp.float32), calls.data_of(self.embed)]
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
            isa=isa,
            aliases=aliases,
            entries=np.int64(self.embed.shape[0]),
            num_heads=np.int64(num_heads),
            mlp_size=np.int64(mlp_size),
            eps=np.float32(self.eps),
            scale=np.float32(self.scale),
            **attributes,
        )
        pools = found[len(outputs) :]
        return found[: len(outputs)], list(zip(pools[::2], pools[1::2], strict=True))


def step(
    tokens: jax.Array,  # [R] int32
    model: Model,
    cos: jax.Array,  # [R, H / 2]
    sin: jax.Array,  # [R, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    num_active: jax.Array,  # [] int32
    branch: jax.Array | None = None,  # [R, A] int32
    taps: tuple[int, ...],
    with_logits: bool,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """A whole step in one call: the same bits as the operations one by one.

    Args:
      taps: the layers before which the residual is a feature; their number is the
        output of the last one.
      with_logits: without them `[0, V]` is returned, and the head is not read.

    Returns:
      Logits `[R, V]` float32, features `[R, taps, D]`, and the pages, which are
      updated in place.
    """
    (R,), (V, D) = tokens.shape, model.embed.shape
    half = model.pages[0][0].shape[3] // 2
    if not all(0 <= tap <= len(model.layers) for tap in taps):
        raise ValueError(f"{taps=} of {len(model.layers)} layers")
    calls.check_shapes(
        slots=(slots, (R,)),
        positions=(positions, (R,)),
        cos=(cos, (R, half)),
        sin=(sin, (R, half)),
        num_active=(num_active, ()),
    )
    outputs = [
        jax.ShapeDtypeStruct((R if with_logits else 0, V), jnp.float32),
        jax.ShapeDtypeStruct((R, len(taps), D), model.final_norm.dtype),
    ]
    rows = tokens, slots, positions, num_active, calls.branch_of(branch, R)
    (logits, features), pages = model.call(
        "spec_jax_step",
        outputs,
        *rows,
        at=(page_table, cos, sin),
        isa=isa,
        taps=np.asarray(taps, np.int64),
    )
    return logits, features, pages


def chains(
    tokens: jax.Array,  # [S, W] int32
    model: Model,
    cos: jax.Array,  # [S, W + most - 1, H / 2]
    sin: jax.Array,  # [S, W + most - 1, H / 2]
    *,
    page_table: jax.Array,  # [S, M] int32
    starts: jax.Array,  # [S] int32
    pending: jax.Array,  # [S] int32
    counts: jax.Array,  # [S] int32
    most: int,
    target: str = "spec_jax_chains",
    own: tuple[jax.Array, ...] = (),
    isa: str | None = None,
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Continues texts greedily, in one call; see `ops.step.chains`.

    Args:
      target: the kernel of the kind of model, and `own` what it takes more of the rows.

    Returns:
      Drafts `[S, most]` int32, 0 from `counts` on, and the pages, which are updated
      in place.
    """
    S, W = tokens.shape
    shape = S, W + most - 1, model.pages[0][0].shape[3] // 2
    calls.check_shapes(
        page_table=(page_table, (S, page_table.shape[1])),
        starts=(starts, (S,)),
        pending=(pending, (S,)),
        counts=(counts, (S,)),
        cos=(cos, shape),
        sin=(sin, shape),
    )
    # The kernel indexes by both.
    counts = jnp.where((pending > 0) & (pending <= W), jnp.minimum(counts, most), 0)
    (drafts,), pages = model.call(
        target,
        [jax.ShapeDtypeStruct((S, most), jnp.int32)],
        *(tokens, starts, pending, counts, *own),
        at=(page_table, cos, sin),
        isa=isa,
    )
    return drafts, pages
