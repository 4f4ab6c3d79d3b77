"""Building and keeping the kernels: what can go wrong on somebody's machine.

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
    """A small shared library with the targets' names, for compilers to copy."""
    folder = tmp_path_factory.mktemp("library")
    source, built = folder / "targets.cc", folder / "targets.so"
    source.write_text(
        "".join(f'extern "C" int {t}() {{ return 0; }}\n' for t in build.TARGETS)
    )
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    subprocess.run(
        [*compiler, "-shared", "-fPIC", str(source), "-o", str(built)], check=True
    )
    return built


@pytest.fixture
def home(tmp_path, monkeypatch) -> pathlib.Path:
    """Fresh folders for caches and temporary files; returns the cache folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "spec_jax"


@pytest.fixture
def compiler(tmp_path, library):
    """Makes compilers: `compiler(action)` is a command; `compiler.runs()` counts."""

    class Maker:
        log = tmp_path / "compiled"

        def __call__(self, action=f'cp {library} "$2"', version="cc 1.0", name="cc"):
            path = tmp_path / name
            path.write_text(
                COMPILER.format(version=version, log=self.log, action=action)
            )
            path.chmod(0o755)
            return (str(path),)

        def runs(self) -> int:
            return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    return Maker()


def libraries(folder: pathlib.Path) -> list[pathlib.Path]:
    """The libraries of a cache folder, which must hold nothing else."""
    found = sorted(folder.iterdir())
    assert all(path.suffix == ".so" for path in found), found
    return found


def fallback(home: pathlib.Path) -> pathlib.Path:
    """The folder among temporary files."""
    return home.parents[1] / "temporary" / f"spec_jax-{os.getuid()}"


def test_a_library_is_built_once(home, compiler):
    """Fails if every process compiles, or the parts of a build are left behind."""
    path = compiler()
    assert isinstance(build.open_library(path, "portable"), ctypes.CDLL)
    build.open_library(path, "portable")
    assert compiler.runs() == 1
    assert len(libraries(home)) == 1
    assert not fallback(home).exists()


def test_the_key_holds_everything_that_decides_bits(
    home, compiler, monkeypatch, tmp_path
):
    """Fails if a library outlives a change of what it was made from."""
    path = compiler()
    keys = [build._key(path, "portable")]
    assert build._key(path, "portable") == keys[0]
    keys.append(build._key(path, "avx2"))
    keys.append(build._key(compiler(version="cc 1.1"), "portable"))
    compiler()
    keys.append(build._key(compiler(name="another"), "portable"))
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-O2"))
        keys.append(build._key(path, "portable"))
    with monkeypatch.context() as patch:
        patch.setattr(jaxlib.version, "__version__", "0.0.1")
        keys.append(build._key(path, "portable"))
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "m68k")
        keys.append(build._key(path, "portable"))
    sources = pathlib.Path(build.__file__).parent
    for name in build.SOURCES:
        copy = tmp_path / name / "native"
        copy.mkdir(parents=True)
        for other in build.SOURCES:
            text = (sources / other).read_text()
            (copy / other).write_text(text + " " * (other == name))
        with monkeypatch.context() as patch:
            patch.setattr(build, "__file__", str(copy / "build.py"))
            keys.append(build._key(path, "portable"))
    assert len(set(keys)) == len(keys) == 7 + len(build.SOURCES)
    assert build._key(path, "portable") == keys[0]


def test_no_compiler(monkeypatch, tmp_path):
    """Fails if the message does not say what was looked for."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler.*g\+\+, clang\+\+"):
        build.find_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="CXX=no-such-compiler"):
        build.find_compiler()


def test_the_asked_for_compiler_is_used(monkeypatch, compiler):
    """Fails if `$CXX` is ignored."""
    (path,) = compiler(name="mine")
    monkeypatch.setenv("CXX", path)
    assert build.find_compiler() == (path,)


