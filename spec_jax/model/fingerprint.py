"""A fingerprint of weights: one hash over the names and bytes of all parameters."""

import hashlib

import jax
import numpy as np

from spec_jax.model import params as params_lib
from spec_jax.ops import weights


def of_params(params: params_lib.Params) -> str:
    """Hashes parameters (SHA-256, 64 hexadecimal digits). Outside jit only.

    Over each array's path in the pytree, dtype, shape and bytes, in the order of the
    pytree: the same weights in another dtype have another fingerprint, and so do
    weights of which one bit differs. Weights that were prepared for an implementation
    have that of the arrays that they were. Arrays are fetched one at a time.
    """
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=weights.is_weight)
    for path, leaf in leaves:
        # The integers and the scales of weights of eight bits.
        for part in jax.tree.leaves(weights.unpacked(leaf)):
            value = np.ascontiguousarray(part)
            head = f"{jax.tree_util.keystr(path)} {value.dtype.name} {value.shape}\n"
            digest.update(head.encode())
            # As bytes: hashlib does not take the buffer of a bfloat16 array.
            digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
