"""Heads: the families that are trained, their rollouts, prompts and cards."""
