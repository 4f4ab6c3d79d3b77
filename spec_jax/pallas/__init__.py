"""GPU kernels, one file per op: they know arrays, and nothing of models."""

# From jax 0.11 on, the first kernel that is interpreted imports this, and the import
# invalidates what was traced before: without it, every program that was traced by then
# is traced and compiled twice (`tests/pallas/test_first_interpreted.py`).
import jax.experimental.pallas.fuser  # noqa: F401