def test_a_compiler_of_several_words(home, compiler, monkeypatch, tmp_path):
    """Fails if "ccache g++" is looked for as one program, or a word is lost."""
    (path,) = compiler(name="mine")
    monkeypatch.setenv("CXX", f"env WORD='a b' {path}")
    command = build.find_compiler()
    assert command == (shutil.which("env"), "WORD=a b", path)
    build.open_library(command, "portable")
    assert compiler.runs() == 1
    assert build._key(command, "portable") != build._key((path,), "portable")
    (tmp_path / "my tools").mkdir()
    (spaced,) = compiler(name="my tools/cc")
    monkeypatch.setenv("CXX", spaced)
    assert build.find_compiler() == (spaced,)
    monkeypatch.setenv("CXX", "no-such-launcher g++")
    with pytest.raises(build.BuildError, match=r"for CXX=no-such-launcher g\+\+$"):
        build.find_compiler()
    monkeypatch.setenv("CXX", "ccache 'g++")
    with pytest.raises(build.BuildError, match="CXX=ccache 'g.. cannot be split into"):
        build.find_compiler()


def test_a_compiler_that_fails(home, compiler):
    """Fails if its message is lost, or another folder is tried for its sake."""
    path = compiler('echo "kernels.cc:1: no such thing" >&2; exit 3')
    with pytest.raises(build.BuildError, match="status 3:\nkernels.cc:1: no such"):
        build.open_library(path, "portable")
    assert compiler.runs() == 1
    assert libraries(home) == []


def test_a_compiler_that_cannot_run(home, tmp_path):
    """Fails if an `OSError` escapes for a file that is no program."""
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    with pytest.raises(build.BuildError, match="broken cannot be run: "):
        build.open_library([str(broken)], "portable")


FULL = 'echo "fatal error: writing $2: No space left on device" >&2; exit 1'


@pytest.mark.parametrize("words", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk(home, compiler, library, words):
    """Fails if a full cache disk is an error while another folder has room."""
    full = FULL.replace("No space left on device", words)
    path = compiler(f'case "$2" in {home}*) {full};; *) cp {library} "$2";; esac')
    build.open_library(path, "portable")
    assert compiler.runs() == 2
    assert libraries(home) == []
    assert len(libraries(fallback(home))) == 1


def test_all_disks_full(home, compiler):
    """Fails if the message does not name both folders and why each was refused."""
    with pytest.raises(build.BuildError, match="No space left") as caught:
        build.open_library(compiler(FULL), "portable")
    assert str(home) in str(caught.value)
    assert str(fallback(home)) in str(caught.value)


def test_the_disk_fills_before_the_compiler_runs(home, compiler, monkeypatch):
    """Fails if only the compiler is expected to meet a full disk."""

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(build.BuildError, match="No space left on device.*; .*No space"):
        build.open_library(compiler(), "portable")


def test_a_cache_that_cannot_be_written(home, compiler):
    """Fails if a file in the folder's place is an error: the next folder serves."""
    home.parent.mkdir()
    home.write_text("a file")
    build.open_library(compiler(), "portable")
    assert len(libraries(fallback(home))) == 1


def test_a_read_only_cache_that_holds_the_library(home, compiler, monkeypatch):
    """Fails if a cache is written although nothing is missing."""
    path = compiler()
    build.open_library(path, "portable")

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    build.open_library(path, "portable")
    assert compiler.runs() == 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "text"])
