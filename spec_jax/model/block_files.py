"""DFlash and DSpark as they are published: folders in, folders out.

Knows the names of the tensors; the four layouts of `config.json` are `block_dialects`'.
Tensors are `[out, in]`, as in `load`, whose parts this module uses.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from spec_jax.model import (
    block_dialects as dialects,
    block_params,
    checkpoint_files as files,
    config as config_lib,
    head_dialects,
    head_files,
    load as load_lib,
    params as params_lib,
)
from spec_jax.ops import weights


CheckpointError = files.CheckpointError

_PREFIX = "logit_head."  # Early files of SpecForge have it.
_MASK = "mask_embedding.pt"
_BIAS = "confidence_head.proj.bias"


def load(
    folder: str | pathlib.Path,
    target: config_lib.ModelConfig,
    target_params: params_lib.Params,
    *,
    dtype: str | None = None,
    impl: str | None = None,
) -> tuple[block_params.BlockConfig, block_params.BlockParams]:
    """Reads a block drafter and checks that it is this target's.

    Args:
      target_params: of which the drafter gets the embedding and, unless its vocabulary
        is its own, the output projection: the very arrays.
      dtype: of the weights, which must be the target's; None: that one.
      impl: a resolved implementation, for whose kernels the weights are prepared.

    Raises:
      CheckpointError: as `block_dialects.read_config`; a tensor that is missing,
        unknown, of another shape or not finite; copies that are not the target's.
      ValueError: another dtype than the target's.
    """
    folder = pathlib.Path(folder)
    if dtype not in (None, target.dtype):
        raise ValueError(
            f"{dtype=}, but the drafter shares matrices with a target of "
            f"{target.dtype}: leave it out"
        )
    dialect, config = dialects.read_config(folder / "config.json", target)
    entries = _find(folder, dialect)
    V, D = config.layer.vocab_size, config.hidden_size
    is_whole = config.draft_vocab_size == V
    names = _names(config, with_embed=False, with_lm_head=not is_whole)
    if _BIAS not in entries:  # Some files have none.
        names = names.replace(confidence_bias=None)
    copies = {head_files.EMBED: target_params.embed}
    copies |= {head_files.LM_HEAD: target_params.head} if is_whole else {}
    vocab_sizes = V, config.draft_vocab_size
    head_files.check_entries(
        folder,
        entries,
        names,
        vocab_sizes=vocab_sizes,
        optional=dict.fromkeys(copies, (V, D)),
    )
    _check_copies(folder, entries, copies)
    shared: dict[str, Any] = {"embed": target_params.embed}
    shared |= {"lm_head": target_params.head} if is_whole else {}
    shared["hot"] = head_files.read_hot(folder, entries, vocab_sizes=vocab_sizes)
    shapes = block_params.shapes(config)
    if config.has_confidence and names.confidence_bias is None:
        shared["confidence_bias"] = jnp.zeros((1,), config.layer.dtype)
    nothing = dict.fromkeys(shared)

    params = head_files.read(
        shapes.replace(**nothing), names.replace(**nothing), entries
    )
    params = params.replace(**shared)
    return config, params if impl is None else block_params.prepare(params, impl)


def _find(folder: pathlib.Path, dialect: str) -> dict[str, files.Entry]:
    """Finds a folder's tensors by the names that all layouts share."""
    if (folder / _MASK).exists():
        raise CheckpointError(
            f"{folder / _MASK}: drafters whose mask has an embedding of its own are "
            "not supported"
        )
    entries = head_files.find(folder)
    if dialect != "specforge":
        return entries
    return {name.removeprefix(_PREFIX): entry for name, entry in entries.items()}


def _check_copies(
    folder: pathlib.Path,
    entries: Mapping[str, files.Entry],
    copies: Mapping[str, weights.Weight],
) -> None:
    """Refuses matrices of the target that are those of another one."""
    for name, ours in copies.items():
        if name in entries and not head_files.is_copy(entries[name], ours):
            raise CheckpointError(
                f"{folder}: {name} is not the target's: it is a drafter for another "
                "target"
            )


