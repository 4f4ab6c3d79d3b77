"""The row contract of families other than Qwen3, by the checks of `test_rows`."""

import decoding
import jax
import jax.numpy as jnp
import pytest
from model import test_rows as rows_lib
from slow_cases import slow

from spec_jax.model import (
    config as config_lib,
    gpt_neox,
    llama,
    params as params_lib,
    qwen2,
)


SIZES = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2,
    "num_heads": 3, "num_kv_heads": 3, "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip
GATED = {"llama": llama.LlamaConfig, "qwen2": qwen2.Qwen2Config}


def make_config(family: str, dtype: str, **changes) -> config_lib.ModelConfig:
    if family in GATED:
        return GATED[family](**SIZES | {"dtype": dtype} | changes)
    sizes = SIZES | {"rotary_size": 4, "dtype": dtype} | changes
    return gpt_neox.GPTNeoXConfig(**sizes)


def make_params(config: config_lib.ModelConfig) -> params_lib.Params:
    """Makes random weights, biases too; the embedding of token 0 is NaN."""
    params = params_lib.init(jax.random.key(0), config, stddev=0.2)
    params = params_lib.cast(decoding.perturbed(params, 0.1), config.dtype)
    return params.replace(embed=params.embed.at[0].set(jnp.nan))


def make_model(family: str, dtype: str, impl: str) -> rows_lib.Model:
    decoding.needs(impl)
    heads = {"head_dim": 64, "num_kv_heads": 1} if family in GATED else {}
    config = make_config(family, dtype, num_layers=1, **heads)
    return rows_lib.Model(config=config, params=make_params(config), impl=impl)


@pytest.mark.parametrize(
    ("family", "dtype", "impl"),
    [
        ("gpt_neox", "float32", "xla"),
        slow("gpt_neox", "bfloat16", "native"),
        ("qwen2", "bfloat16", "native"),
    ],  # `pallas/test_triton_model` checks interpreted kernels.
)
def test_rows_are_what_each_is_alone(family, dtype, impl):
    """Fails if a row's bits depend on its place, its neighbours or padding rows."""
    model = make_model(family, dtype, impl)
    rows_lib.test_rows_do_not_depend_on_their_place_or_neighbours(model)