def test_a_damaged_library(home, compiler, damage):
    """Fails if a damaged file is mapped, which may crash, or is never replaced."""
    path = compiler()
    build.open_library(path, "portable")
    (stored,) = libraries(home)
    whole = stored.read_bytes()
    # Another file in its place: the old one may be mapped by this process.
    stored.unlink()
    changed = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    stored.write_bytes(
        {
            "truncated": whole[: len(whole) // 2],
            "empty": b"",
            "changed": changed,
            "text": b"not a library",
        }[damage]
    )
    build.open_library(path, "portable")
    assert compiler.runs() == 2
    assert [p.read_bytes() for p in libraries(home)] == [whole]


def test_a_damaged_library_that_another_process_removes(home, compiler, monkeypatch):
    """Fails if the folder is then taken for one that does not work."""
    path, real = compiler(), build._digest
    build.open_library(path, "portable")
    (stored,) = libraries(home)

    def removed(library):
        monkeypatch.setattr(build, "_digest", real)
        stored.unlink()
        return real(library)

    monkeypatch.setattr(build, "_digest", removed)
    build.open_library(path, "portable")
    assert len(libraries(home)) == 1 and not fallback(home).exists()


def test_what_a_killed_build_left_is_removed(home, compiler):
    """After an hour: until then it may be a build that goes on."""
    home.mkdir(parents=True, mode=0o700)
    old, new = home / "tmpold.partial", home / "tmpnew.partial"
    for folder in (old, new):
        folder.mkdir()
        (folder / "cc.s").write_text("half")
    os.utime(old, (1, 1))
    build.open_library(compiler(), "portable")
    assert not old.exists() and new.exists()


def test_a_library_without_its_functions(home, compiler, tmp_path):
    """Fails if it ends in an `AttributeError`, or is never built again."""
    other = tmp_path / "other.so"
    command = [*build.find_compiler(), "-shared", "-fPIC", "-x", "c++", os.devnull]
    subprocess.run([*command, "-o", str(other)], check=True)
    path = compiler()
    build.open_library(path, "portable")
    (stored,) = libraries(home)
    prefix = stored.name[: -len(f"{build._digest(stored)}.so")]
    stored.unlink()
    shutil.copy(other, home / f"{prefix}{build._digest(other)}.so")
    library = build.open_library(path, "portable")
    assert compiler.runs() == 2 and hasattr(library, build.TARGETS[0])
    assert libraries(home) == [stored]
    message = f"wrote a library without {build.TARGETS[0]}, "
    with pytest.raises(build.BuildError, match=message):
        build.open_library(compiler(f'cp {other} "$2"', name="other"), "portable")


def test_no_folder_for_temporary_files(home, compiler, monkeypatch):
    """Fails if such a folder is looked for although the library is kept elsewhere."""

    def refuse():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    path = compiler()
    for _ in range(2):
        build.open_library(path, "portable")
    assert compiler.runs() == 1
    home.chmod(0o777)
    with pytest.raises(build.BuildError, match="lets others write; .*No usable tempor"):
        build.open_library(path, "portable")


def test_a_build_is_announced(home, compiler, caplog):
    """Fails if half a minute passes in silence, or a line is said without a build."""
    path = compiler()
    for _ in range(2):
        build.open_library(path, "portable")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"building the native kernels for portable with {path[0]},")
    assert said.endswith(f"kept in {home}")


def test_a_compiler_that_writes_no_library(home, compiler):
    """Fails if what cannot be loaded is a crash, or an error without a reason."""
    with pytest.raises(build.BuildError, match="no folder can hold.*: .*; .*: "):
        build.open_library(compiler('echo nonsense > "$2"'), "portable")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_is_refused(home, compiler, mode):
    """Fails if code is run from a folder where anybody may have put it."""
    path = compiler()
    build.open_library(path, "portable")
    home.chmod(mode)
    build.open_library(path, "portable")
    assert compiler.runs() == 2
    assert len(libraries(fallback(home))) == 1
    fallback(home).chmod(mode)
    message = f"mode {mode:03o} lets others write; .*mode {mode:03o}"
    with pytest.raises(build.BuildError, match=message):
        build.open_library(path, "portable")


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


def test_a_link_in_the_folders_place_is_refused(home, compiler, tmp_path):
    """Fails if a link to a folder of this user's passes for the cache."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    home.parent.mkdir()
    home.symlink_to(tmp_path / "elsewhere")
    build.open_library(compiler(), "portable")
    assert libraries(tmp_path / "elsewhere") == []
    assert len(libraries(fallback(home))) == 1


def test_new_folders_are_private(home, compiler):
    """Fails if the folder's mode is left to the umask."""
    before = os.umask(0)
    try:
        build.open_library(compiler(), "portable")
    finally:
        os.umask(before)
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_relative_cache_home_is_ignored(home, monkeypatch, tmp_path):
    """Fails if a library is looked for where the program happens to run."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert next(build._cache_folders()) == tmp_path / "me" / ".cache" / "spec_jax"
    monkeypatch.setenv("HOME", "")
    assert all(folder.is_absolute() for folder in build._cache_folders())


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
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *path],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        # Not a bound on a busy machine's time, but on processes that never end.
        _, errors = process.communicate(timeout=36_000)
        assert process.returncode == 0, errors
        assert errors.count("building the native kernels for portable") == 1
    assert compiler.runs() == 3
    assert len(libraries(home)) == 1


def test_the_named_implementation_says_why(unloaded, monkeypatch, tmp_path):
    """Fails if `impl="native"` falls through, or raises something else."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotImplementedError, match=r"no C\+\+ compiler found"):
        dispatch.resolve("native")


def test_a_system_without_users(unloaded, monkeypatch):
    """Fails if Windows meets an `AttributeError` instead of a reason."""
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(build.BuildError, match="no native kernels on Windows"):
        build.load()
