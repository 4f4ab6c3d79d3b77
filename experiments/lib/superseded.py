"""Windows of rows without the row contract: superseded designs, to be looked at.

    flash           the library's products, and one softmax over all positions, as a
                    batched prefill has it
    library-rows    the library's products, and the attention of rows

Both compute what rows do, in other orders: XLA compiles a product for its height, and
takes another path for one row than for five. `experiments/parity.py` names the
operation by which they leave decoding, and nothing else runs them.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.model import (
    config as config_lib,
    observe as observe_lib,
    params as params_lib,
    rotary,
    row_model,
    sequence,
)
from spec_jax.ops import paged_attention, rms_norm, rope, swiglu, weights
from spec_jax.paging import cache as paged


NAMES = ("flash", "library-rows")


def forward(
    name: str,
    params: params_lib.Params,
    config: config_lib.Qwen3Config,
    kv: paged.PagedKV,
    *,
    tokens: Int[Array, " R"],
    start: Int[Array, ""],
    observe: observe_lib.Observe = observe_lib.pass_on,
) -> tuple[paged.PagedKV, Float[Array, "R V"]]:
    """Runs the tokens at positions from `start` by a design of `NAMES`; writes K/V.

    The pages must have been reserved, and lengths do not change. Logits are float32.

    Args:
      observe: sees what it sees of rows, all of `observe.LEAVES_ROWS`, and may change
        any.
    """
    norm = functools.partial(rms_norm.rms_norm, eps=config.rms_norm_eps)
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    (R,) = tokens.shape
    positions = start + jnp.arange(R, dtype=jnp.int32)
    where = {
        "slots": jnp.full((R,), row_model.SLOT, jnp.int32),
        "positions": positions,
        "num_active": jnp.int32(R),
    }
    frequencies, scale = rotary.rope_table(config)
    angles = rope.angles(
        positions, jnp.asarray(frequencies), scale=scale, dtype=params.embed.dtype
    )
    x = observe(None, "embed", weights.take_rows(params.embed, tokens))
    for number, layer in enumerate(params.layers):
        see = functools.partial(observe, number)
        heads = sequence.matmul(norm(x, layer.input_norm), layer.qkv)
        heads = jnp.split(heads.reshape(R, N + 2 * K, H), (N, N + K), axis=1)
        q, k, v = (see(n, part) for n, part in zip("qkv", heads, strict=True))
        q = rope.rotate(norm(q, layer.q_norm), *angles)
        k = see("k_cache", rope.rotate(norm(k, layer.k_norm), *angles))
        kv = paged.write(kv, number, k=k, v=see("v_cache", v), **where)
        if name == "flash":
            attended = _attend_at_once(q, kv, number, positions)
        else:
            attended = paged_attention.paged_attention(
                *(q, kv.k[number], kv.v[number]),
                page_table=kv.page_table,
                scale=H**-0.5,
                **where,
            )
        attended = see("attention", attended.reshape(R, -1))
        x = see(
            "attention_residual", x + sequence.matmul(attended, layer.attention_out)
        )
        gates = sequence.matmul(norm(x, layer.mlp_norm), layer.gate_up)
        hidden = see("swiglu", swiglu.swiglu(gates))
        x = see("mlp_residual", x + sequence.matmul(hidden, layer.down))
    logits = sequence.weight_product(norm(x, params.final_norm), params.head)
    return kv, observe(None, "logits", logits)


def _attend_at_once(q, kv, number, positions):
    """Returns one softmax over the whole capacity, as prefill takes over its bucket.

    Scores and softmax are float32; probabilities are cast before the second product.
    """
    (R, N, H), T = q.shape, kv.slot_capacity
    # Bytes of positions that nobody wrote may be NaN, and 0 * NaN is NaN.
    is_written = (jnp.arange(T) <= positions[-1])[:, None, None]
    keys, values = (
        jnp.where(is_written, pool, 0)
        for pool in paged.gather(kv, number, row_model.SLOT, T)
    )
    K = keys.shape[1]
    scores = sequence.einsum("rkgh,tkh->kgrt", q.reshape(R, K, N // K, H), keys)
    visible = jnp.arange(T)[None, :] <= positions[:, None]
    scores = jnp.where(jnp.broadcast_to(visible, scores.shape), scores, -jnp.inf)
    probs = jax.nn.softmax(scores * H**-0.5, axis=-1).astype(values.dtype)
    return jnp.einsum("kgrt,tkh->rkgh", probs, values).reshape(R, N, H)
