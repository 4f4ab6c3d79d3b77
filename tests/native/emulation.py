"""Instruction sets that this processor lacks, by SIMD Everywhere (libsimde-dev).

`emulated_avx512.h` takes the place of the compiler's intrinsics; the kernels are built
as always, kept in the same cache, and registered under names of their own.
"""

import functools
import hashlib
import os
import pathlib
import subprocess

import pytest

from spec_jax.native import build


HEADER = pathlib.Path(__file__).with_name("emulated_avx512.h")
PROBE = """
#if !__has_include(<simde/x86/avx512.h>)
#error no SIMD Everywhere
#endif
"""
# Inlined and optimised, thousands of emulated instructions take minutes to compile.
_QUICK = ("-O0", "-DSIMDE_NO_INLINE", "-Wno-psabi")
_HASH = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:20]
FLAGS = {
    f"emulated_{isa}": (
        f"-DSPEC_JAX_{isa.upper()}",
        f'-DSPEC_JAX_INTRINSICS="{HEADER}"',
        f"-DHASH_OF_INTRINSICS={_HASH}",  # makes it part of the library's key
        *_QUICK,
    )
    for isa in ("amx", "avx512bf16", "avx512")
}
# Variants of two sets: one lacks the extension that sums integers faster; the other has
# the code for AVX-VNNI, with the AVX-512 encoding of the same instruction.
_AVX512_VL = ("-mavx512f", "-mavx512vl", "-mavx512vnni")
_OTHER_CODE = ("-D__AVXVNNI__", "-D_mm256_dpbusd_avx_epi32=_mm256_dpbusd_epi32")
VARIANTS = {
    "avx512_plain": ("avx512", ()),
    "avx2_vnni": ("avx2", (*_OTHER_CODE, *_AVX512_VL)),
}


def every(*, amx: bool = False) -> tuple[str, ...]:
    """Returns this processor's instruction sets, then those it lacks, emulated.

    Args:
      amx: whether AMX is emulated, too: only its products are not AVX512-BF16's.
    """
    own, lacking = build.available_isas(), list(FLAGS)[not amx :]
    return (*own, *(x for x in lacking if x.removeprefix("emulated_") not in own))


def load(isa: str | None, monkeypatch) -> str:
    """Loads the kernels of a set, the widest if None; skips without a compiler."""
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    if isa in FLAGS:
        install(isa, monkeypatch)
    if isa in VARIANTS:
        if "avx512_vnni" not in build.cpu_features():
            pytest.skip(f"{isa}: this processor has no AVX512-VNNI")
        plain, flags = VARIANTS[isa]
        monkeypatch.setitem(build.ISA_FLAGS, isa, build.ISA_FLAGS[plain] + flags)
        monkeypatch.setitem(build._ISA_NEEDS, isa, set())
    return build.load(isa)


@functools.cache
def _is_installed() -> bool:
    command = [*build.find_compiler(), "-x", "c++", "-E", "-"]
    probed = subprocess.run(
        command, input=PROBE, capture_output=True, text=True, check=False
    )
    return probed.returncode == 0


def install(isa: str, monkeypatch) -> None:
    """Makes `isa`, one of `FLAGS`, an instruction set for this test only. Skips without
    SIMD Everywhere, or fails where `SPEC_JAX_REQUIRE_SIMDE=1` is set."""
    if not _is_installed():
        message = "no SIMD Everywhere (Debian: libsimde-dev) to emulate AVX-512 with"
        if os.environ.get("SPEC_JAX_REQUIRE_SIMDE") == "1":
            pytest.fail(message)
        pytest.skip(message)
    monkeypatch.setitem(build.ISA_FLAGS, isa, FLAGS[isa])
    monkeypatch.setitem(build._ISA_NEEDS, isa, set())


def main() -> None:
    """Builds the kernels for every instruction set that tests run. Run it before tests
    in several processes, each of which would build all of them."""
    with pytest.MonkeyPatch.context() as patch:
        for isa in every(amx=True):
            load(isa, patch)


if __name__ == "__main__":
    main()
