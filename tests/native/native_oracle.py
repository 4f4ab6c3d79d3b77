"""The kernels' results in float64 NumPy, written from the docstrings of the ops.

Values are rounded to the model's dtype where the ops say so, and nowhere else. For a
product there is also `SumOrder`: the order of operations of each instruction set.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from spec_jax.native import blocks


def rounded(x, dtype) -> np.ndarray:
    return np.asarray(x, np.float64).astype(jnp.dtype(dtype)).astype(np.float64)


def wide(*arrays) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(array).astype(np.float64) for array in arrays)


def normal(rng, shape, dtype, scale=1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))


def assert_rounded_alike(actual, expected) -> None:
    """Asserts that few elements differ at all: only some at the edge of a rounding. A
    rounding too many or too few moves a third of them. It suits bfloat16 and norms near
    one: float32 sums differ from float64 ones in most elements."""
    actual, expected = wide(actual, expected)
    differing = np.mean(actual != expected)
    assert differing < 0.06, f"{differing:.0%} of {actual.size} elements differ"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumOrder:
    """The operations by which an instruction set sums a product, bit for bit.

    Each sum is one float32, to which products are added in the order of `k`.

    Attributes:
      fused: whether a product is added with one rounding, not two.
      has_pairs: whether bfloat16 uses VDPBF16PS: element `2i + 1` is added before
        `2i`, and every denormal operand or result becomes zero.
      has_tiles: whether bfloat16 uses TDPBF16PS: each 32 products are summed from zero,
        the even and the odd ones apart, and denormals become zero likewise.
    """

    fused: bool = True
    has_pairs: bool = False
    has_tiles: bool = False

    def project(self, x, w) -> np.ndarray:
        """Returns `x @ w.T` in float32, for `x` and `w` of one dtype."""
        is_narrow = x.dtype != np.float32
        by_tiles, by_pairs = is_narrow and self.has_tiles, is_narrow and self.has_pairs
        flush = flush_denormals if by_tiles or by_pairs else lambda value: value
        x, w = (flush(np.asarray(a, np.float32)) for a in (x, w))
        if by_tiles:
            x, w = (np.pad(a, ((0, 0), (0, -a.shape[1] % 32))) for a in (x, w))
        order = np.arange(x.shape[1])
        if by_pairs:  # The zero past an odd end adds nothing.
            order = np.sort(order ^ 1) ^ 1
        sums = np.zeros((x.shape[0], w.shape[0]), np.float32)
        add = lambda sums, k: flush(self._add(x[:, None, k], w[None, :, k], sums))
        if not by_tiles:
            return functools.reduce(add, order, sums)
        zeros = np.zeros_like(sums)
        for tile in order.reshape(-1, 32):
            even, odd = (functools.reduce(add, tile[n::2], zeros) for n in (0, 1))
            sums = flush(sums + flush(even + odd))
        return sums

    def project_bytes(self, x, w, *, order=None, neighbour=0) -> np.ndarray:
        """Returns `project` for `blocks.Blocks`, with rows rounded as `blocks` says.

        Args:
          order: in which blocks are added; None: first to last.
          neighbour: blocks by which scales and minima are shifted; a fault unless 0.
        """
        values, row_scales = round_rows(x)
        integers = np.asarray(blocks.integers(w), np.float32)
        scales = np.roll(np.asarray(w.scales, np.float32), neighbour, axis=1)
        minima = w.minima
        if minima is not None:
            minima = np.roll(np.asarray(minima, np.float32), neighbour, axis=1)
        sums = np.zeros((len(x), len(integers)), np.float32)
        for b in range(integers.shape[1]) if order is None else order:
            whole = values[:, b] @ integers[:, b].T  # Exact, in any order.
            scale = row_scales[:, b, None] * scales[None, :, b]
            sums = self._add(whole, scale, sums)
            if minima is not None:
                total = row_scales[:, b] * values[:, b].sum(axis=-1)
                sums = self._add(total[:, None], minima[None, :, b], sums)
        return sums

    def _add(self, a, b, sums) -> np.ndarray:
        if not self.fused:
            return a * b + sums
        # All is exact in float64 but the last sum, which is rounded to odd: when that
        # is rounded to float32, the result has one rounding.
        product, sums = np.multiply(a, b, dtype=np.float64), sums.astype(np.float64)
        total = product + sums
        back = total - product
        error = (product - (total - back)) + (sums - back)
        even = total.view(np.int64) % 2 == 0
        toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where((error != 0) & even, toward, total).astype(np.float32)


SUM_ORDERS = {
    "amx": SumOrder(has_tiles=True),
    "avx512bf16": SumOrder(has_pairs=True),
    "avx512": SumOrder(),
    "avx2": SumOrder(),
    "portable": SumOrder(fused=False),
}


def order_of(isa: str) -> SumOrder:
    """Returns the order of an instruction set, of its emulation or a variant of it."""
    return SUM_ORDERS[isa.removeprefix("emulated_").split("_")[0]]


def flush_denormals(x) -> np.ndarray:
    """Returns `x` with zeros of the same sign for denormals."""
    return np.where(
        np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x
    )


def rms_norm(x, weight, eps, dtype):
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return rounded(rounded(x / np.sqrt(mean_square + eps), dtype) * weight, dtype)


def round_rows(x) -> tuple[np.ndarray, np.ndarray]:
    """Rounds rows to integers and scales, both float32: `[R, B, 32]` and `[R, B]`."""
    x = np.asarray(x).astype(np.float32)
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    most = np.abs(x).max(axis=2, initial=0)
    inverse = np.divide(127, most, where=most > 0, out=np.zeros_like(most))
    return np.rint(x * inverse[:, :, None]), most / np.float32(127)


def project_bytes(x, w) -> np.ndarray:
    """Returns `x @ w.T` of rounded rows and `blocks.Blocks`, in float64."""
    values, row_scales = wide(*round_rows(x))
    integers, scales = wide(blocks.integers(w), w.scales)
    integers = integers * scales[..., None]
    if w.minima is not None:
        integers += wide(w.minima)[0][..., None]
    return np.einsum("rbi,rb,nbi->rn", values, row_scales, integers)


def project(x, w, *, norm=None, residual=None, eps=0.0, out_dtype=None):
    dtype, (x,) = x.dtype, wide(x)
    if norm is not None:
        x = rms_norm(x, *wide(norm), eps, dtype)
    is_bytes = isinstance(w, blocks.Blocks)
    y = project_bytes(x, w) if is_bytes else x @ wide(w)[0].T
    y = rounded(y, out_dtype or dtype)
    return y if residual is None else rounded(y + wide(residual)[0], dtype)


def gate(x, w, *, norm, eps):
    gates, up = np.split(project(x, w, norm=norm, eps=eps), 2, axis=-1)
    silu = rounded(gates / (1 + np.exp(-gates)), x.dtype)
    return rounded(silu * up, x.dtype)


def rotate(x, cos, sin, dtype):
    first, second = np.split(x, 2, axis=-1)
    turned = (
        rounded(first * cos, dtype) - rounded(second * sin, dtype),
        rounded(second * cos, dtype) + rounded(first * sin, dtype),
    )
    return rounded(np.concatenate(turned, axis=-1), dtype)


@dataclasses.dataclass
class Slab:
    """The arguments of `calls.attend`: rows, and pages that are NaN outside prefixes.

    Slots own permuted pages; `prefix[s]` positions of slot `s` are written.
    """

    heads: np.ndarray  # [R, (N + 2K) * H]
    q_norm: np.ndarray | None  # [H]
    k_norm: np.ndarray | None  # [H]
    k_pages: np.ndarray  # [P, C, K, H]
    v_pages: np.ndarray  # [P, C, K, H]
    cos: np.ndarray  # [R, H / 2]
    sin: np.ndarray  # [R, H / 2]
    page_table: np.ndarray  # [S, M] int32
    slots: np.ndarray  # [R] int32
    positions: np.ndarray  # [R] int32

    @property
    def num_rows(self) -> int:
        return self.heads.shape[0]

    def arguments(self, num_active: int | None = None) -> dict:
        live = self.num_rows if num_active is None else num_active
        return dataclasses.asdict(self) | {"num_active": np.int32(live)}

    def rows(self, which) -> "Slab":
        """Returns the slab of these rows, in order; -1 gives a row of NaN and 2**30."""
        which = np.asarray(which)
        per_row = {}
        for name in ("heads", "cos", "sin", "slots", "positions"):
            array = getattr(self, name)[which].copy()
            array[which < 0] = np.nan if array.dtype.kind != "i" else 2**30
            per_row[name] = array
        return dataclasses.replace(self, **per_row)

    def locate(self, slot: int, position: int) -> tuple[int, int]:
        page_size = self.k_pages.shape[1]
        return self.page_table[slot, position // page_size], position % page_size


def make_slab(
    rng, rows, *, dtype, N, K, H, page_size, prefix, table_width=None, spare=2
) -> Slab:
    """Makes random data for `rows`, a list of `(slot, position)`."""
    num_slots, R = len(prefix), len(rows)
    slots, positions = np.asarray(rows, np.int32).T
    most = max(*prefix, positions.max() + 1)
    owned = -(-most // page_size)
    width = table_width or owned
    num_pages = num_slots * owned + spare
    order = rng.permutation(num_pages).astype(np.int32)
    page_table = np.full((num_slots, width), num_pages, np.int32)
    page_table[:, :owned] = order[: num_slots * owned].reshape(num_slots, owned)
    pools = []
    for _ in range(2):
        pool = np.full((num_pages, page_size, K, H), np.nan, jnp.dtype(dtype))
        for slot, length in enumerate(prefix):
            at = np.arange(length)
            pages = page_table[slot, at // page_size]
            pool[pages, at % page_size] = normal(rng, (length, K, H), dtype)
        pools.append(pool)
    turns, one = rng.uniform(0, 6.28, (R, H // 2)), np.ones((), jnp.dtype(dtype))
    return Slab(
        heads=normal(rng, (R, (N + 2 * K) * H), dtype),
        q_norm=normal(rng, H, dtype, 0.2) + one,
        k_norm=normal(rng, H, dtype, 0.2) + one, k_pages=pools[0], v_pages=pools[1],
        cos=np.cos(turns).astype(one.dtype), sin=np.sin(turns).astype(one.dtype),
        page_table=page_table, slots=slots, positions=positions,
    )  # fmt: skip


def attend(slab: Slab, *, eps, scale, window=2**30):
    """Returns attended heads `[R, N * H]` and both pools; rows are active and mapped. A
    row sees the last `window` keys, its own included."""
    dtype = slab.heads.dtype
    R, (_, _, K, H) = slab.num_rows, slab.k_pages.shape
    heads = wide(slab.heads)[0].reshape(R, -1, H)
    N = heads.shape[1] - 2 * K
    q, k, v = np.split(heads, (N, N + K), axis=1)
    cos, sin = (x[:, None] for x in wide(slab.cos, slab.sin))
    if slab.q_norm is not None:
        q_norm, k_norm = wide(slab.q_norm, slab.k_norm)
        q, k = rms_norm(q, q_norm, eps, dtype), rms_norm(k, k_norm, eps, dtype)
    q, k = rotate(q, cos, sin, dtype), rotate(k, cos, sin, dtype)
    k_pages, v_pages = (x.copy() for x in wide(slab.k_pages, slab.v_pages))
    for r in range(R):
        at = slab.locate(slab.slots[r], slab.positions[r])
        k_pages[at], v_pages[at] = k[r], v[r]
    out = np.empty((R, N, H))
    for r in range(R):
        seen = np.arange(slab.positions[r] + 1)[-window:]
        at = slab.locate(slab.slots[r], seen)
        for n in range(N):
            keys, values = (x[at][:, n // (N // K)] for x in (k_pages, v_pages))
            out[r, n] = softmax(scale * keys @ q[r, n]) @ values
    return rounded(out, dtype).reshape(R, N * H), k_pages, v_pages


def softmax(scores):
    shift = np.max(scores)
    probs = np.exp(scores - (0.0 if shift == -np.inf else shift))
    return probs / probs.sum()
