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
from spec_jax.ops import bits, paged_attention, rms_norm, rope, swiglu, weights
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
      observe: sees the value of each operation, and may change any.
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
        normed = see("input_norm", norm(x, layer.input_norm))
        heads = sequence.matmul(normed, layer.qkv).reshape(R, N + 2 * K, H)
        q, k, v = jnp.split(heads, (N, N + K), axis=1)
        q, k, v = see("q", q), see("k", k), see("v", v)
        q, k = (
            see("q_norm", norm(q, layer.q_norm)),
            see("k_norm", norm(k, layer.k_norm)),
        )
        q = see("q_rope", rope.rotate(q, *angles))
        k = see("k_rope", rope.rotate(k, *angles))
        k, v = see("k_cache", k), see("v_cache", v)
        kv = paged.write(kv, number, k=k, v=v, **where)
        if name == "flash":
            attended = _attend_at_once(q, kv, number, start + R, positions)
        else:
            attended = paged_attention.paged_attention(
                *(q, kv.k[number], kv.v[number]),
                page_table=kv.page_table,
                scale=H**-0.5,
                **where,
            )
        attended = see("attention", attended.reshape(R, -1))
        out = see("attention_out", sequence.matmul(attended, layer.attention_out))
        x = see("attention_residual", x + out)
        normed = see("mlp_norm", norm(x, layer.mlp_norm))
        gate, up = jnp.split(sequence.matmul(normed, layer.gate_up), 2, axis=1)
        gate, up = see("gate", gate), see("up", up)
        hidden = see("swiglu", swiglu.swiglu(jnp.concatenate([gate, up], axis=1)))
        down = see("down", sequence.matmul(hidden, layer.down))
        x = see("mlp_residual", x + down)
    normed = observe(None, "final_norm", norm(x, params.final_norm))
    head = weights.matrix(params.head)
    logits = jnp.einsum("rd,vd->rv", normed, head, preferred_element_type=jnp.float32)
    return kv, observe(None, "logits", logits)


def _attend_at_once(q, kv, number, end, positions):
    """Returns one softmax over the whole capacity, as prefill takes over its bucket.

    Scores and softmax are float32; probabilities are cast before the second product.
    """
    (R, N, H), T = q.shape, kv.slot_capacity
    K = kv.k[number].shape[2]

    def gathered(pages):
        table = kv.page_table[row_model.SLOT]
        found = bits.to_bits(pages).at[table].get(mode="fill", fill_value=0)
        found = bits.from_bits(found, pages.dtype).reshape(T, K, H)
        # Bytes of positions that nobody wrote may be NaN, and 0 * NaN is NaN.
        return jnp.where((jnp.arange(T) < end)[:, None, None], found, 0)

    keys, values = gathered(kv.k[number]), gathered(kv.v[number])
    scores = jnp.einsum(
        "rkgh,tkh->kgrt",
        q.reshape(R, K, N // K, H),
        keys,
        preferred_element_type=jnp.float32,
    )
    visible = jnp.arange(T)[None, :] <= positions[:, None]
    visible = jnp.broadcast_to(visible, scores.shape)
    scores = jnp.where(visible, scores * H**-0.5, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("kgrt,tkh->rkgh", probs, values).reshape(R, N, H)
