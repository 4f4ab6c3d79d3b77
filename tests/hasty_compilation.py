"""Programs compiled in half the time, for tests that prove nothing about compilers.

The loops of rounds are dozens of small fusions of bookkeeping each, and most of the
time of a test is XLA making machine code of them. Without LLVM's passes, and with the
older of XLA's two emitters, it takes half as long. Operations and their order are the
program's, as always; but XLA's own kernels may sum in another order than users' do,
so that files of tests whose subject are such bits are marked `optimized`.
"""

import os

import jax
from jax._src import compiler


FLAG = "jax_disable_most_optimizations"
OPTIONS = {"xla_cpu_use_fusion_emitters": False}

# There is no public way to give options to every jitted function of a package.
_get_compile_options = compiler.get_compile_options


def is_on() -> bool:
    return compiler.get_compile_options is _hasty_options


def switch(on: bool) -> None:
    """Compiles in haste from now on, or no longer; no effect but on a CPU."""
    if jax.default_backend() != "cpu":
        return
    if is_on() != on:
        jax.clear_caches()  # Options are no part of the key of what is in memory.
    compiler.get_compile_options = _hasty_options if on else _get_compile_options
    jax.config.update(FLAG, on)
    os.environ[FLAG.upper()] = str(int(on))  # For processes that tests start.


def _hasty_options(*args, env_options_overrides=None, **kwargs):
    overrides = OPTIONS | dict(env_options_overrides or {})
    return _get_compile_options(*args, env_options_overrides=overrides, **kwargs)
