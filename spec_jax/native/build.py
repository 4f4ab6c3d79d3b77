"""Builds the C++ kernels on first use, once per machine and user, and loads them.

A library is keyed by everything that decides its bits: sources, compiler, flags,
jaxlib and instruction set. (Not by the processor: the flags name the instruction set,
and one that the processor lacks is refused.) Its file name ends in the hash of its
content, so that a damaged file is noticed before it is mapped. Several processes may
start at once: each builds in a folder of its own and renames, so that a reader never
sees half a file.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import pathlib
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import jaxlib.version


_FOLDER = pathlib.Path(__file__).parent
SOURCES = sorted(x.name for x in _FOLDER.iterdir() if x.suffix in (".h", ".cc"))
TARGETS = re.findall(
    r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+),",
    (_FOLDER / "kernels.cc").read_text(encoding="utf-8"),
)
"""The symbols of `kernels.cc` that XLA calls."""

# Contraction off: a product and a sum are one rounding only where the source says so.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
# The macros choose the code, the other flags let the compiler use the instructions.
_BF16 = ("-mavx512bf16", "-mavx512vnni", *_AVX512)
ISA_FLAGS = {
    "amx": ("-DSPEC_JAX_AMX", "-mamx-tile", "-mamx-bf16", *_BF16),
    "avx512bf16": ("-DSPEC_JAX_AVX512BF16", *_BF16),
    "avx512": ("-DSPEC_JAX_AVX512", *_AVX512),
    "avx2": ("-DSPEC_JAX_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
_NEEDS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
_NEEDS_BF16 = {"avx512_bf16", "avx512_vnni", *_NEEDS_AVX512}
_ISA_NEEDS = {
    "amx": {"amx_tile", "amx_bf16", *_NEEDS_BF16},
    "avx512bf16": _NEEDS_BF16,
    "avx512": _NEEDS_AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set(),
}
# Extensions that only make sums of integers faster, which are the same without. The
# processor's name, and the compiler's flag.
_FASTER = {
    "avx512": ("avx512_vnni", "-mavx512vnni"),
    "avx2": ("avx_vnni", "-mavxvnni"),
}

# An instruction of each, which an old assembler may not know.
_PROBES = {
    "amx": "tdpbf16ps %tmm2, %tmm1, %tmm0",
    "avx512bf16": "vdpbf16ps %zmm0, %zmm0, %zmm0",
    "avx512": "vandps %zmm0, %zmm0, %zmm0",
    "avx2": "vpaddd %ymm0, %ymm0, %ymm0",
    "portable": "",
}

# Compilers' messages about a full disk and an exhausted quota, where LC_ALL=C.
_FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
}

ISA_VARIABLE = "SPEC_JAX_ISA"
"""Names the instruction set of all kernels, instead of the widest that runs here."""

_loading = threading.Lock()
_in_use: str | None = None  # The set of kernels that were loaded without a name.


class BuildError(NotImplementedError):
    """The kernels cannot be built or loaded here; the message says why."""


@functools.cache
def cpu_features() -> frozenset[str]:
    """Lists this processor's instruction-set extensions, as Linux names them."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    flags = re.search(r"^flags[^:]*:(.*)", text, re.MULTILINE)
    return frozenset(flags[1].split() if flags else ())


def available_isas() -> tuple[str, ...]:
    """Lists the instruction sets that this machine can run, the widest first."""
    has = cpu_features()
    if "amx_tile" in has and not _may_use_tiles():
        has -= {"amx_tile"}
    return tuple(isa for isa in ISA_FLAGS if _ISA_NEEDS[isa] <= has)


@functools.cache
def _may_use_tiles() -> bool:
    """Asks Linux for AMX's registers, for all threads of the process.

    That is `ARCH_REQ_XCOMP_PERM` for `XTILEDATA` (the kernel's documentation,
    `arch/x86/xstate.rst`). Some containers and virtual machines refuse it.
    """
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def load(isa: str | None = None) -> str:
    """Builds if need be, loads and registers the kernels; returns the instruction set.

    Args:
      isa: one of `ISA_FLAGS`; None is that of `choose` or `$SPEC_JAX_ISA`, else the
        widest that this machine can run and its compiler can write.

    Raises:
      ValueError: not the name of an instruction set; or `$SPEC_JAX_ISA` is not, names
        one that this machine lacks, or has changed since kernels were loaded.
      BuildError: no compiler, a compiler that fails (with its message), no folder for
        the result, or an instruction set that this machine lacks.
    """
    global _in_use
    chosen = _default() if isa is None else isa
    _check(f"isa={chosen!r}", chosen, BuildError)
    with _loading:
        _load(chosen)
        if isa is None:
            _in_use = chosen
    return chosen


