"""What `gpu_report.py` calls, the most telling first. Never imports JAX."""

import dataclasses
import os
import pathlib
import re
import shlex


SECTIONS = {
    "c": "steps",
    "d": "rounds",
    "h": "heads",
    "a": "exactness",
    "b": "batches",
    "t": "traces",
}

ON_EITHER_DEVICE = ("kernels", "latency")
"""Scripts that take `--device`."""

# Section, seconds, name, command.
_CALLS = """
c | 45 | steps 0.6b | {small} --steps 128 {all}
d | 40 | rounds of 8b with 0.6b | {pair} {forced} --forced 0.39,0.6,0.8 --gammas 4,2
c | 60 | steps 8b | {pair} --steps 32 {all}
h | 35 | dspark | {large} --head dspark {published}
h | 35 | eagle3 tree of 32 | {large} --head eagle3 --head-tree 32 {published}
a | 60 | exactness | exactness {cells}
h | 30 | eagle3 | {large} --head eagle3 {published}
h | 35 | dflash | {large} --head dflash {published}
a | 65 | exactness dspark | exactness --drafter dspark {one} {cells}
t | 20 | trace 0.6b | {small} {traced}
t | 20 | trace 8b | {large} {traced}
c | 25 | sampling 8b | {large} {sampled} --steps 32 --contexts 128 --rows 1
c | 35 | long contexts 8b | {large} --steps 32 --contexts 16384 32768 --rows 5
c | 30 | steps llama 8b | latency --preset {llama} {turns} {few}
c | 30 | steps qwen2.5 7b | latency --preset {qwen2} {turns} {few}
h | 30 | eagle3 tree of 16 | {large} --head eagle3 --head-tree 16 {published}
h | 50 | eagle3 tree of 64 | {large} --head eagle3 --head-tree 64 {published}
h | 50 | dspark tree of 32 | {large} --head dspark --head-tree 32 {published}
c | 20 | steps 0.6b q8_0 | {small} {bytes}
c | 35 | steps 8b q8_0 | {large} {bytes}
a | 60 | rows of kernels 8b q8_0 | kernels --shapes {8b} --weights q8_0 {checked}
b | 110 | batches | throughput --prompts 16 --batch 1,4,16 --repeats 2 --impl {impl}
a | 60 | rows of kernels 8b | kernels --shapes {8b} {checked}
a | 50 | rows of kernels 0.6b | kernels --shapes {0.6b} {checked}
c | 25 | prompts 8b | {large} --steps 8 --contexts 128 --rows 1 --prefill 128,1024
h | 30 | dspark tree of 16 | {large} --head dspark --head-tree 16 {published}
h | 50 | dspark tree of 64 | {large} --head dspark --head-tree 64 {published}
"""

_WORDS = {
    "0.6b": "qwen3-0.6b",
    "8b": "qwen3-8b",
    "llama": "llama-3.1-8b",
    "qwen2": "qwen2.5-7b",
    "small": "latency --preset {0.6b} {turns}",
    "large": "latency --preset {8b} {turns}",
    "pair": "latency --preset {8b} --draft-preset {0.6b} {turns}",
    "turns": "--impl {impl} --repeats 5",
    "all": "--contexts 128 4096 --rows 1,5,8,16",
    "bytes": "--weights q8_0 --steps 32 --contexts 128 --rows 1,5,16",
    "few": "--steps 32 --contexts 128 --rows 1,5",
    "forced": "--no-steps --contexts 128 --gen-tokens 128",
    "published": "--steps 32 --contexts 128 --forced mt-bench,gsm8k --gen-tokens 128",
    "sampled": "--temperature 0.7 --top-k 20 --top-p 0.8",
    "traced": "--steps 16 --contexts 128 --rows 1 --trace {out}/trace",
    "cells": "--prompts 4 --gen-tokens 32 --gamma 4 --impl {impl}",
    "one": "--page-size 16 --cache paged --gamma-policy fixed",
    "checked": "--contexts 5,300",
}

# For a model of two thousandths of the size: all contexts and repeats are less, too.
_REHEARSED = {
    "0.6b": "tiny",
    "8b": "tiny",
    "llama": "tiny",
    "qwen2": "tiny",
    "turns": "--impl {impl} --repeats 1",
    "all": "--steps 2 --contexts 16 32 --rows 1,5",
    "bytes": "--weights q8_0 --steps 2 --contexts 16 --rows 1,5",
    "forced": "--no-steps --contexts 16 --gen-tokens 12",
    "published": "--steps 2 --contexts 16 --forced mt-bench,gsm8k --gen-tokens 12",
    "traced": "--steps 2 --contexts 16 --rows 1 --trace {out}/trace",
    "cells": "--prompts 4 --gen-tokens 4 --gamma 4 --impl {impl} --gamma-policy fixed "
    "--sampling greedy --dtype bfloat16",
    "checked": "--contexts 5",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A script with its flags."""

    section: str
    name: str  # unique
    script: str
    arguments: tuple[str, ...]  # `{out}` in them is the folder of the report
    seconds: float  # that it is expected to take

    @property
    def file(self) -> str:
        """The name of its files, without a suffix."""
        return f"{self.section}-{re.sub('[^a-z0-9.]+', '-', self.name)}"

    @property
    def can_dry_run(self) -> bool:
        """Whether its programs can be compiled without weights."""
        return self.script == "latency"

    def request(
        self, out: pathlib.Path, *, device: str, prefix: str = "", dry_run: bool = False
    ) -> tuple[str, list[str], pathlib.Path]:
        """Returns what `processes.run_here` takes; earlier files of it are removed.

        Args:
          prefix: of its files.
          dry_run: only compile its programs.
        """
        path = out / f"{prefix}{self.file}.jsonl"
        path.unlink(missing_ok=True)
        arguments = [word.replace("{out}", str(out)) for word in self.arguments]
        # Rows say whether there were changes; a refusal would waste the machine.
        arguments += ["--out", str(path), "--allow-dirty", *["--dry-run"] * dry_run]
        if self.script in ON_EITHER_DEVICE:
            arguments += ["--device", device]
        return f"experiments.{self.script}", arguments, path.with_suffix(".txt")


def all_calls(*, impl: str, rehearse: bool = False) -> list[Call]:
    """Every call of the report, in order.

    Args:
      impl: of steps and rounds.
      rehearse: the same calls of a tiny model, with few repeats.
    """
    words = _WORDS | {"impl": impl} | (_REHEARSED if rehearse else {})
    text = _CALLS.strip()
    for _ in range(4):  # Words that hold words.
        text = re.sub(r"{([\w.]+)}", lambda m: words.get(m[1], m[0]), text)
    calls = []
    for line in text.splitlines():
        section, seconds, name, command = map(str.strip, line.split(" | "))
        script, *arguments = shlex.split(command)
        calls.append(Call(section, name, script, tuple(arguments), float(seconds)))
    return calls


def set_up(compiled: pathlib.Path, memory_share: float) -> None:
    """Sets the variables of a process that is going to import JAX.

    Args:
      compiled: the folder of compiled programs, unless the user has one of their own.
      memory_share: of a GPU's memory that JAX may take; a small one is not taken before
        it is needed, and the process gives way to others.
    """
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Warnings of XLA would bury the rows; errors remain.
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }.items():
        os.environ.setdefault(name, value)
    # A trace is to show the launches that are timed.
    shown = "--xla_enable_command_buffers_during_profiling=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {shown}".strip()
    # jaxlib refuses the older name next to the newer.
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{memory_share:.2f}"
    if memory_share < 0.5:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        os.nice(10)
