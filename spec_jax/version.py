"""The version of the package, read by `pyproject.toml` and `spec_jax.__version__`."""

__version__ = "0.2.0"
