"""The rotary frequencies that a config asks for."""

import numpy as np

from spec_jax.model import config as config_lib, families


def rope_table(config: config_lib.ModelConfig) -> tuple[np.ndarray, float]:
    """Returns inverse frequencies `[H/2]` and the scale of cos and sin for `config`."""
    return families.of(config).rope_table(config)
