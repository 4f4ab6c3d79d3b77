"""Which check caught which mutant: the table in README.md, written by what happens.

    python tests/mutants/table.py

runs every mutant and writes the table anew. The tests compare each row with what
happens to its mutant, and the rows with the mutants that there are. Exit status: 0
all caught, 1 a mutant survived.
"""

import pathlib
import sys

import batch_mutants
import checks
import jax
import kernel_mutants
import mutant as mutant_lib
import paging_mutants
import round_mutants
from rich import console as rich_console, progress


README = pathlib.Path(__file__).with_name("README.md")
GROUPS = {
    "Rounds": round_mutants.MUTANTS,
    "Pages": paging_mutants.MUTANTS,
    "Rows and kernels": kernel_mutants.MUTANTS,
    "Batches": batch_mutants.MUTANTS,
}
HEADER = "| fault | planted in | caught by |\n| --- | --- | --- |\n"
INTRODUCTION = """# Mutants

Each row is a deliberate fault that was planted in one function of the package, alone,
and the tests of the ordinary suite that failed because of it. Written by
`python tests/mutants/table.py`; the tests beside this file fail where it is not what
happens.
"""


def catches(mutant: mutant_lib.Mutant) -> dict[str, BaseException | None]:
    """How each check that should catch the mutant fails; None where it passes."""
    with mutant.planted():
        return {name: checks.CHECKS[name].failure() for name in mutant.caught_by}


def row(mutant: mutant_lib.Mutant, failures: dict[str, BaseException | None]) -> str:
    """The mutant's line of the table: the checks that failed, and no others."""
    function = mutant.where.removeprefix("spec_jax.").replace(":", ".")
    caught = [
        f"`{checks.CHECKS[name].name}`"
        for name, failure in failures.items()
        if failure is not None
    ]
    return f"| {mutant.name} | `{function}` | {', '.join(caught) or 'nothing'} |"


def rows_of(text: str) -> list[str]:
    """All lines of the tables in a README."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith(("| fault", "| ---"))]


def main() -> int:
    """Runs all mutants and writes README.md; returns the exit status."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    console = rich_console.Console(stderr=True)
    sections, survivors = [INTRODUCTION], []
    for title, mutants in GROUPS.items():
        lines = []
        for mutant in progress.track(mutants, description=title, console=console):
            failures = catches(mutant)
            survivors += [(mutant, name) for name, f in failures.items() if f is None]
            lines.append(row(mutant, failures))
        sections.append(f"## {title}\n\n{HEADER}" + "\n".join(lines) + "\n")
    README.write_text("\n".join(sections))
    for mutant, name in survivors:
        console.print(f"{mutant.name!r} survived {checks.CHECKS[name].name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
