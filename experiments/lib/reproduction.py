"""Commands that make every published row: the steps of `experiments/reproduce.py`.

This module reads them from `experiments/reproduction.md`, which says how a step is
written, and runs nothing.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator

from experiments.lib import pages, records


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


def steps(*sections: str, **words: str) -> Iterator[Step]:
    """Yields the steps of these sections, or all, in order.

    Args:
      words: replace those of the page.
    """
    found = pages.sections(records.RESULTS.parent / "reproduction.md")
    known = found.pop("words")
    text = "".join(found[name] for name in sections or found)
    for block in re.split(r"\n(?=\S)", pages.filled(text, known, **words).strip()):
        first, *lines = re.sub(r"\n    +", " ", block).splitlines()
        file, keep, option = (*map(str.strip, first.split("|")), "", "")[:3]
        yield Step(
            file=file,
            runs=tuple(run for line in lines for run in _each(line.strip())),
            keep=tuple(keep.split(", ")) if keep else (),
            mismatches=option == "mismatches",
        )
