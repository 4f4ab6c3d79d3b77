"""Commands that make every published row: the steps of `experiments/reproduce.py`.

This module reads them from `experiments/reproduction.md`, which says how a step is
written, and runs nothing.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping

from experiments.lib import records


DATA, LLAMA, TEXTS = "{data}", "{llama}", "{rollouts}"
"""The folders of `--data`, `--llama-bin` and `--texts` in a command."""

FETCHED = "--target smollm2"
"""Part of a command that needs the model that `fetch_model.py` downloads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Commands that make a file of results, or several.

    Attributes:
      file: path below `records.RESULTS`; the name of the step.
      runs: commands, each a script and its flags.
      keep: kinds of rows that are kept, of several runs whose rows the file holds.
      mismatches: whether runs that do not match are expected, and no failure.
    """

    file: str
    runs: tuple[str, ...]
    keep: tuple[str, ...] = ()
    mismatches: bool = False

    @property
    def path(self) -> pathlib.Path:
        """The path of the finished file."""
        return records.RESULTS / self.file

    @property
    def flag(self) -> str | None:
        """The flag that names the file; None where a flag names its folder."""
        return {".jsonl": "--out", ".json": "--certificate"}.get(self.path.suffix)


def _each(command: str) -> Iterator[str]:
    """Yields a command for each combination of choices, the last varying fastest."""
    parts = re.split("<(.*?)>", command)
    choices = [part.split(";") if n % 2 else [part] for n, part in enumerate(parts)]
    for chosen in itertools.product(*choices):
        yield " ".join("".join(chosen).split())


WORDS = {
    "kind": "--impl native --dtype bfloat16 --page-size 16 --cache paged",
    # For certificates: greedy and sampled, alone and in batches, short texts.
    "drawn": "--sampling greedy,sampled --batch 1,4",
    "short": "--prompts 8 --gen-tokens 64",
    "set": f"{DATA}/gsm8k/test.jsonl",
    "turns": f"{DATA}/mt_bench/question.jsonl",
    "long": f"{DATA}/spec_bench/question.jsonl",
    "real": f"{FETCHED} --impl native",
    "default": "--drafter hybrid --gamma 7 --gamma-policy budget",
    "texts": "--prompts 20 --gen-tokens 256",
    "heads": "eagle3,dspark,dspark-gated,dspark-rnn,peagle,dflash,dflash2,jetspec",
    "profile": "{results}/profile_dspark_native.jsonl",
    "drawings": " ".join(
        path
        for name in (
            "spec_round_<native;xla>_gamma<1;2;4;7>",
            *("latency_embedded_<native;xla>", "parity_flash"),
        )
        for path in _each(f"{{results}}/{name}.jsonl")
    ),
}

OF_IMPL = (
    {"impl": "native", "count": "50", "repeats": "3", "tokens": "256"},
    {"impl": "xla", "count": "5", "repeats": "2", "tokens": "64"},
)

SECTIONS = dict(
    re.findall(
        r"^## (\w+)\n.*?^```text\n(.*?)^```$",
        (records.RESULTS.parent / "reproduction.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
"""The steps of each section, as they are written."""


def steps() -> Iterator[Step]:
    """Yields every step, in order."""
    for name, text in SECTIONS.items():
        for own in OF_IMPL if name == "speeds" else ({},):
            yield from _read(text, WORDS | own)


def certificates() -> Iterator[Step]:
    """Yields the steps of certificates as a table names them: without the flags of
    `kind` and `short`, and without folders."""
    shorter = {"kind": "", "short": "", "set": "gsm8k/test.jsonl"}
    return _read(SECTIONS["certificates"], WORDS | shorter)


def _read(text: str, words: Mapping[str, str]) -> Iterator[Step]:
    """Yields the steps of a text."""
    for _ in range(2):  # Words may hold words.
        text = re.sub(r"{(\w+)}", lambda m: words.get(m[1], m[0]), text)
    for block in re.split(r"\n(?=\S)", text.strip()):
        first, *lines = re.sub(r"\n    +", " ", block).splitlines()
        file, keep, option = (*map(str.strip, first.split("|")), "", "")[:3]
        yield Step(
            file=file,
            runs=tuple(run for line in lines for run in _each(line.strip())),
            keep=tuple(keep.split(", ")) if keep else (),
            mismatches=option == "mismatches",
        )
