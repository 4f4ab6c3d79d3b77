"""Lossless speculative decoding in JAX."""
