"""GPU kernels, one file per op and backend: they know arrays, and nothing of models."""
