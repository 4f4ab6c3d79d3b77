"""What XLA itself computes in an executable, between the kernels that are ours."""

import collections
import difflib
import re

import hopper


# What may be done with a float without computing with it.
MOVED = {
    "bitcast",
    "broadcast",
    "conditional",
    "constant",
    "custom-call",
    "dynamic-slice",
    "fusion",
    "gather",
    "get-tuple-element",
    "parameter",
    "reshape",
    "slice",
    "transpose",
    "tuple",
    "while",
}
_FLOAT = r"(?:f16|bf16|f32|f64)\["


def computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation of a program, by its name."""
    found, lines = {}, []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            lines = found.setdefault(header[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def float_operations(lines: list[str]) -> list[str]:
    """Operations that compute a float, in order, with shapes and without names."""
    found = []
    for line in lines:
        line = re.sub(r"(, (metadata|backend_config)=\{.*)|%[\w.-]+ = ", "", line)
        made = re.match(rf"\s+(?:ROOT )?({_FLOAT}\S* ([\w-]+)\(.*)", line)
        if made and made[2] not in MOVED:
            found.append(re.sub(r"%[\w.-]+", "", made[1]))
    return found


def float_kernels(report: hopper.Report) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The machine code of every fusion that computes floats, by its operations.

    Raises:
      AssertionError: floats are computed outside of a fusion.
    """
    bodies = computations(report.hlo)
    kernels = {kernel.name: kernel for kernel in report.kernels}
    found = {}
    for body, lines in bodies.items():
        operations = float_operations(lines)
        if not operations:
            continue
        calls = re.findall(
            rf"%([\w.-]+) = [^\n]* fusion\([^\n]*calls=%{re.escape(body)}[,\n]",
            report.hlo,
        )
        if not calls:
            raise AssertionError(f"{body} computes {operations}")
        # Fusions that are alike have one kernel, by the name of the first.
        code = {kernels[name].sass for name in map(_kernel, calls) if name in kernels}
        found.setdefault(tuple(operations), set()).update(code)
    return found


def assert_same_code(one, other) -> None:
    """Asserts that two results of `float_kernels` are equal, and shows what is not."""
    assert one.keys() == other.keys()
    for operations, code in one.items():
        lines = [
            [line for sass in sorted(each) for line in sass]
            for each in (code, other[operations])
        ]
        differing = "\n".join(difflib.unified_diff(*lines, lineterm="", n=1))
        assert code == other[operations], f"{operations}:\n{differing}"


def assert_same_arithmetic(one, other) -> None:
    """Asserts that the code of equal operations computes with equal instructions.

    They may stand in another order, between other loads: an array that the program
    around a fusion never writes is loaded through another cache.
    """
    assert arithmetic(one) == arithmetic(other)


def arithmetic(found) -> dict[tuple[str, ...], set[frozenset]]:
    """How often the code of each kernel has each instruction that computes floats."""
    opcodes = r"\b(?:FADD|FMUL|FFMA|FMNMX|FSETP|FSEL|MUFU|F2FP|H(?:MMA|ADD|MUL|FMA))\S*"
    return {
        operations: {
            frozenset(collections.Counter(re.findall(opcodes, "\n".join(sass))).items())
            for sass in code
        }
        for operations, code in found.items()
    }


def _kernel(fusion: str) -> str:
    return fusion.replace(".", "_")
