"""Builds the C++ kernels on first use, once per machine and user, and loads them.

The library is keyed by everything that decides its bits: sources, compiler, flags,
jaxlib and instruction set. Several processes may start at once: each builds under a
name of its own and renames, so that a reader never sees half a file.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import jax
import jaxlib


SOURCES = ("kernels.cc", "gemm.h", "attention.h", "parallel.h", "simd.h")
TARGETS = ("spec_jax_project", "spec_jax_gate", "spec_jax_attend")

# Contraction off: a product and a sum are one rounding only where the source says so.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
ISA_FLAGS = {
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
_ISA_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"},
    "avx2": {"avx2", "fma"},
    "portable": set(),
}


class BuildError(NotImplementedError):
    """The kernels cannot be built or loaded here; the message says why."""


@functools.cache
def cpu_features() -> frozenset[str]:
    """Instruction-set extensions of this processor, as Linux names them."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this machine can run, the widest first."""
    return tuple(isa for isa in ISA_FLAGS if _ISA_NEEDS[isa] <= cpu_features())


def find_compiler() -> str:
    """The path of a C++ compiler: `$CXX`, g++, clang++ or c++.

    Raises:
      BuildError: there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = name and shutil.which(name)
        if path:
            return path
    raise BuildError("no C++ compiler found (looked for $CXX, g++, clang++ and c++)")


@functools.cache
def load(isa: str | None = None) -> str:
    """Builds if need be, loads and registers the kernels; returns the instruction set.

    Args:
      isa: one of `ISA_FLAGS`; the widest that this machine can run if None.

    Raises:
      BuildError: no compiler, a compiler that fails (with its message), or an
        instruction set that this machine lacks.
    """
    isa = isa or available_isas()[0]
    if isa not in available_isas():
        raise BuildError(f"this machine cannot run {isa} code: {available_isas()}")
    library = ctypes.CDLL(str(_build(isa)))
    for target in TARGETS:
        jax.ffi.register_ffi_target(
            target_name(target, isa),
            jax.ffi.pycapsule(getattr(library, target)),
            platform="cpu",
        )
    return isa


def target_name(target: str, isa: str) -> str:
    """The registered name: each instruction set has targets of its own."""
    return f"{target}_{isa}"


def _build(isa: str) -> pathlib.Path:
    """The path of the library for `isa`, compiled now if it is not in the cache."""
    compiler = find_compiler()
    folder = pathlib.Path(__file__).parent
    command = [
        compiler,
        *_FLAGS,
        *ISA_FLAGS[isa],
        f"-I{jax.ffi.include_dir()}",
        str(folder / "kernels.cc"),
    ]
    name = f"spec_jax_{isa}_{_key(compiler, isa, folder)}.so"
    for cache in _cache_folders():
        if (cache / name).exists():
            return cache / name
        try:
            cache.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=cache, suffix=".partial")
        except OSError:
            continue  # A read-only folder or a full disk: the next one may do.
        os.close(handle)
        try:
            _run([*command, "-o", partial])
            os.replace(partial, cache / name)
        finally:
            pathlib.Path(partial).unlink(missing_ok=True)
        return cache / name
    raise BuildError(
        f"no folder can be written: {', '.join(map(str, _cache_folders()))}"
    )


def _cache_folders() -> tuple[pathlib.Path, ...]:
    """Where libraries are kept, in order of preference."""
    base = os.environ.get("XDG_CACHE_HOME")
    home = pathlib.Path(base) if base else pathlib.Path.home() / ".cache"
    return home / "spec_jax", pathlib.Path(tempfile.gettempdir()) / _user_folder()


def _user_folder() -> str:
    return f"spec_jax-{os.getuid()}"


def _key(compiler: str, isa: str, folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    facts = (
        *_FLAGS,
        *ISA_FLAGS[isa],
        version.stdout.decode(errors="replace"),
        jaxlib.__version__,
        platform.machine(),
    )
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    for source in SOURCES:
        digest.update((folder / source).read_bytes())
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(
            f"{command[0]} failed with status {result.returncode}:\n{result.stderr}"
        )
