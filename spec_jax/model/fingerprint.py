"""Computes a fingerprint of weights: one hash of all parameters' names and bytes."""

import hashlib

import jax
import numpy as np

from spec_jax.model import params as params_lib
from spec_jax.ops import weights


def of_params(params: params_lib.Params) -> str:
    """Hashes parameters (SHA-256, 64 hexadecimal digits). Outside jit only.

    The hash is over each array's path in the pytree, dtype, shape and bytes, in the
    pytree's order: the same weights in another dtype have another fingerprint, and so
    do weights of which one bit differs. Weights that are prepared for an implementation
    keep the fingerprint that they had before. Arrays are fetched one at a time.
    """
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=weights.is_weight)
    for path, leaf in leaves:
        # Weights of blocks have several parts: integers, scales, minima.
        for part in jax.tree.leaves(weights.unpacked(leaf)):
            value = np.ascontiguousarray(part)
            head = f"{jax.tree_util.keystr(path)} {value.dtype.name} {value.shape}\n"
            digest.update(head.encode())
            # As bytes: hashlib does not take the buffer of a bfloat16 array.
            digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
