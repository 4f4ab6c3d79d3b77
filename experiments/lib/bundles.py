"""Replay bundles: a scene, how it was run and what came out, in one file.

A bundle holds everything but the weights, which it knows by their fingerprint: it is
run again where the same model lies, on another machine or another version.
"""

import dataclasses
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.lib import files, records, scenes
from spec_jax.debug.microscope import faults, record as record_lib, scene as scene_lib
from spec_jax.model import config as config_lib


FORMAT = 2
"""Of the files that are written, and the only one that is read."""

_META = "meta"
_OWN = "own_"  # begins the names of the second side's keys and values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """What is run again."""

    # What each side starts from: one and the same text and window, and the same keys
    # and values before it or others (`questions.Question`)
    scenes: tuple[scene_lib.Scene, scene_lib.Scene]
    history: str  # of `scenes.HISTORIES`
    # The two ways, with resolved implementations
    sides: tuple[scenes.Side, scenes.Side]
    fault: faults.Fault | None
    layers: tuple[int, ...]  # those that were looked at
    config: Mapping[str, Any]  # of the model, as `config.to_dict`
    weights_sha256: tuple[str, str]  # of the weights in the dtype of each side
    digests: tuple[str, str]  # `digest_of` both records
    # Where the bundle comes from (`records.provenance`), and the flags
    provenance: Mapping[str, Any]


def digest_of(record: record_lib.Record) -> str:
    """SHA-256 of every value of a record: two runs agree in it or in no bit less."""
    digest = hashlib.sha256()
    for key, value in record.values.items():
        digest.update(f"{key} {value.dtype.name} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8))
    return digest.hexdigest()


def save(path: pathlib.Path, bundle: Bundle) -> None:
    """Writes a bundle, a `.npz` file."""
    scene, own = bundle.scenes
    parts = {"": scene} if _have_same_bits(scene, own) else {"": scene, _OWN: own}
    meta = {
        "format": FORMAT,
        "history": bundle.history,
        "sides": [dataclasses.asdict(side) for side in bundle.sides],
        "fault": None if bundle.fault is None else dataclasses.asdict(bundle.fault),
        "layers": bundle.layers,
        "config": bundle.config,
        "weights_sha256": bundle.weights_sha256,
        "digests": bundle.digests,
        "provenance": bundle.provenance,
        "dtypes": {part: each.k[0].dtype.name for part, each in parts.items()},
        "num_layers": len(scene.k),
    }
    arrays = {
        _META: np.asarray(json.dumps(records.to_json(meta, "bundle"))),
        "prefix": np.asarray(scene.prefix, np.int32),
        "window": np.asarray(scene.window, np.int32),
    }
    for part, each in parts.items():
        for number, (k, v) in enumerate(zip(each.k, each.v, strict=True)):
            # As bytes: the format has no bfloat16.
            arrays[f"{part}k_{number}"] = _as_bytes(k)
            arrays[f"{part}v_{number}"] = _as_bytes(v)
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None


def _have_same_bits(one: scene_lib.Scene, other: scene_lib.Scene) -> bool:
    pairs = zip((*one.k, *one.v), (*other.k, *other.v), strict=True)
    return all(
        x.dtype == y.dtype and np.array_equal(_as_bytes(x), _as_bytes(y))
        for x, y in pairs
    )


def load(path: pathlib.Path) -> Bundle:
    """Reads a bundle.

    Raises:
      ValueError: no bundle, one of another format, or one that is damaged.
    """
    try:
        data = files.read(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        # With pickle a file could run what it likes.
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays[_META]))
        if meta["format"] != FORMAT:
            raise ValueError(f"of format {meta['format']}, and {FORMAT} is read")
        return _bundle_of(meta, arrays)
    except (
        *(ValueError, KeyError, TypeError, EOFError, AttributeError),
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{path}: no replay bundle ({error}); --save-bundle writes them"
        ) from None


def _bundle_of(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Bundle:
    made = {
        part: scene_lib.Scene(
            prefix=tuple(arrays["prefix"].tolist()),
            window=tuple(arrays["window"].tolist()),
            **{
                name: tuple(
                    _from_bytes(arrays[f"{part}{name}_{number}"], np.dtype(dtype))
                    for number in range(meta["num_layers"])
                )
                for name in "kv"
            },
        )
        for part, dtype in meta["dtypes"].items()
    }
    first, second = (scenes.Side(**side) for side in meta["sides"])
    return Bundle(
        scenes=(made[""], made.get(_OWN, made[""])),
        history=meta["history"],
        sides=(first, second),
        fault=None if meta["fault"] is None else faults.Fault(**meta["fault"]),
        layers=tuple(meta["layers"]),
        config=meta["config"],
        weights_sha256=tuple(meta["weights_sha256"]),
        digests=tuple(meta["digests"]),
        provenance=meta["provenance"],
    )


def check_model(
    bundle: Bundle, config: config_lib.Qwen3Config, weights_sha256: tuple[str, str]
) -> None:
    """Raises `ValueError` unless the model and its weights are the bundle's."""
    differences = ", ".join(
        f"{key} {value} and not {bundle.config.get(key)}"
        for key, value in config_lib.to_dict(config).items()
        if value != bundle.config.get(key)
    )
    if differences:
        raise ValueError(f"the bundle is of another model: this one has {differences}")
    if weights_sha256 != bundle.weights_sha256:
        raise ValueError(
            "the bundle is of other weights: their sha256 begins with "
            f"{bundle.weights_sha256[0][:12]}, that of these with "
            f"{weights_sha256[0][:12]}; name the folder with --target"
        )


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """`x` with a last axis of bytes; an empty one too."""
    return np.ascontiguousarray(x)[..., None].view(np.uint8)


def _from_bytes(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(x).view(dtype)[..., 0]