def choose(isa: str) -> None:
    """Makes `isa` the instruction set of all kernels.

    Sets `$SPEC_JAX_ISA`, so that processes started later use it, too. Call it before
    `dispatch.resolve`, which loads the kernels.

    Args:
      isa: one of `available_isas()`.

    Raises:
      ValueError: not the name of an instruction set, one that this machine lacks, or
        kernels of another one have been loaded.
    """
    _check_choice(f"instruction set {isa!r}", isa)
    os.environ[ISA_VARIABLE] = isa


def _default() -> str:
    """Returns the set that `load` takes by default; once loaded, it stays the same."""
    chosen = os.environ.get(ISA_VARIABLE)
    if chosen:
        _check_choice(f"{ISA_VARIABLE}={chosen}", chosen)
    return _in_use or chosen or _widest(find_compiler())


def _check(what: str, isa: str, error: type[Exception]) -> None:
    """Raises unless `isa` is known, and `error` unless this machine has it; `what`
    names it in the message."""
    if isa not in ISA_FLAGS:
        raise ValueError(f"{what} is not one of {', '.join(ISA_FLAGS)}")
    if isa not in available_isas():
        names = ", ".join(available_isas())
        raise error(f"{what}: this machine lacks it; it has {names}")


def _check_choice(what: str, isa: str) -> None:
    """Raises unless all kernels can be of `isa`."""
    _check(what, isa, ValueError)
    if _in_use not in (None, isa):
        raise ValueError(
            f"{what}: kernels for {_in_use} have been loaded; choose an instruction "
            "set before the first model is made"
        )


def target_name(target: str, isa: str) -> str:
    """Returns the registered name: each instruction set has its own targets."""
    return f"{target}_{isa}"


def find_compiler() -> tuple[str, ...]:
    """Finds the C++ compiler: `$CXX` where it is set, else g++, clang++ or c++.

    `$CXX` is a program, or words as in a shell: "ccache g++".

    Returns:
      The path of a program, and its first arguments.

    Raises:
      BuildError: no compiler is found.
    """
    asked = os.environ.get("CXX")
    for words in _asked_commands(asked) if asked else (["g++"], ["clang++"], ["c++"]):
        path = shutil.which(words[0])
        if path:
            return path, *words[1:]
    looked_for = f"CXX={asked}" if asked else "g++, clang++, c++, and $CXX is not set"
    raise BuildError(f"no C++ compiler found: looked for {looked_for}")


def _asked_commands(asked: str) -> list[list[str]]:
    """Returns the meanings of `$CXX`: a path with spaces, or a command of words."""
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise BuildError(f"CXX={asked} cannot be split into words: {error}") from None
    return [[asked], words] if words else [[asked]]


@functools.cache
def _widest(compiler: tuple[str, ...]) -> str:
    """Returns the first available set that the compiler and its assembler know."""
    for isa in available_isas():
        if _knows(compiler, ISA_FLAGS[isa], _PROBES[isa]):
            return isa
    return "portable"  # Its build raises the compiler's message.


def _knows(
    compiler: Sequence[str], flags: Sequence[str], instruction: str = ""
) -> bool:
    """Returns whether the compiler knows the flags, its assembler the instruction."""
    # -pipe: g++ would write to the temporary folder, and where that is full no set
    # would seem to be known.
    flags = [*flags, "-pipe", "-x", "c++", "-c", "-", "-o", os.devnull]
    return _run([*compiler, *flags], source=f'asm("{instruction}");').returncode == 0


@functools.cache
def _flags_of(compiler: tuple[str, ...], isa: str) -> tuple[str, ...]:
    """Returns an instruction set's flags, and that of `_FASTER` if it helps here."""
    feature, flag = _FASTER.get(isa, ("", ""))
    if feature in cpu_features() and _knows(compiler, (flag,)):
        return *ISA_FLAGS[isa], flag
    return ISA_FLAGS[isa]


@functools.cache
def _load(isa: str) -> None:
    if not hasattr(os, "getuid"):
        raise BuildError(f"no native kernels on {platform.system()}: xla runs there")
    library = open_library(find_compiler(), isa)
    for target in TARGETS:
        jax.ffi.register_ffi_target(
            target_name(target, isa),
            jax.ffi.pycapsule(getattr(library, target)),
            platform="cpu",
        )


