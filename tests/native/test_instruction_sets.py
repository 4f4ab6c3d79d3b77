"""The kernels' instruction sets: the choice of one, and what is compiled for it."""

import os
import pathlib
import platform
import subprocess

import decoding
import jax
import pytest

from spec_jax.native import build
from spec_jax.ops import dispatch


AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "avx2"}
BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
AMX = BF16 | {"amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("features", "may_use_tiles", "widest"),
    [
        (AMX, True, "amx"),
        # Where Linux refuses AMX's registers, its first instruction kills the process.
        (AMX, False, "avx512bf16"),
        (BF16, True, "avx512bf16"),
        (AVX512, True, "avx512"),
        ({"avx512_bf16", "avx512f", "avx2", "fma", "f16c"}, True, "avx2"),
        ({"avx2"}, True, "portable"),
    ],
)
def test_the_widest_set_is_chosen(monkeypatch, features, may_use_tiles, widest):
    """Fails if a set is chosen that the processor lacks, or a narrower one."""
    monkeypatch.setattr(build, "_may_use_tiles", lambda: may_use_tiles)
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(features))
    assert build.available_isas()[0] == widest
    assert build.available_isas()[-1] == "portable"


def compiler(path, script: str) -> tuple[str]:
    """Makes a compiler that is a shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


@pytest.mark.parametrize(
    ("script", "widest"),
    [
        ('case "$*" in *-mamx-tile*) exit 1;; esac', "avx512bf16"),
        ('case "$*" in *-mavx512bf16*) exit 1;; esac', "avx512"),
        ('case "$*" in *-*) exit 1;; esac', "portable"),
        # The compiler may be newer than its assembler.
        ('if grep -q "[tv]dpbf16ps"; then exit 1; fi', "avx512"),
    ],
)
def test_a_set_that_the_compiler_does_not_know(monkeypatch, tmp_path, script, widest):
    """Fails if an old compiler or assembler costs more than the newest instructions."""
    available = ("amx", "avx512bf16", "avx512", "portable")
    monkeypatch.setattr(build, "available_isas", lambda: available)
    assert build._widest(compiler(tmp_path / "old", script)) == widest


def test_an_extension_that_changes_no_bits(monkeypatch, tmp_path):
    """Fails if an extension is used on a processor, or by a compiler, without it."""
    flags_of = build._flags_of.__wrapped__
    old = compiler(tmp_path / "old", 'case "$*" in *vnni*) exit 1;; esac')
    new = compiler(tmp_path / "new", "exit 0")
    features = frozenset({"avx512_vnni"})
    monkeypatch.setattr(build, "cpu_features", lambda: features)
    plain = build.ISA_FLAGS["avx512"]
    assert flags_of(new, "avx512") == (*plain, "-mavx512vnni")
    assert flags_of(old, "avx512") == plain
    assert flags_of(new, "avx2") == build.ISA_FLAGS["avx2"]
    monkeypatch.setattr(build, "cpu_features", frozenset)
    assert flags_of(new, "avx512") == plain


def test_the_compiler_here_knows_the_probes():
    """Fails if a probe does not assemble: the widest set would be portable."""
    available = build.available_isas()
    assert build._widest(tuple(build.find_compiler())) == available[0]


@pytest.fixture
def loads(unloaded, monkeypatch) -> list[str]:
    """Lists the sets that are loaded, of three that this machine is said to have."""
    loaded = []
    monkeypatch.setattr(build, "_load", loaded.append)
    monkeypatch.setattr(build, "available_isas", lambda: ("avx512", "avx2", "portable"))
    monkeypatch.setattr(build, "_widest", lambda _: "avx512")
    monkeypatch.setattr(build, "find_compiler", lambda: ("cc",))
    return loaded


def test_a_chosen_instruction_set(loads, monkeypatch):
    """Fails if the set given to `choose` is not loaded, or not put in the variable."""
    monkeypatch.setenv("SPEC_JAX_ISA", "portable")
    build.choose("avx2")
    assert os.environ["SPEC_JAX_ISA"] == "avx2"  # For processes started from here.
    assert build.load() == build.load() == "avx2"
    assert build.load("portable") == "portable"
    assert loads == ["avx2", "avx2", "portable"]


def test_no_chosen_instruction_set(loads):
    """Fails if an empty variable is taken for a name."""
    with pytest.raises(ValueError, match="isa='' is not one of amx, avx512bf16, a"):
        build.load("")
    assert build.load() == "avx512"


@pytest.mark.parametrize(
    ("isa", "error", "message"),
    [
        ("avx9", ValueError, "is not one of amx, avx512bf16, avx512, avx2, portable"),
        ("avx512bf16", build.BuildError, "this machine lacks it; it has avx512, avx2"),
    ],
)
def test_an_instruction_set_that_cannot_be_chosen(
    loads, monkeypatch, isa, error, message
):
    """Fails if such code is loaded, whose first instruction would kill the process; if
    another set runs instead, or "auto" falls back to XLA."""
    with pytest.raises(error, match=isa):
        build.load(isa)
    with pytest.raises(ValueError, match=f"instruction set '{isa}'.*{message}"):
        build.choose(isa)
    monkeypatch.setenv("SPEC_JAX_ISA", isa)
    monkeypatch.setattr(dispatch, "_choose", dispatch._choose.__wrapped__)
    for impl in ("auto", "native"):
        with pytest.raises(ValueError, match=f"SPEC_JAX_ISA={isa}.*{message}"):
            dispatch.resolve(impl)
    assert loads == []


def test_an_instruction_set_that_is_chosen_too_late(loads, monkeypatch):
    """Fails if one process runs two sets, the second not asked for by name, or if a
    build that fails decides for later ones."""
    with monkeypatch.context() as patch:
        patch.setattr(build, "_load", lambda isa: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build.load()
    build.choose("portable")
    assert build.load() == "portable"
    with pytest.raises(ValueError, match="'avx2': kernels for portable have been lo"):
        build.choose("avx2")
    monkeypatch.setenv("SPEC_JAX_ISA", "avx2")
    with pytest.raises(ValueError, match="SPEC_JAX_ISA=avx2: kernels for portable h"):
        build.load()


def compile_kernels(instructions: str, *more: str) -> str:
    """Compiles for `instructions`, or skips; returns the compiler's messages."""
    if platform.machine() != "x86_64":
        pytest.skip("no AVX-512 to compile for on this machine")
    decoding.needs("native")
    flags = (*build.FLAGS, *build.ISA_FLAGS[instructions], "-O0")  # The last -O counts.
    source = pathlib.Path(build.__file__).with_name("kernels.cc")
    includes = f"-I{jax.ffi.include_dir()}"
    command = [*build.find_compiler(), *flags, includes, *more, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.slow
def test_avx512_compiles(tmp_path):
    """Fails if plain AVX-512 code needs another extension, or bfloat16 is multiplied by
    other instructions: the emulation, with its own intrinsics, cannot show it."""
    assert not compile_kernels("avx512", "-fsyntax-only")
    assembly = tmp_path / "kernels.s"
    others = {"avx512bf16": "tdpbf16ps", "amx": "vdpbf16ps"}
    for isa, other in others.items():
        compile_kernels(isa, "-S", "-o", str(assembly))
        text = assembly.read_text()
        assert "%zmm" in text and other not in text
        assert next(iter({*others.values()} - {other})) in text
