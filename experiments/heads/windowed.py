"""The head that is shipped for a target, with a window: a drafter for `--drafter
experiments.heads.windowed:eagle3`, which keeps no keys behind its last 640."""

import dataclasses

from spec_jax.drafters import registry


WINDOW = 640  # tokens: the length of the texts that the shipped head was trained on


def eagle3(parts: registry.Parts) -> registry.Built:
    """Returns the EAGLE-3 head of `parts`, each row of which sees `WINDOW` keys."""
    drafter, params = registry.build("eagle3", parts)
    head = dataclasses.replace(drafter.head, window=WINDOW)
    return dataclasses.replace(drafter, head=head), params
