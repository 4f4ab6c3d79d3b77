"""Names of the Hugging Face hub where a path was expected: how to get the files."""

import os
import pathlib
import re
from typing import Literal


_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def hint(
    path: str | os.PathLike, *, kind: Literal["model", "dataset"] = "model"
) -> str | None:
    """Says how to download a path that does not exist and reads like `org/name`.

    Nothing is looked up: the hub may or may not have it.

    Args:
      path: what a user gave as a file or a folder.
      kind: what the hub would hold under that name.

    Returns:
      A clause with the command, or None for a path that exists or is no such name.
    """
    name = os.fspath(path)
    if not _ID.fullmatch(name) or pathlib.Path(name).exists():
        return None
    folder = name.partition("/")[2]
    option = "--repo-type dataset " if kind == "dataset" else ""
    command = f"hf download {name} {option}--local-dir {folder}"
    if kind == "dataset":
        return f"for a data set of the hub: `{command}`, then name a JSON file of it"
    return f"for a model of the hub: `{command}`, then name the folder {folder}"
