"""Names of models where a path was expected: where their files are, or how to get them.

Nothing is downloaded here.
"""

import os
import pathlib
import re


_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

FETCHED = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}
"""Files that `experiments/fetch_model.py` puts into `cache`, by the model's name."""


def cache() -> pathlib.Path:
    """Returns the user's folder of fetched models; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # Relative ones are to be ignored, says the standard.
        base = os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "spec_jax"


def locate(name: str | os.PathLike) -> pathlib.Path:
    """Returns the folder or the file of a model.

    A path that exists is itself. Otherwise a name of `FETCHED` is its file, and a name
    such as "Qwen/Qwen3-0.6B" what Hugging Face's local cache has of it, where
    `huggingface_hub` is installed.

    Returns:
      A path that does not exist for all other names: `hint` says more.

    Raises:
      ValueError: a model of `FETCHED` that was not fetched yet.
    """
    path, text = pathlib.Path(name), os.fspath(name)
    if os.path.exists(path):  # False, too, where that cannot be found out.
        return path
    if text in FETCHED:
        file = cache() / FETCHED[text]
        if os.path.isfile(file):
            return file
        raise ValueError(
            f"{text} is not on this machine: run `python experiments/fetch_model.py "
            f"{text}`, or copy {file.name} to {file.parent}"
        )
    return _in_hub_cache(text) or path if _ID.fullmatch(text) else path


def _in_hub_cache(name: str) -> pathlib.Path | None:
    """Returns the folder of a model in Hugging Face's cache; None where it has none."""
    try:
        import huggingface_hub
    except ImportError:
        return None
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(name, local_files_only=True)
        )
    except (OSError, ValueError):  # Not there; the reader of the path says so.
        return None


def hint(path: str | os.PathLike) -> str | None:
    """Says how to download what does not exist and reads like `org/name`.

    Nothing is looked up: the hub may or may not have it.

    Returns:
      A clause with the command, or None for a path that exists or is no such name.
    """
    name = os.fspath(path)
    if not _ID.fullmatch(name) or pathlib.Path(name).exists():
        return None
    folder = name.partition("/")[2]
    command = f"hf download {name} --local-dir {folder}"
    return f"for a model of the hub: `{command}`, then name the folder {folder}"
