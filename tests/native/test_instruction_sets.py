"""Which instruction set the kernels are of: the widest, or one that is asked for."""

import os

import pytest

from spec_jax.native import build
from spec_jax.ops import dispatch


def test_instruction_sets():
    """Fails if a set is offered that the processor lacks, or a wrong name passes."""
    assert build.available_isas()[-1] == "portable"
    with pytest.raises(ValueError, match="isa='neon' is not one of avx512bf16, avx"):
        build.load("neon")
    with pytest.raises(ValueError, match="isa='' is not one of"):
        build.load("")


def test_a_set_that_the_processor_lacks(monkeypatch):
    """Fails if such code is loaded, and kills the process at its first instruction."""
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2"}))
    assert build.available_isas() == ("portable",)
    with pytest.raises(build.BuildError, match="cannot run avx512bf16 code, only port"):
        build.load("avx512bf16")
    with pytest.raises(build.BuildError, match="cannot run avx512 code, only portable"):
        build.load("avx512")


@pytest.mark.parametrize(
    ("unknown", "widest"), [("-mavx512bf16", "avx512"), ("-", "portable")]
)
def test_a_set_that_the_compiler_does_not_know(monkeypatch, tmp_path, unknown, widest):
    """Fails if an old compiler costs more than the newest instructions."""
    available = ("avx512bf16", "avx512", "portable")
    monkeypatch.setattr(build, "available_isas", lambda: available)
    path = tmp_path / "old"
    path.write_text(f'#!/bin/sh\ncase "$*" in *{unknown}*) exit 1;; esac\n')
    path.chmod(0o755)
    assert build._widest((str(path),)) == widest


def test_a_set_that_the_assembler_does_not_know(monkeypatch, tmp_path):
    """Fails if the flags alone are tried: the compiler may be newer than its tools."""
    monkeypatch.setattr(build, "available_isas", lambda: ("avx512bf16", "avx512"))
    path = tmp_path / "half_new"
    path.write_text("#!/bin/sh\nif grep -q vdpbf16ps; then exit 1; fi\n")
    path.chmod(0o755)
    assert build._widest((str(path),)) == "avx512"


def test_the_compiler_here_knows_the_probes():
    """Fails if a probe is no assembly: the widest set would be portable."""
    available = build.available_isas()
    assert build._widest(tuple(build.find_compiler())) == available[0]


def test_loading_twice_is_loading_once(isa):
    """Fails if a second call registers again: by name, and as the default."""
    assert build.load(isa) == isa
    chosen = os.environ.get(build.ISA_VARIABLE)
    assert build.load() == (chosen or build.available_isas()[0])
    assert build.load() == build.load(None)


@pytest.fixture
def loads(unloaded, monkeypatch) -> list[str]:
    """The sets that are loaded, of three that this machine is said to have."""
    loaded = []
    monkeypatch.setattr(build, "_load", loaded.append)
    monkeypatch.setattr(build, "available_isas", lambda: ("avx512", "avx2", "portable"))
    monkeypatch.setattr(build, "_widest", lambda _: "avx512")
    monkeypatch.setattr(build, "find_compiler", lambda: ("cc",))
    return loaded


def test_a_chosen_instruction_set(loads, monkeypatch):
    """Fails if the variable, or a flag that calls `choose`, is not what is loaded."""
    monkeypatch.setenv("SPEC_JAX_ISA", "portable")
    build.choose("avx2")
    assert os.environ["SPEC_JAX_ISA"] == "avx2"  # For processes started from here.
    assert build.load() == build.load() == "avx2"
    assert build.load("portable") == "portable"
    assert loads == ["avx2", "avx2", "portable"]


def test_no_chosen_instruction_set(loads, monkeypatch):
    """Fails if an empty variable is a name."""
    monkeypatch.setenv("SPEC_JAX_ISA", "")
    assert build.load() == "avx512"


@pytest.mark.parametrize(
    ("isa", "message"),
    [
        ("avx9", "is not one of avx512bf16, avx512, avx2, portable"),
        ("avx512bf16", "this machine lacks it; it has avx512, avx2, portable"),
    ],
)
def test_an_instruction_set_that_cannot_be_chosen(loads, monkeypatch, isa, message):
    """Fails if another set runs instead, or "auto" falls back to XLA."""
    with pytest.raises(ValueError, match=f"instruction set '{isa}'.*{message}"):
        build.choose(isa)
    monkeypatch.setenv("SPEC_JAX_ISA", isa)
    monkeypatch.setattr(dispatch, "_choose", dispatch._choose.__wrapped__)
    for impl in ("auto", "native"):
        with pytest.raises(ValueError, match=f"SPEC_JAX_ISA={isa}.*{message}"):
            dispatch.resolve(impl)
    assert loads == []


def test_an_instruction_set_that_is_chosen_too_late(loads, monkeypatch):
    """Fails if one process runs two sets without having been asked by name."""
    assert build.load() == "avx512"
    build.choose("avx512")
    with pytest.raises(ValueError, match="'avx2': kernels for avx512 have been loaded"):
        build.choose("avx2")
    monkeypatch.setenv("SPEC_JAX_ISA", "avx2")
    with pytest.raises(ValueError, match="SPEC_JAX_ISA=avx2: kernels for avx512 have"):
        build.load()


def test_a_set_that_was_not_loaded_can_be_replaced(loads, monkeypatch):
    """Fails if a build that fails decides for later ones."""

    def fail(isa):
        raise build.BuildError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(build, "_load", fail)
        with pytest.raises(build.BuildError, match="no room"):
            build.load()
    build.choose("portable")
    assert build.load() == "portable"
