"""The machine code of the kernels that XLA dumped as PTX, for an H100.

`ptxas` assembles each once more, as XLA has it do, when a test asks for what it is.
"""

import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel's machine code.

    Attributes:
      ptx: what XLA gives to the assembler.
      tools: the folder of the assembler.
    """

    name: str
    ptx: str
    tools: pathlib.Path

    @functools.cached_property
    def _assembled(self) -> tuple[str, bytes]:
        """The assembler's report, and the machine code."""
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = (pathlib.Path(folder) / name for name in ("ptx", "cubin"))
            ptx.write_text(self.ptx)
            done = self._run("ptxas", ptx, "-o", cubin, "-arch=sm_90a", "-v")
            return done.stderr, cubin.read_bytes()

    @functools.cached_property
    def sass(self) -> tuple[str, ...]:
        """The instructions in order, labels included, without addresses."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self._assembled[1])
            file.flush()
            lines = self._run("nvdisasm", "-c", file.name).stdout.splitlines()
        body = lines[lines.index(f".text.{self.name}:") + 1 :]
        lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in body)
        return tuple(line for line in lines if line and not line.startswith("//"))

    def _run(self, tool: str, *arguments) -> subprocess.CompletedProcess[str]:
        command = [self.tools / tool, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True)

    @property
    def registers(self) -> int:
        """The registers of a thread."""
        return _number(r"Used (\d+) registers", self._assembled[0])

    @property
    def spill_bytes(self) -> int:
        """The bytes stored to and loaded from local memory, for lack of registers."""
        patterns = (rf"(\d+) bytes spill {what}" for what in ("stores", "loads"))
        return sum(_number(pattern, self._assembled[0]) for pattern in patterns)

    @property
    def static_shared_bytes(self) -> int:
        """The shared memory that the assembler knows of. A launch adds what it asks
        for: `hopper.Thunk.shared_bytes`."""
        return _number(r"(\d+) bytes smem", self._assembled[0])

    @property
    def threads(self) -> int:
        """The threads of a block, where the kernel fixes it; otherwise 0."""
        return _number(r"\.(?:reqntid|maxntid)\s+(\d+)", self.ptx)

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


def read(dump: pathlib.Path, tools: pathlib.Path) -> tuple[Kernel, ...]:
    """Returns the kernels in a folder to which XLA dumped a program, sorted by name."""
    kernels = []
    for path in dump.glob("*.ptx"):
        ptx = path.read_text()
        names = re.findall(r"\.entry (\w+)\(", ptx)
        kernels += [Kernel(name=name, ptx=ptx, tools=tools) for name in names]
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