def open_library(compiler: Sequence[str], isa: str) -> ctypes.CDLL:
    """Opens the library for `isa`, from the first cache folder that works.

    A folder does not work if it cannot be written, is full, is not safe, or is on a
    disk from which nothing may be executed.

    Args:
      compiler: as `find_compiler` returns it.

    Raises:
      BuildError: the compiler fails, or no folder works; the message says why.
    """
    prefix = f"spec_jax_{isa}_{_key(compiler, isa)}_"
    reasons = []
    try:
        for folder in _cache_folders():
            try:
                return _open_from(folder, compiler, isa, prefix)
            except OSError as error:
                reasons.append(f"{folder}: {error}")
    except FileNotFoundError as error:  # No folder for temporary files is writable.
        reasons.append(str(error))
    raise BuildError("no folder can hold the native kernels: " + "; ".join(reasons))


def _open_from(
    folder: pathlib.Path, compiler: Sequence[str], isa: str, prefix: str
) -> ctypes.CDLL:
    """Opens a cache folder's library; builds it there if it is missing."""
    _make_private(folder)
    path = _find(folder, prefix) or _compile(compiler, isa, folder, prefix)
    library = ctypes.CDLL(str(path))
    missing = [target for target in TARGETS if not hasattr(library, target)]
    if missing:
        path.unlink(missing_ok=True)
        raise BuildError(
            f"{shlex.join(compiler)} wrote a library without {', '.join(missing)}"
        )
    return library


def _cache_folders() -> Iterator[pathlib.Path]:
    """Lists the folders for libraries, in order of preference.

    The last is looked for when it is its turn: `FileNotFoundError` if it is missing.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # Relative ones are to be ignored, says the standard.
        yield pathlib.Path(base) / "spec_jax"
    elif os.path.isabs(os.path.expanduser("~")):
        yield pathlib.Path.home() / ".cache" / "spec_jax"
    yield pathlib.Path(tempfile.gettempdir()) / f"spec_jax-{os.getuid()}"


def _make_private(folder: pathlib.Path) -> None:
    """Makes `folder`; raises `OSError` unless this user alone can write to it.

    Code is run from it, and any user can make a folder among the temporary ones.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError("not a folder")
    if facts.st_uid != os.getuid():
        raise PermissionError(f"belongs to user {facts.st_uid}, not {os.getuid()}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(facts.st_mode)
        raise PermissionError(f"mode {mode:03o} lets others write")


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _find(folder: pathlib.Path, prefix: str) -> pathlib.Path | None:
    """Finds a whole library in `folder`, or None. Damaged ones are removed."""
    for path in sorted(folder.glob(f"{prefix}*.so")):
        try:
            digest = _digest(path)
        except FileNotFoundError:  # Another process found it damaged, too.
            continue
        if path.name == f"{prefix}{digest}.so":
            return path
        path.unlink(missing_ok=True)
    return None


def _compile(
    compiler: Sequence[str], isa: str, folder: pathlib.Path, prefix: str
) -> pathlib.Path:
    logging.getLogger(__name__).warning(
        "building the native kernels for %s with %s, once, in about half a minute; "
        "they are kept in %s",
        isa,
        shlex.join(compiler),
        folder,
    )
    for left in folder.glob("*.partial"):  # By a process that was killed.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, suffix=".partial") as scratch:
        partial = pathlib.Path(scratch) / "kernels.so"
        command = [
            *compiler,
            *FLAGS,
            *_flags_of(tuple(compiler), isa),
            f"-I{jax.ffi.include_dir()}",
            str(_FOLDER / "kernels.cc"),
            "-o",
            str(partial),
        ]
        # The compiler's own temporary files are as large: on the same disk.
        result = _run(command, LC_ALL="C", TMPDIR=scratch)
        for number, text in _FULL.items():
            if text in result.stderr:
                raise OSError(number, text)
        if result.returncode:
            name, status = shlex.join(compiler), result.returncode
            raise BuildError(f"{name} failed with status {status}:\n{result.stderr}")
        path = folder / f"{prefix}{_digest(partial)}.so"
        os.replace(partial, path)
    return path


def _key(compiler: Sequence[str], isa: str) -> str:
    """Hashes what decides the bits of a library."""
    digest = hashlib.sha256()
    facts = (
        *compiler,
        _run([*compiler, "--version"], LC_ALL="C").stdout,
        *FLAGS,
        *_flags_of(tuple(compiler), isa),
        jaxlib.version.__version__,
        platform.machine(),
    )
    texts = ((_FOLDER / name).read_text(encoding="utf-8") for name in SOURCES)
    for fact in (*facts, *texts):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:20]


def _run(
    command: list[str], *, source: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            command,
            input=source,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=os.environ | environment,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
