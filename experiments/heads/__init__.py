"""Heads: the families that are trained, their rollouts, prompts and cards."""

from experiments.lib import cli


cli.require("train")
