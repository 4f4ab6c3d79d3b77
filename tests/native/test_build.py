"""Building and keeping the kernels, and what can go wrong on a user's machine.

Most tests run a compiler of their own, a shell script, which copies a library that
the real one has built.
"""

import ctypes
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import decoding
import jaxlib.version
import pytest

from spec_jax.native import build
from spec_jax.ops import dispatch


ROOT = pathlib.Path(build.__file__).parents[2]

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
while [ "$1" != -o ]; do shift; done
echo compiled >> "{log}"
{action}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> pathlib.Path:
    """Builds a small shared library with the targets' names, for compilers to copy."""
    folder = tmp_path_factory.mktemp("library")
    source, built = folder / "targets.cc", folder / "targets.so"
    source.write_text(
        "".join(f'extern "C" int {t}() {{ return 0; }}\n' for t in build.TARGETS)
    )
    decoding.needs("native")
    command = [*build.find_compiler(), "-shared", "-fPIC", source, "-o", built]
    subprocess.run(command, check=True)
    return built


@pytest.fixture
def home(tmp_path, monkeypatch) -> pathlib.Path:
    """Makes folders for caches and temporary files; returns the cache folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "spec_jax"


@pytest.fixture
def compiler(tmp_path, library):
    """Makes compilers: `compiler(action)` is a command, `compiler.runs()` a count."""

    class Maker:
        log = tmp_path / "compiled"

        def __call__(self, action=f'cp {library} "$2"', version="cc 1.0", name="cc"):
            path, how = tmp_path / name, {"version": version, "action": action}
            path.write_text(COMPILER.format(log=self.log, **how))
            path.chmod(0o755)
            return (str(path),)

        def runs(self) -> int:
            return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    return Maker()


def libraries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the libraries of a cache folder, which must hold nothing else."""
    found = sorted(folder.iterdir())
    assert all(path.suffix == ".so" for path in found), found
    return found


def fallback(home: pathlib.Path) -> pathlib.Path:
    """Returns the folder among temporary files that stands in for the cache folder."""
    return home.parents[1] / "temporary" / f"spec_jax-{os.getuid()}"


def test_a_library_is_built_once(home, compiler):
    """Fails if every process compiles, the parts of a build are left behind, or others
    may read the folder."""
    path = compiler()
    assert isinstance(build.open_library(path, "portable"), ctypes.CDLL)
    build.open_library(path, "portable")
    assert compiler.runs() == 1
    assert len(libraries(home)) == 1 and home.stat().st_mode & 0o777 == 0o700
    assert not fallback(home).exists()


def test_the_key_holds_all_that_decides_bits(home, compiler, monkeypatch, tmp_path):
    """Fails if a library is kept although something that decides its bits changed."""
    path = compiler()
    key = lambda path, isa="portable": build._key(path, isa)
    keys = [key(path), key(path, "avx2"), key(compiler(version="cc 1.1"))]
    compiler()
    assert key(path) == keys[0]
    keys.append(key(compiler(name="another")))
    for owner, name, changed in (
        (build, "FLAGS", (*build.FLAGS, "-O2")),
        (jaxlib.version, "__version__", "0.0.1"),
        (platform, "machine", lambda: "m68k"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, changed)
            keys.append(key(path))
    copies = tmp_path / "native"
    shutil.copytree(build._FOLDER, copies)
    monkeypatch.setattr(build, "_FOLDER", copies)
    for name in build.SOURCES:
        text = (copies / name).read_text()
        (copies / name).write_text(f"{text} ")
        keys.append(key(path))
        (copies / name).write_text(text)
    assert len(set(keys)) == len(keys) == 7 + len(build.SOURCES)
    assert key(path) == keys[0]


def test_a_folder_of_somebody_else_is_refused(home, compiler, monkeypatch):
    """Fails if code is run from a folder that another user has prepared."""
    path = compiler()
    build.open_library(path, "portable")
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(
        build.BuildError, match=f"belongs to user {mine}, not {mine + 1}"
    ):
        build.open_library(path, "portable")


UNSAFE = {
    "not a folder": lambda at: at.symlink_to(at.rename(at.with_name("elsewhere"))),
    "mode 770 lets others write": lambda home: home.chmod(0o770),
}


@pytest.mark.parametrize("words", UNSAFE)
def test_a_folder_that_is_not_private_is_passed_over(home, compiler, words):
    """Fails if code is run from a folder where anybody may have put it, or a link is
    taken for the cache folder, even one to this user's folder."""
    path = compiler()
    build.open_library(path, "portable")
    UNSAFE[words](home)
    build.open_library(path, "portable")
    assert compiler.runs() == 2
    assert len(libraries(fallback(home))) == 1
    fallback(home).chmod(0o1777)
    with pytest.raises(build.BuildError, match=f"{words}; .*mode 1777"):
        build.open_library(path, "portable")


PROCESS = """
import sys
from spec_jax.native import build
build.open_library(sys.argv[1:], "portable")
"""


def test_processes_that_start_at_once(home, compiler, library):
    """Fails if processes write one file together, or leave their parts behind."""
    # Each waits until all three are compiling.
    wait = f"while [ $(wc -l < {compiler.log}) -lt 3 ]; do sleep 0.05; done"
    path = compiler(f'{wait}; cp {library} "$2"')
    command, environment = [sys.executable, "-c", PROCESS, *path], dict(os.environ)
    how = {"env": environment | {"PYTHONPATH": str(ROOT)}, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **how) for _ in range(3)]
    for process in processes:
        # This bounds processes that never end, not the time of a busy machine.
        _, errors = process.communicate(timeout=36_000)
        assert process.returncode == 0, errors
        assert errors.count("building the native kernels for portable") == 1
    assert compiler.runs() == 3
    assert len(libraries(home)) == 1


