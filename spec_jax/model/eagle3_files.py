"""EAGLE-3 heads as they are published: folders in, folders out.

Knows the names of the tensors and the tables of a draft vocabulary; the three dialects
of `config.json` are `eagle3_dialects`'. Tensors are read from safetensors, or from
`pytorch_model.bin`, and are `[out, in]`, as in `load`, whose parts this module uses.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    checkpoint_files as files,
    config as config_lib,
    eagle3_dialects as dialects,
    eagle3_params,
    load as load_lib,
    params as params_lib,
    torch_file,
)
from spec_jax.ops import weights


CheckpointError = files.CheckpointError

_EMBED, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_TO_TARGET, _IS_KEPT = "d2t", "t2d"


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
    entries = _find(folder)
    has_own = config.hidden_size != target.hidden_size  # needs an embedding of its own
    names = _names(config, dialect, has_embed=has_own or _EMBED in entries)
    _check_entries(folder, config, entries, names)
    given: dict[str, Any] = {}
    if _EMBED not in entries or _is_copy(entries[_EMBED], target_params.embed):
        given["embed"] = target_params.embed
    elif dialect == "deepspec":
        raise CheckpointError(
            f"{folder}: {_EMBED} is not the target's: it is a head for another target"
        )
    if config.layer.dtype == target.dtype:
        if _is_copy(entries[_LM_HEAD], target_params.head):
            given["lm_head"] = target_params.head
    hot = _read_hot(folder, config, entries)
    nothing = dict.fromkeys([*given, "hot"])
    shapes = eagle3_params.shapes(config).replace(**nothing)

    def read(leaf: jax.ShapeDtypeStruct, sources: params_lib.Parts) -> jax.Array:
        return jnp.array(load_lib.assemble(leaf, sources, entries), copy=True)

    params = jax.tree.map(read, shapes, names.replace(**nothing))
    params = params.replace(hot=hot, **given)
    return config, params if impl is None else eagle3_params.prepare(params, impl)


def save(
    folder: str | pathlib.Path,
    config: eagle3_params.Eagle3Config,
    params: eagle3_params.Eagle3Params,
    *,
    dialect: dialects.Dialect,
    with_embed: bool | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes what `load` reads back bit for bit, in one of the published dialects.

    Args:
      with_embed: whether the embedding is written; None: where the dialect has it.
      metadata: further entries of the file's `__metadata__`.

    Raises:
      ValueError: no such dialect, or a head that it cannot describe.
      CheckpointError: the files cannot be written.
    """
    dialects.check_config(config, dialect)
    if with_embed is None:
        with_embed = dialect != "midlayer"
    names = _names(config, dialect, has_embed=with_embed)
    written = params.replace(hot=None, embed=params.embed if with_embed else None)
    tensors = load_lib.pending(written, names)
    if params.hot is not None:
        tensors += _pending_hot(config, np.asarray(params.hot))
    load_lib.write_folder(
        pathlib.Path(folder),
        {files.SINGLE_FILE: tensors},
        {"config.json": dialects.to_dict(config, dialect)},
        metadata=metadata,
    )


def _find(folder: pathlib.Path) -> dict[str, files.Entry]:
    """The tensors of a folder, of whichever file it has."""
    dtypes = files.DTYPES | files.WHOLE_DTYPES
    has_safetensors = any(
        (folder / name).exists() for name in (files.SINGLE_FILE, files.INDEX_FILE)
    )
    if not has_safetensors and (folder / torch_file.FILE).exists():
        return torch_file.read_header(folder / torch_file.FILE)
    return files.find(folder, dtypes=dtypes)


def _names(
    config: eagle3_params.Eagle3Config, dialect: dialects.Dialect, *, has_embed: bool
) -> eagle3_params.Eagle3Params:
    """A tree like `Eagle3Params` that holds `params.Parts`: what arrays are made of."""
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


def _check_entries(folder, config, entries, names) -> None:
    """Every tensor of the head is there, in its shape and kind, and no other."""
    expected = dict(part for leaf in jax.tree.leaves(names) for part in leaf.parts)
    tables = {
        _TO_TARGET: (config.draft_vocab_size,),
        _IS_KEPT: (config.layer.vocab_size,),
    }
    required = list(expected)
    if config.draft_vocab_size < config.layer.vocab_size:
        required += tables
    biases = sorted(name for name in entries if name.endswith(".bias"))
    if biases:
        raise CheckpointError(
            f"{folder}: {files.some(biases)}: heads with biases are not supported"
        )
    files.check_names(
        folder,
        entries,
        required=required,
        known=expected | tables,
        source="config.json for this target",
    )
    for name, entry in entries.items():
        is_table = entry.dtype in files.WHOLE_DTYPES.values()
        if is_table != (name in tables):
            raise CheckpointError(f"{entry.path}: {name} is {entry.dtype}")


def _read_hot(folder, config, entries) -> jax.Array | None:
    """The target's token of each draft token, from the offsets that files hold."""
    if _TO_TARGET not in entries:
        return None
    V, Vd = config.layer.vocab_size, config.draft_vocab_size
    offsets = np.empty((Vd,), entries[_TO_TARGET].dtype)
    files.read_into(entries[_TO_TARGET], offsets)
    hot = np.arange(Vd) + offsets.astype(np.int64)
    where = f"{entries[_TO_TARGET].path}: {_TO_TARGET}"
    outside = np.flatnonzero((hot < 0) | (hot >= V))
    if outside.size:
        draft = int(outside[0])
        raise CheckpointError(
            f"{where}[{draft}]={int(offsets[draft])} makes draft token {draft} the "
            f"token {int(hot[draft])}, of a vocabulary of {V}; download it again"
        )
    if len(np.unique(hot)) < Vd:
        raise CheckpointError(f"{where} has a token twice; download it again")
    if _IS_KEPT in entries:
        is_kept = np.empty((V,), entries[_IS_KEPT].dtype)
        files.read_into(entries[_IS_KEPT], is_kept)
        if np.count_nonzero(is_kept) != Vd or not is_kept[hot].all():
            raise CheckpointError(
                f"{folder}: {_IS_KEPT} marks {np.count_nonzero(is_kept)} tokens, "
                f"{_TO_TARGET} names {Vd}, and they are not the same; download it again"
            )
    if Vd == V and (hot == np.arange(V)).all():
        return None
    return jnp.asarray(hot, jnp.int32)


def _pending_hot(
    config: eagle3_params.Eagle3Config, hot: np.ndarray
) -> list[files.Pending]:
    """The two tables of a draft vocabulary."""
    is_kept = np.zeros((config.layer.vocab_size,), np.bool_)
    is_kept[hot] = True
    offsets = hot.astype(np.int64) - np.arange(len(hot))
    return [
        files.Pending(
            name=name,
            dtype=table.dtype,
            shape=table.shape,
            fetch=functools.partial(np.asarray, table),
        )
        for name, table in ((_TO_TARGET, offsets), (_IS_KEPT, is_kept))
    ]


def _is_copy(entry: files.Entry, ours: weights.Weight) -> bool:
    """Whether a tensor is one of the target's, in the target's dtype."""
    if entry.shape != tuple(ours.shape):
        return False
    buffer = np.empty(entry.shape, ours.dtype)
    files.read_into(entry, buffer)
    bits = f"u{buffer.dtype.itemsize}"
    known = np.asarray(weights.matrix(ours))
    return np.array_equal(buffer.view(bits), known.view(bits))
