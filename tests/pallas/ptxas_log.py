"""A `ptxas` that keeps, for each kernel, the assembler's report and its output.

XLA finds `ptxas` in jax's CUDA folder and on `PATH`, once in a process.
Both are pointed at a copy of that folder, made of links, in which `ptxas` is a script
that calls the real one with `-v` and keeps its input, its report and its output.
"""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import tempfile


SCRIPT = """#!/bin/sh
[ -f "$1" ] || exec "{real}" "$@"  # asked for its version, not to assemble
run=$(mktemp -d "{log}/XXXXXXXX")
cp "$1" "$run/ptx"
output= previous=
for word in "$@"; do
  [ "$previous" = -o ] && output=$word
  previous=$word
done
"{real}" "$@" -v 2> "$run/report"
status=$?
cat "$run/report" >&2
cp "$output" "$run/cubin" 2> /dev/null
exit $status
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel's machine code.

    Attributes:
      threads: of a block, where the kernel fixes it; otherwise 0.
      spill_bytes: stored to and loaded from local memory, for lack of registers.
      static_shared_bytes: known to the assembler. A launch adds what it asks for:
        `hopper.Thunk.shared_bytes`.
    """

    name: str
    registers: int
    spill_bytes: int
    static_shared_bytes: int
    threads: int
    cubin: bytes
    disassembler: str

    @functools.cached_property
    def sass(self) -> tuple[str, ...]:
        """The instructions in order, labels included, without addresses."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            run = subprocess.run(
                [self.disassembler, "-c", file.name],
                check=True,
                capture_output=True,
                text=True,
            )
        lines = run.stdout.splitlines()
        body = lines[lines.index(f".text.{self.name}:") + 1 :]
        lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in body)
        return tuple(line for line in lines if line and not line.startswith("//"))

    @property
    def is_ours(self) -> bool:
        """Whether the kernel is ours: not one that XLA made of its own operations."""
        return not re.search(r"fusion|wrapped|^sort_\d", self.name)

    def count(self, *opcodes: str) -> int:
        """Counts instructions that start with one of `opcodes`, predicates aside."""
        return len(self._places(*opcodes))

    def ahead(self) -> int:
        """Counts accesses to memory before the kernel waits for those before it, which
        it must do once, and then release the next kernel."""
        waits, releases = self._places("ACQBULK"), self._places("PREEXIT")
        assert len(waits) == len(releases) == 1 and waits < releases, self.name
        return sum(place < waits[0] for place in self._places(*ACCESSES))

    def _places(self, *opcodes: str) -> list[int]:
        names = "|".join(map(re.escape, opcodes))
        pattern = re.compile(rf"(@!?U?P\w+ +)?({names})\b")
        return [n for n, line in enumerate(self.sass) if pattern.match(line)]


ACCESSES = "LDG STG ATOMG RED REDG LD ST ATOM LDGSTS UBLKCP UTMALDG UTMASTG".split()
"""Instructions that read or write global memory."""


def install(cuda: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Makes the copy of `cuda` below `folder`; XLA in this process uses it.

    Returns:
      The folder of the runs, for `read`.
    """
    # `jax.lib` has no public name for the folder that it hands to XLA.
    from jax._src import lib

    copy, log = folder / "cuda", folder / "log"
    (copy / "bin").mkdir(parents=True)
    log.mkdir()
    for each in (*cuda.iterdir(), *(cuda / "bin").iterdir()):
        if each.name not in ("bin", "ptxas"):
            (copy / each.relative_to(cuda)).symlink_to(each)
    script = copy / "bin" / "ptxas"
    script.write_text(SCRIPT.format(real=cuda / "bin" / "ptxas", log=log))
    script.chmod(0o755)
    lib.cuda_path = str(copy)
    os.environ["PATH"] = f"{copy / 'bin'}:{os.environ['PATH']}"
    return log


def read(log: pathlib.Path, cuda: pathlib.Path) -> tuple[Kernel, ...]:
    """Returns the kernels assembled since the folder was empty, sorted by name."""
    kernels = []
    for run in log.iterdir():
        report, ptx = (run / "report").read_text(), (run / "ptx").read_text()
        cubin = (run / "cubin").read_bytes() if (run / "cubin").exists() else b""
        entries = re.split(r"(?=Compiling entry function)", report)
        for entry in entries[1:]:
            name = re.match(r".*?'(\S+)' for ", entry)[1]
            # The properties of a kernel follow the line that names it.
            declared = ptx[ptx.find(f".entry {name}(") :]
            kernels.append(
                Kernel(
                    name=name,
                    registers=_number(r"Used (\d+) registers", entry),
                    spill_bytes=_number(r"(\d+) bytes spill stores", entry)
                    + _number(r"(\d+) bytes spill loads", entry),
                    static_shared_bytes=_number(r"(\d+) bytes smem", entry),
                    threads=_number(r"\.(?:reqntid|maxntid)\s+(\d+)", declared),
                    cubin=cubin,
                    disassembler=str(cuda / "bin" / "nvdisasm"),
                )
            )
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
