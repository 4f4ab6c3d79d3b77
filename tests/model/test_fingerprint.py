"""The fingerprint of weights: the same for the same bits, and for no others."""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.model import fingerprint, params as params_lib


PARAMS = params_lib.cast(decoding.TARGET_PARAMS, "bfloat16")
PARAMS = PARAMS.replace(final_norm=PARAMS.final_norm.at[0].set(0.0))
FIRST, *REST = PARAMS.layers


def test_copies_have_one_fingerprint():
    """Fails if the fingerprint depends on the identity or the place of arrays."""
    copied = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), PARAMS)
    found = fingerprint.of_params(PARAMS)
    assert found == fingerprint.of_params(copied)
    assert len(found) == 64 and set(found) <= set("0123456789abcdef")


def first_layer(**changes):
    return PARAMS.replace(layers=(FIRST.replace(**changes), *REST))


CHANGED = {
    "one bit": lambda: first_layer(
        down=FIRST.down.at[3, 5].set(jnp.nextafter(FIRST.down[3, 5], jnp.bfloat16(9)))
    ),
    "two arrays exchanged": lambda: first_layer(
        input_norm=FIRST.mlp_norm * 2, mlp_norm=FIRST.input_norm
    ),
    "layers exchanged": lambda: PARAMS.replace(layers=PARAMS.layers[::-1]),
    "a shape": lambda: first_layer(down=FIRST.down.reshape(-1)),
    "a head of its own": lambda: PARAMS.replace(lm_head=PARAMS.embed),
    "the sign of a zero": lambda: PARAMS.replace(
        final_norm=PARAMS.final_norm.at[0].set(-0.0)
    ),
    "the dtype": lambda: params_lib.cast(PARAMS, "float32"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_other_weights_have_another_fingerprint(change):
    assert fingerprint.of_params(CHANGED[change]()) != fingerprint.of_params(PARAMS)
