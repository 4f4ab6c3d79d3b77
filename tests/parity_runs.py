"""`experiments/parity.py` on a tiny model, and what comes out: shared by tests."""

import json
import pathlib

import pytest

from experiments import parity


PROMPT = "def double(x):"
NATIVE = ("--impl", "native")


def run(folder, *more: str, prompt: bool = True) -> int:
    """The exit status; of `PROMPT` with three drafts, unless `more` names a text."""
    text = ("--prompt", PROMPT, "--gamma", "3", *NATIVE) if prompt else ()
    return parity.main(["--target", str(folder), *text, *more])


def row_of(path: pathlib.Path) -> dict:
    """The only row of a file."""
    (line,) = path.read_text().splitlines()
    return json.loads(line)


def pattern_found(pattern: str, text: str) -> None:
    """Fails unless a message holds the pattern, wherever its lines were broken."""
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(" ".join(text.split()))
