"""A plain step, a verification and a round of Qwen3, to be compiled and not run."""

import dataclasses
import functools
from unittest import mock

import hopper
import jax
import jax.numpy as jnp

from spec_jax import autoregressive, rounds
from spec_jax.drafters import draft_model
from spec_jax.model import config as config_lib, params as params_lib, row_model
from spec_jax.ops import dispatch


CAPACITY, PAGE_SIZE = 4096, 16
GAMMA_MAX = 4
DRAFT = "qwen3-0.6b"

SMALL = config_lib.Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
LARGE = dataclasses.replace(
    SMALL,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    tie_word_embeddings=False,
)
CONFIGS = {"qwen3-0.6b": SMALL, "qwen3-8b": LARGE}


def model(name: str, *, layers: int | None = None, impl="triton") -> row_model.RowModel:
    """A released model at its shapes, or at as many layers as are asked for."""
    config = CONFIGS[name]
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    return row_model.RowModel(config=config, impl=impl, slab=dispatch.slab_rows(impl))


def pool_bytes(model: row_model.RowModel) -> int:
    """Bytes of the keys of one layer, and of its values."""
    return 2 * CAPACITY * model.config.num_kv_heads * model.config.head_dim


def _shapes(target: row_model.RowModel):
    """Parameters, text, a scalar and an empty cache, as shapes."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return params_lib.shapes(target.config), _cache(target), _text(), number


def _cache(model: row_model.RowModel):
    sizes = {"capacity": CAPACITY, "page_size": PAGE_SIZE}
    return jax.eval_shape(lambda: model.new_cache(**sizes))


def _text():
    return jax.ShapeDtypeStruct((CAPACITY + 1,), jnp.int32)


def plain_step(name: str, *, donate=(1,), **options) -> hopper.Program:
    """One token of `autoregressive.generate`."""
    return _plain_step(model(name, **options), donate=donate)


def unrolled_step(name: str, **options) -> hopper.Program:
    """As `plain_step`, its layers in the program itself and not in a function."""
    program = plain_step(name, **options)

    def step(*args):
        with mock.patch.object(jax, "jit", functools.partial(jax.jit, inline=True)):
            return program.fn(*args)

    return dataclasses.replace(program, fn=step)


def scaled_step(name: str, **options) -> hopper.Program:
    """As `plain_step`, for a negative control: XLA computes with the logits."""
    target = model(name, **options)
    return _plain_step(_Scaled(**vars(target)), donate=(1,))


class _Scaled(row_model.RowModel):
    def choose(self, logits, num_live):
        return super().choose(logits * 1.5, num_live)


def _plain_step(target: row_model.RowModel, *, donate) -> hopper.Program:
    params, kv, text, number = _shapes(target)
    state = jax.eval_shape(
        lambda text, n, kv: autoregressive.init_state(
            text, length=n, limit=n, cache=kv
        ),
        text,
        number,
        kv,
    )

    def step(params, state, stop_ids):
        return autoregressive.run_step(target, params, state, stop_ids=stop_ids)

    stop_ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    return hopper.Program(fn=step, args=(params, state, stop_ids), donate=donate)


def verify_step(name: str, **options) -> hopper.Program:
    """A window of `GAMMA_MAX + 1` rows, chosen from and rolled back."""
    target = model(name, **options)
    params, kv, _, number = _shapes(target)
    window = jax.ShapeDtypeStruct((GAMMA_MAX + 1,), jnp.int32)

    def verify(params, kv, tokens, start, num_live, new_len):
        kv, logits = target.forward(
            params, kv, tokens=tokens, start=start, num_live=num_live
        )
        return target.truncate(kv, new_len), target.choose(logits, num_live)

    args = (params, kv, window, number, number, number)
    return hopper.Program(fn=verify, args=args, donate=(1,))


def spec_round(name: str, *, draft_layers: int | None = None, **options):
    """`rounds.run_round` with a draft of the shape of `DRAFT`."""
    target = model(name, **options)
    drafter = draft_model.DraftModel(
        model=model(DRAFT, layers=draft_layers, impl=target.impl), gamma_max=GAMMA_MAX
    )
    params, kv, text, number = _shapes(target)
    state = jax.eval_shape(
        lambda text, n, kv, memory: rounds.init_state(
            text, length=n, limit=n, cache=kv, memory=memory, gamma_max=GAMMA_MAX
        ),
        text,
        number,
        kv,
        _cache(drafter.model),
    )

    def run(params, state, gamma, stop_ids):
        return rounds.run_round(
            target, drafter, params, state, gamma=gamma, stop_ids=stop_ids
        )

    stop_ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    args = ((params, params_lib.shapes(drafter.model.config)), state, number, stop_ids)
    return hopper.Program(fn=run, args=args, donate=(1,))
