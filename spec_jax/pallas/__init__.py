"""GPU kernels, one file per op; they take arrays and import no model."""

# From jax 0.11 on, the first kernel that is interpreted imports this module, and the
# import invalidates what was traced before: without this line, every program that was
# traced by then is traced and compiled twice.
import jax.experimental.pallas.fuser  # noqa: F401
