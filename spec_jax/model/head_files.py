"""Files of heads that read a target's features: what all families have in common.

Their tensors are found in safetensors; they may have copies of the target's embedding
and output projection, and tables of a draft vocabulary. Tensors are `[out, in]`, as in
`load`, whose parts this module uses.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.model import (
    byte_weights,
    checkpoint_files as files,
    config as config_lib,
    head_dialects,
    head_params,
    load_shards,
    params as params_lib,
    save as save_lib,
    tensor_values,
)
from spec_jax.ops import weights as weights_lib


EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_TO_TARGET, _IS_KEPT = "d2t", "t2d"

PICKLED = "pytorch_model.bin"
CONVERT = (
    "import torch, safetensors.torch as s; "
    f"w = torch.load('{PICKLED}', weights_only=True); "
    "s.save_file({k: v.contiguous() for k, v in w.items()}, 'model.safetensors')"
)
"""A program that writes a folder's pickled tensors as safetensors."""

NAMES = {
    "fc": "fc",
    "final_norm": "norm",
    "lm_head": "lm_head",
    "embed": "embed_tokens",
}
"""The tensors of fields that all heads have, for `params.parts`."""


_MASK = "mask_embedding.pt"
_PREFIX = "logit_head."  # Early files of SpecForge have it before their names.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Published folders of a family of heads.

    Attributes:
      dialects: the names of the formats.
      whole: dialects whose heads draft the target's whole vocabulary.
      from_dict: takes what a `config.json` holds, the target, from whose layers may
        follow which features are read, and the dtype of the weights; returns the
        dialect and the config, or raises `ValueError`.
      to_dict: takes a config, a dialect and an `Origin`; returns the `config.json`.
      names: takes a config, a dialect and the shapes of what is in files; returns a
        tree of `params.Parts`.
      copies: dialects that have copies of the target's matrices.
      is_targets: whether the embedding and, with `shares_head`, the output projection
        are the target's very arrays, in its dtype; files may have copies of both.
      zeros: fields that are zero where files lack them.
    """

    dialects: tuple[str, ...]
    whole: tuple[str, ...]
    from_dict: Callable[[dict[str, Any], config_lib.ModelConfig, str], tuple[str, Any]]
    to_dict: Callable[..., dict[str, Any]]
    names: Callable[[Any, str, Any], Any]
    copies: tuple[str, ...]
    is_targets: bool = False
    zeros: tuple[str, ...] = ()

    def read_config(
        self,
        path: pathlib.Path,
        target: config_lib.ModelConfig,
        *,
        dtype: str | None = None,
    ) -> tuple[str, Any]:
        """Reads the dialect and the config of a head for `target`; `dtype` as `load`.

        Raises:
          CheckpointError: the file cannot be read, is of an unknown dialect, asks for
            what is not supported, or is of a head for another target.
        """
        raw = head_dialects.read_object(path)
        try:
            dialect, config = self.from_dict(raw, target, dtype or target.dtype)
            self.check_config(config, dialect, target)
        except ValueError as error:
            raise files.CheckpointError(f"{path}: {error}") from None
        return dialect, config

    def check_config(
        self, config: Any, dialect: str, target: config_lib.ModelConfig
    ) -> None:
        """Passes if a head can be run with a target, and a dialect can describe it: if
        what is written is read back as the same. Each file that is read passes.

        Raises:
          ValueError: it cannot, or there is no such dialect.
        """
        if dialect not in self.dialects:
            raise ValueError(f"{dialect=} is not one of {', '.join(self.dialects)}")
        config.validate().check_target(target)
        raw = self.to_dict(config, dialect, head_dialects.Origin(target=target))
        try:
            _, found = self.from_dict(raw, target, config.layer.dtype)
        except ValueError as error:
            raise ValueError(f"{dialect} has no such heads: {error}") from None
        ours, theirs = vars(config), vars(found)
        others = [f"{name}={x!r}" for name, x in ours.items() if x != theirs[name]]
        if others:
            raise ValueError(
                f"{dialect} has no heads with {', '.join(others)}; choose another of "
                f"{', '.join(self.dialects)}"
            )

    def tensors(self, config: Any, dialect: str, *, embed: bool, lm_head: bool) -> Any:
        """Returns a tree of `params.Parts`: the tensors that arrays are made of.

        Args:
          embed, lm_head: whether files have copies of the target's.
        """
        shapes = config.shapes().replace(hot=None)
        if not embed and not config.has_own_embed:
            shapes = shapes.replace(embed=None)
        if config.shares_head and not (lm_head and self.is_targets):
            shapes = shapes.replace(lm_head=None)
        return self.names(config, dialect, shapes)

    def load(
        self,
        folder: str | pathlib.Path,
        target: config_lib.ModelConfig,
        target_params: params_lib.Params,
        *,
        dtype: str | None = None,
        impl: str | None = None,
        weights: str | None = None,
    ) -> tuple[Any, Any]:
        """Reads a head's config and weights, and checks that it is the target's.

        Args:
          target_params: the head shares the target's embedding and output projection,
            the very arrays, where the folder has copies of them, or none. A block
            drafter always does, but for the projection to a vocabulary of its own.
          dtype: of the weights; the target's if None, and always of block drafters.
          impl: a resolved implementation, for whose kernels the weights are prepared.
          weights: with `impl`, a form to which products' matrices are rounded.

        Raises:
          CheckpointError: as `read_config`; a tensor that is missing,
            unknown, of another shape or not finite; a draft vocabulary that contradicts
            itself; copies that are not the target's.
          ValueError: another dtype than the target's, where that is shared.
        """
        folder = pathlib.Path(folder)
        if self.is_targets and dtype not in (None, target.dtype):
            raise ValueError(
                f"{dtype=}, but the drafter shares matrices with a target of "
                f"{target.dtype}: leave it out"
            )
        path = folder / "config.json"
        dialect, config = self.read_config(path, target, dtype=dtype)
        entries = _find(folder, dialect)
        names = self.tensors(
            config, dialect, embed=EMBED in entries, lm_head=LM_HEAD in entries
        )
        given: dict[str, Any] = {}
        for field in self.zeros:
            sources, leaf = getattr(names, field), getattr(config.shapes(), field)
            if sources is not None and sources.parts[0][0] not in entries:
                given[field] = jnp.zeros(leaf.shape, leaf.dtype)
        names = names.replace(**dict.fromkeys(given))
        _check_entries(folder, entries, names, config)
        given["hot"] = hot = _read_hot(folder, entries, config)
        must_match = self.is_targets or dialect == "deepspec"
        given |= _of_target(folder, entries, config, target_params, must_match)
        if not self.is_targets and LM_HEAD not in entries:
            rows = weights_lib.matrix(target_params.head)
            rows = rows if hot is None else rows[hot]
            given["lm_head"] = rows.astype(config.layer.dtype)
        elif config.layer.dtype != target.dtype:
            given.pop("lm_head", None)
        absent = dict.fromkeys(given)

        def one(leaf: jax.ShapeDtypeStruct, sources: params_lib.Parts) -> jax.Array:
            return jnp.array(load_shards.read_rows(leaf, sources, entries), copy=True)

        own = config.shapes().replace(**absent), names.replace(**absent)
        params = jax.tree.map(one, *own).replace(**given)
        if impl is not None:
            params = head_params.prepare(params, impl, form=weights)
        return config, params

    def save(
        self,
        folder: str | pathlib.Path,
        config: Any,
        params: Any,
        *,
        dialect: str,
        origin: head_dialects.Origin,
        copies: bool = True,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Writes what `load` reads back bit for bit, in a published dialect.

        Args:
          origin: the target and the training, which some dialects state.
          copies: whether a dialect that has copies of the target's embedding and output
            projection gets them. `load` takes both from the target; other readers may
            not.
          metadata: further entries of the file's `__metadata__`.

        Raises:
          ValueError: no such dialect, or a head that it cannot describe.
          CheckpointError: the files cannot be written.
        """
        self.check_config(config, dialect, origin.target)
        has_copies = copies and dialect in self.copies
        names = self.tensors(config, dialect, embed=has_copies, lm_head=has_copies)
        shared = ("hot", "embed", "lm_head")
        absent = [name for name in shared if getattr(names, name) is None]
        tensors = save_lib.pending(params.replace(**dict.fromkeys(absent)), names)
        if params.hot is not None:
            tensors += _pending_hot(np.asarray(params.hot), config.layer.vocab_size)
        save_lib.write_folder(
            pathlib.Path(folder),
            {files.SINGLE_FILE: tensors},
            {"config.json": self.to_dict(config, dialect, origin)},
            metadata=metadata,
        )