def save(
    folder: str | pathlib.Path,
    config: block_params.BlockConfig,
    params: block_params.BlockParams,
    *,
    dialect: dialects.Dialect,
    origin: head_dialects.Origin,
    copies: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes what `load` reads back bit for bit, in one of the published layouts.

    Args:
      origin: the target and the training, which some layouts state.
      copies: whether a layout that has copies of the target's embedding and output
        projection gets them. `load` takes both from the target; other readers may not.
      metadata: further entries of the file's `__metadata__`.

    Raises:
      ValueError: no such layout, or a drafter that it cannot describe.
      CheckpointError: the files cannot be written.
    """
    dialects.check_config(config, dialect)
    has_copies = dialect == "deepspec" and copies
    has_own = config.draft_vocab_size < config.layer.vocab_size
    written = params.replace(
        hot=None,
        embed=params.embed if has_copies else None,
        lm_head=params.lm_head if has_copies or has_own else None,
    )
    names = _names(config, with_embed=has_copies, with_lm_head=has_copies or has_own)
    head_files.write(
        folder,
        load_lib.pending(written, names),
        dialects.to_dict(config, dialect, origin),
        hot=params.hot,
        vocab_size=config.layer.vocab_size,
        metadata=metadata,
    )


def _names(
    config: block_params.BlockConfig, *, with_embed: bool, with_lm_head: bool
) -> block_params.BlockParams:
    """Returns a tree like `BlockParams` of `params.Parts`: what arrays are made of."""
    layer, r = config.layer, config.markov_rank
    D, F, H = layer.hidden_size, layer.intermediate_size, layer.head_dim
    N, K, V = layer.num_heads, layer.num_kv_heads, layer.vocab_size

    def parts(*found: tuple[str, tuple[int, ...]]) -> Any:  # in an array's place
        return params_lib.Parts(found)

    def one(name: str, *shape: int) -> Any:
        return parts((f"{name}.weight", shape))

    def of_layer(number: int) -> block_params.BlockLayer:
        """Returns names and shapes of one layer."""

        def part(name: str, *shape: int) -> tuple[str, tuple[int, ...]]:
            return f"layers.{number}.{name}.weight", shape

        return block_params.BlockLayer(
            input_norm=parts(part("input_layernorm", D)),
            q=parts(part("self_attn.q_proj", N * H, D)),
            kv=parts(
                part("self_attn.k_proj", K * H, D), part("self_attn.v_proj", K * H, D)
            ),
            q_norm=parts(part("self_attn.q_norm", H)),
            k_norm=parts(part("self_attn.k_norm", H)),
            attention_out=parts(part("self_attn.o_proj", D, N * H)),
            mlp_norm=parts(part("post_attention_layernorm", D)),
            gate_up=parts(part("mlp.gate_proj", F, D), part("mlp.up_proj", F, D)),
            down=parts(part("mlp.down_proj", D, F)),
        )

    markov = None
    if config.head != "none":
        mixes = {
            "gated": ("gate_proj", r, D + r),
            "rnn": ("joint_proj", 3 * r, 2 * r + D),
        }
        name, *shape = mixes.get(config.head, (None,))
        markov = block_params.Markov(
            embed=one("markov_head.markov_w1", V, r),
            out=one("markov_head.markov_w2", config.draft_vocab_size, r),
            mix=one(f"markov_head.{name}", *shape) if name else None,
            mix_bias=parts((f"markov_head.{name}.bias", (shape[0],))) if name else None,
        )
    has_confidence, width = config.has_confidence, D + r * config.confidence_with_markov
    return block_params.BlockParams(
        fc=one("fc", D, config.features_size),
        hidden_norm=one("hidden_norm", D),
        layers=tuple(of_layer(number) for number in range(layer.num_layers)),
        final_norm=one("norm", D),
        markov=markov,
        confidence=one("confidence_head.proj", 1, width) if has_confidence else None,
        confidence_bias=parts((_BIAS, (1,))) if has_confidence else None,
        hot=None,
        # As no arrays: a drafter mostly has the target's.
        lm_head=one("lm_head", config.draft_vocab_size, D) if with_lm_head else None,  # type: ignore[arg-type]
        embed=one("embed_tokens", V, D) if with_embed else None,  # type: ignore[arg-type]
    )