def test_no_compiler(unloaded, monkeypatch, tmp_path):
    """Fails if the message does not say what was looked for, or `impl="native"` runs
    another implementation."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = r"no C\+\+ compiler.*g\+\+, clang\+\+"
    with pytest.raises(NotImplementedError, match=words):
        dispatch.resolve("native")
    for asked, words in (
        ("no-such-compiler g++", r"for CXX=no-such-compiler g\+\+$"),
        ("ccache 'g++", "CXX=ccache 'g.. cannot be split into"),
    ):
        monkeypatch.setenv("CXX", asked)
        with pytest.raises(build.BuildError, match=words):
            build.find_compiler()


def test_a_compiler_of_several_words(compiler, monkeypatch, tmp_path):
    """Fails if "ccache g++" is looked for as one program, or a word is lost."""
    (tmp_path / "my tools").mkdir()
    (path,) = compiler(name="my tools/cc")
    monkeypatch.setenv("CXX", path)
    assert build.find_compiler() == (path,)
    monkeypatch.setenv("CXX", "env WORD='a b' cc")
    assert build.find_compiler() == (shutil.which("env"), "WORD=a b", "cc")


def test_a_compiler_that_fails(home, compiler):
    """Fails if the compiler's message is lost, or another folder is tried after it."""
    path = compiler('echo "kernels.cc:1: no such thing" >&2; exit 3')
    with pytest.raises(build.BuildError, match="status 3:\nkernels.cc:1: no such"):
        build.open_library(path, "portable")
    assert compiler.runs() == 1
    assert libraries(home) == []


@pytest.mark.parametrize("words", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk(home, compiler, library, words):
    """Fails if a full cache disk is an error while another folder has room, or if the
    message of two full disks does not name both."""
    full = f'echo "fatal error: writing $2: {words}" >&2; exit 1'
    path = compiler(f'case "$2" in {home}*) {full};; *) cp {library} "$2";; esac')
    build.open_library(path, "portable")
    assert compiler.runs() == 2
    assert libraries(home) == [] and len(libraries(fallback(home))) == 1
    with pytest.raises(build.BuildError, match=f"{home}.*; {fallback(home)}.*{words}"):
        build.open_library(compiler(full, name="other"), "portable")


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_library(home, compiler, damage):
    """Fails if a damaged file is mapped, which may crash, or is never replaced."""
    path = compiler()
    build.open_library(path, "portable")
    (stored,) = libraries(home)
    whole = stored.read_bytes()
    # A new file takes its place, as this process may have mapped the old one.
    stored.unlink()
    changed = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    stored.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else changed)
    build.open_library(path, "portable")
    assert compiler.runs() == 2
    assert [p.read_bytes() for p in libraries(home)] == [whole]