def _find(folder: pathlib.Path, dialect: str) -> dict[str, files.Entry]:
    """Returns the tensors of a folder, by the names that all dialects share.

    Raises:
      CheckpointError: as `checkpoint_files.find`, weights in a pickle alone, or an
        embedding of the mask.
    """
    if (folder / _MASK).exists():
        raise files.CheckpointError(
            f"{folder / _MASK}: drafters whose mask has an embedding of its own are "
            "not supported"
        )
    dtypes = files.DTYPES | files.WHOLE_DTYPES
    has_safetensors = any(folder.glob(f"{files.SINGLE_FILE}*"))
    if not has_safetensors and (folder / PICKLED).exists():
        raise files.CheckpointError(
            f"{folder}: {PICKLED} is a pickle, which is not read; in that folder run "
            f'python -c "{CONVERT}"'
        )
    entries = files.find(folder, dtypes=dtypes)
    prefix = _PREFIX if dialect == "specforge" else ""
    return {name.removeprefix(prefix): entry for name, entry in entries.items()}


def _check_entries(
    folder: pathlib.Path, entries: Mapping[str, files.Entry], names: Any, config: Any
) -> None:
    """Raises `CheckpointError` unless every tensor of a head is there, in its shape and
    kind, and no other; `names` is a tree of `params.Parts`."""
    expected = dict(part for leaf in jax.tree.leaves(names) for part in leaf.parts)
    V, Vd = config.layer.vocab_size, config.draft_vocab_size
    tables = {_TO_TARGET: (Vd,), _IS_KEPT: (V,)}
    required = [*expected, *(tables if Vd < V else ())]
    known = expected | tables
    biases = sorted(set(entries) - set(known))
    biases = [name for name in biases if name.endswith(".bias")]
    if biases:
        raise files.CheckpointError(
            f"{folder}: {files.some(biases)}: heads with biases are not supported"
        )
    files.check_names(
        folder,
        entries,
        required=required,
        known=known,
        source="config.json for this target",
    )
    for name, entry in entries.items():
        is_table = entry.dtype in files.WHOLE_DTYPES.values()
        if is_table != (name in tables):
            raise files.CheckpointError(f"{entry.path}: {name} is {entry.dtype}")


