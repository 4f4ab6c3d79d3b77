"""The launches of an executable, the place of its pools, and XLA's own computations
between the kernels that are ours: shared by tests."""

import re
from collections.abc import Iterator

import hopper_models as models


SLACK = 5  # launches, more or less than stated


def split(report) -> tuple[list, list[list]]:
    """Returns the thunks outside of loops, and those inside of each outermost loop."""
    outside, inside, depth = [], [], None
    for thunk in report.thunks:
        if depth is not None and thunk.depth > depth:
            inside[-1].append(thunk)
            continue
        outside.append(thunk)
        depth = None
        if thunk.kind == "kWhile":
            depth = thunk.depth
            inside.append([])
    return outside, inside


def assert_in_place(report, *targets, copies=1, num_slots=1) -> None:
    """Asserts that pools are aliased and not copied, and that scratch memory is small.
    It may hold `copies` of the logits and 1 MiB more."""
    pools = sum(2 * m.config.num_layers * models.pool_bytes(m) for m in targets)
    assert report.alias_bytes >= num_slots * pools
    logits = max(4 * m.slab * m.config.vocab_size for m in targets)
    assert report.temp_bytes < copies * logits + 2**20
    num_pages = num_slots * models.CAPACITY // models.PAGE_SIZE
    for config in (each.config for each in targets):
        heads = rf"{config.num_kv_heads},{config.head_dim}"
        pool = rf"bf16\[{num_pages},{models.PAGE_SIZE},{heads}\]"
        assert re.search(pool, report.hlo)
        assert not re.search(rf"{pool}\S* (copy|fusion)", report.hlo)


def assert_launched_early(report) -> None:
    """Asserts that our kernels wait before they use memory, then release the next."""
    kernels = [each for each in report.kernels if each.is_ours]
    assert kernels
    for kernel in kernels:
        assert not kernel.ahead(), kernel.name


def assert_near(found: int, stated: int, what: str) -> None:
    """Asserts that the launches are as many as stated, up to `SLACK`."""
    print(f"{what}: {found} launches, {stated} are stated")
    assert abs(found - stated) <= SLACK, f"{what}: {found} launches, not {stated}"


# Operations that may move floats, without computing with them.
MOVED = set(
    "bitcast broadcast concatenate conditional constant copy custom-call dynamic-slice "
    "dynamic-update-slice fusion gather get-tuple-element parameter reshape select "
    "slice transpose tuple while".split()
)
_FLOAT = r"\b(?:f16|bf16|f32|f64)\["
TRITON = "__gpu$xla.gpu.triton"
"""The target by which a program calls our kernels."""


def computations(hlo: str) -> dict[str, list[str]]:
    """Returns the lines of each computation of a program, by its name."""
    found, lines = {}, []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            lines = found.setdefault(header[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def float_fusions(hlo: str) -> set[tuple[str, ...]]:
    """Returns the operations that compute floats, of each computation that has any.
    They are in their order, with shapes and without names."""
    found = (
        tuple(text for name, text in _made(lines) if name not in MOVED)
        for lines in computations(hlo).values()
    )
    return set(filter(None, found))


def float_work(hlo: str) -> set[str]:
    """Returns what a program does with floats, but for our kernels and whole moves.
    These are names of operations, among them transposes, and of library calls."""
    found = {
        name
        for lines in computations(hlo).values()
        for name, _ in _made(lines)
        if name not in MOVED - {"transpose"}
    }
    return found | called(hlo) - {TRITON}


def float_sums(hlo: str) -> list[str]:
    """Lists the operations of a program that reduce floats by adding them."""
    bodies = computations(hlo)
    adds = re.compile(rf"ROOT %\S+ = {_FLOAT[2:]}\]\S* add\(")
    adders = {name for name, lines in bodies.items() if any(map(adds.search, lines))}
    return [
        line.strip()
        for lines in bodies.values()
        for line in lines
        if re.search(r" reduce(?:-window)?\(", line)
        and re.search(r"to_apply=%([\w.-]+)", line)[1] in adders
    ]


def called(hlo: str) -> set[str]:
    """Returns the targets that a program calls besides its own computations."""
    return set(re.findall(r'custom_call_target="([^"]*)"', hlo))


def _made(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each operation that gives a float, or several."""
    for line in lines:
        line = re.sub(r"(, (metadata|backend_config)=\{.*)|%[\w.-]+ = ", "", line)
        made = re.match(r"\s+(?:ROOT )?(\([^()]*\)|\S+) ([\w-]+)\(", line)
        if made and re.search(_FLOAT, made[1]):
            text = re.sub(r"%[\w.-]+", "", line.strip().removeprefix("ROOT "))
            yield made[2], text
