"""EAGLE-3 heads as they are published: folders in, folders out.

Knows the names of the tensors; the three dialects of `config.json` are
`eagle3_dialects`'. Tensors are `[out, in]`, as in `load`, whose parts this module uses.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    eagle3_dialects as dialects,
    eagle3_params,
    head_dialects,
    head_files,
    load as load_lib,
    params as params_lib,
)


CheckpointError = files.CheckpointError

_EMBED, _LM_HEAD = head_files.EMBED, head_files.LM_HEAD


def load(
    folder: str | pathlib.Path,
    target: config_lib.ModelConfig,
    target_params: params_lib.Params,
    *,
    dtype: str | None = None,
    impl: str | None = None,
) -> tuple[eagle3_params.Eagle3Config, eagle3_params.Eagle3Params]:
    """Reads a head and checks that it is this target's.

    Args:
      target_params: of which the head gets the embedding, and where its own output
        projection is a copy of the target's, that too: the very arrays.
      dtype: of the weights; the target's if None.
      impl: a resolved implementation, for whose kernels the weights are prepared.

    Raises:
      CheckpointError: as `eagle3_dialects.read_config`; a tensor that is missing,
        unknown, of another shape or not finite; a draft vocabulary that contradicts
        itself.
    """
    folder = pathlib.Path(folder)
    dialect, config = dialects.read_config(folder / "config.json", target, dtype=dtype)
    entries = head_files.find(folder)
    has_embed = config.has_own_embed or _EMBED in entries
    names = _names(config, dialect, has_embed=has_embed)
    head_files.check_entries(
        folder,
        entries,
        names,
        vocab_sizes=(config.layer.vocab_size, config.draft_vocab_size),
    )
    given: dict[str, Any] = {}
    if _EMBED not in entries or head_files.is_copy(
        entries[_EMBED], target_params.embed
    ):
        given["embed"] = target_params.embed
    elif dialect == "deepspec":
        raise CheckpointError(
            f"{folder}: {_EMBED} is not the target's: it is a head for another target"
        )
    if config.layer.dtype == target.dtype:
        if head_files.is_copy(entries[_LM_HEAD], target_params.head):
            given["lm_head"] = target_params.head
    hot = head_files.read_hot(
        folder, entries, vocab_sizes=(config.layer.vocab_size, config.draft_vocab_size)
    )
    nothing = dict.fromkeys([*given, "hot"])
    shapes = eagle3_params.shapes(config).replace(**nothing)

    params = head_files.read(shapes, names.replace(**nothing), entries)
    params = params.replace(hot=hot, **given)
    return config, params if impl is None else eagle3_params.prepare(params, impl)


def save(
    folder: str | pathlib.Path,
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    *,
    dialect: dialects.Dialect,
    origin: head_dialects.Origin,
    with_embed: bool | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes what `load` reads back bit for bit, in one of the published dialects.

    Args:
      origin: the target and the training, which some dialects state.
      with_embed: whether the embedding is written; None: where the dialect has it,
        or it is the head's own.
      metadata: further entries of the file's `__metadata__`.

    Raises:
      ValueError: no such dialect, or a head that it cannot describe.
      CheckpointError: the files cannot be written.
    """
    dialects.check_config(config, dialect)
    if with_embed is None:
        with_embed = config.has_own_embed or dialect != "midlayer"
    names = _names(config, dialect, has_embed=with_embed)
    written = params.replace(hot=None, embed=params.embed if with_embed else None)
    head_files.write(
        folder,
        load_lib.pending(written, names),
        dialects.to_dict(config, dialect, origin),
        hot=params.hot,
        vocab_size=config.layer.vocab_size,
        metadata=metadata,
    )


def _names(
    config: eagle3_params.Eagle3Config, dialect: dialects.Dialect, *, has_embed: bool
) -> eagle3_params.Eagle3Params:
    """Returns a tree like `Eagle3Params` of `params.Parts`: what arrays are made of."""
    prefix = "midlayer." if dialect == "midlayer" else "layers.0."

    def parts(*found: tuple[str, tuple[int, ...]]) -> Any:  # in an array's place
        return params_lib.Parts(
            tuple((f"{name}.weight", shape) for name, shape in found)
        )

    def of_layer(*found: tuple[str, tuple[int, ...]]) -> Any:
        return parts(*((prefix + name, shape) for name, shape in found))

    layer, n = config.layer, len(config.taps)
    D, F, H = layer.hidden_size, layer.intermediate_size, layer.head_dim
    N, K, Dt = layer.num_heads, layer.num_kv_heads, config.target_hidden_size
    fc_norms = tuple(parts((f"fc_norm.{i}", (Dt,))) for i in range(n))
    norm = lambda name: of_layer((f"self_attn.{name}", (H,)))
    return eagle3_params.Eagle3Params(
        fc=parts(("fc", (D, n * Dt))),
        features_norm=parts(("input_norm", (n * Dt,)))
        if config.norm_before_fc
        else None,
        fc_norms=fc_norms if config.fc_norm else None,
        input_norm=of_layer(("input_layernorm", (D,))),
        hidden_norm=of_layer(("hidden_norm", (D,))),
        qkv=of_layer(
            ("self_attn.q_proj", (N * H, 2 * D)),
            ("self_attn.k_proj", (K * H, 2 * D)),
            ("self_attn.v_proj", (K * H, 2 * D)),
        ),
        q_norm=norm("q_norm") if config.has_head_norms else None,
        k_norm=norm("k_norm") if config.has_head_norms else None,
        attention_out=of_layer(("self_attn.o_proj", (D, N * H))),
        mlp_norm=of_layer(("post_attention_layernorm", (D,))),
        gate_up=of_layer(("mlp.gate_proj", (F, D)), ("mlp.up_proj", (F, D))),
        down=of_layer(("mlp.down_proj", (D, F))),
        final_norm=parts(("norm", (D,))),
        lm_head=parts(("lm_head", (config.draft_vocab_size, D))),
        hot=None,
        # As no array: a head mostly has the target's.
        embed=parts(("embed_tokens", (layer.vocab_size, D))) if has_embed else None,  # type: ignore[arg-type]
    )