def _read_hot(
    folder: pathlib.Path, entries: Mapping[str, files.Entry], config: Any
) -> jax.Array | None:
    """Returns the target's token of each draft token, from the offsets that files hold;
    None where they are the same."""
    if _TO_TARGET not in entries:
        return None
    V, Vd = config.layer.vocab_size, config.draft_vocab_size
    offsets = np.empty((Vd,), entries[_TO_TARGET].dtype)
    tensor_values.read_into(entries[_TO_TARGET], offsets)
    hot = np.arange(Vd) + offsets.astype(np.int64)
    where = f"{entries[_TO_TARGET].path}: {_TO_TARGET}"
    outside = np.flatnonzero((hot < 0) | (hot >= V))
    if outside.size:
        draft = int(outside[0])
        raise files.CheckpointError(
            f"{where}[{draft}]={int(offsets[draft])} makes draft token {draft} the "
            f"token {int(hot[draft])}, of a vocabulary of {V}; download it again"
        )
    if len(np.unique(hot)) < Vd:
        raise files.CheckpointError(f"{where} has a token twice; download it again")
    if _IS_KEPT in entries:
        is_kept = np.empty((V,), entries[_IS_KEPT].dtype)
        tensor_values.read_into(entries[_IS_KEPT], is_kept)
        if np.count_nonzero(is_kept) != Vd or not is_kept[hot].all():
            raise files.CheckpointError(
                f"{folder}: {_IS_KEPT} marks {np.count_nonzero(is_kept)} tokens, "
                f"{_TO_TARGET} names {Vd}, and they are not the same; download it again"
            )
    if Vd == V and (hot == np.arange(V)).all():
        return None
    return jnp.asarray(hot, jnp.int32)


def _pending_hot(hot: np.ndarray, vocab_size: int) -> list[files.Pending]:
    """Returns the two tables of a draft vocabulary, to be written."""
    is_kept = np.zeros((vocab_size,), np.bool_)
    is_kept[hot] = True
    offsets = hot.astype(np.int64) - np.arange(len(hot))
    return [
        files.Pending(name=name, dtype=table.dtype, shape=table.shape, fetch=table.copy)
        for name, table in ((_TO_TARGET, offsets), (_IS_KEPT, is_kept))
    ]


def _of_target(
    folder: pathlib.Path,
    entries: Mapping[str, files.Entry],
    config: Any,
    target_params: params_lib.Params,
    must_match: bool,
) -> dict[str, weights_lib.Weight]:
    """Returns the target's arrays, by fields, that a folder has copies of or lacks.

    Args:
      must_match: whether a tensor in the place of the target's embedding is a copy.
    """
    given, embed, lm_head = {}, target_params.embed, target_params.head
    for field, name, ours, is_bound in (
        ("embed", EMBED, embed, must_match),
        ("lm_head", LM_HEAD, lm_head, config.shares_head),
    ):
        if name in entries and not _is_copy(entries[name], ours):
            if not is_bound:
                continue
            if not _is_rounded(entries, name, ours):
                raise files.CheckpointError(
                    f"{folder}: {name} is not the target's: it is a drafter for "
                    "another target"
                )
        given[field] = ours
    return given


def _is_copy(entry: files.Entry, ours: weights_lib.Weight) -> bool:
    """Returns whether a tensor, in the target's dtype, equals `ours`."""
    if entry.shape != tuple(ours.shape):
        return False
    buffer = np.empty(ours.shape, ours.dtype)
    tensor_values.read_into(entry, buffer)
    bits = f"u{buffer.dtype.itemsize}"
    known = np.asarray(weights_lib.matrix(ours))
    return np.array_equal(buffer.view(bits), known.view(bits))


def _is_rounded(
    entries: Mapping[str, files.Entry], name: str, ours: weights_lib.Weight
) -> bool:
    """Returns whether `ours` has blocks and is a file's tensor, rounded to blocks."""
    if not weights_lib.is_bytes(ours):
        return False
    leaf = jax.ShapeDtypeStruct(ours.shape, ours.dtype)
    sources = params_lib.Parts(((name, tuple(ours.shape)),))
    made = byte_weights.assemble(leaf, sources, entries, weights_lib.form(ours))
    same = jax.tree.map(jnp.array_equal, made, weights_lib.unpacked(ours))
    return all(jax.tree.leaves(same))
