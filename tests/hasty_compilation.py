"""Programs compiled in less time, for tests that prove nothing about compilers.

The loops of rounds are dozens of small fusions of bookkeeping each, and most of the
time of a test is XLA making machine code of them, less of it without LLVM's passes.
Operations and their order are the program's, as always; but XLA's own kernels may sum
in another order than users' do, so that files of tests whose subject are such bits are
marked `optimized`.
"""

import os

import jax


FLAG = "jax_disable_most_optimizations"


def is_on() -> bool:
    return jax.config.read(FLAG)


def switch(on: bool) -> None:
    """Compiles in haste from now on, or no longer; no effect but on a CPU."""
    if jax.default_backend() != "cpu":
        return
    if is_on() != on:
        jax.clear_caches()  # The flag is no part of the key of what is in memory.
    jax.config.update(FLAG, on)
    os.environ[FLAG.upper()] = str(int(on))  # For processes that tests start.
