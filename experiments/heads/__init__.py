"""Heads: the families that are trained, their rollouts, prompts and cards.

Everywhere `args` are flags of `train_drafter.py`.
"""

from experiments.lib import cli


cli.require("train")
