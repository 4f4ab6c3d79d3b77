"""llama.cpp's programs: run on GGUF files, and their output read.

Knows their flags and what they print, as of llama.cpp 0.5. A program that is missing,
fails, takes too long or prints something else is a `ValueError` of one line.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from experiments.lib import compare
from spec_jax.analysis import metrics


BENCH, PLAIN, SPECULATIVE = PROGRAMS = (
    "llama-bench",
    "llama-completion",
    "llama-speculative-simple",
)

PERPLEXITY = "llama-perplexity"

SPEC_TYPES = {
    "ngram": "ngram-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
"""llama.cpp's name of where drafts come from, by ours."""

LOOKED_UP = 2
"""Tokens whose last occurrence its prompt lookup goes on from."""

_END = b" [end of text]\n"
# Greedy, by the shortest chain of samplers that it has.
_GREEDY = ("--temp", "0", "--samplers", "top_k", "--top-k", "1")
_TRIES = 10
"""How often a program is run whose output is cut short: a thread of llama.cpp's writes
it, which the end of the program does not wait for, and a busy machine holds up."""

_SOURCES = re.compile(r"^llama\.cpp_SOURCE_DIR:STATIC=(.+)$", re.MULTILINE)
_CONVERT = """
import pathlib, sys
script, name = sys.argv[1:3]
sys.path.insert(0, str(pathlib.Path(script).parent))
from conversion import base
base.TextModel.get_vocab_base_pre = lambda *_: name
import convert_hf_to_gguf
sys.argv[:3] = [script]
convert_hf_to_gguf.main()
"""
"""Runs its converter, which knows the pre-tokenizers of released models, by digests of
what they make of a text; that of any other is told here."""

_AHEAD = 32
"""Positions that a cache has beside those asked for: the last rounds draft no less."""

_NUMBER = r"\s*=?\s*([\d.]+)"
_OF_PLAIN = {
    "prefill_ms": rf"prompt eval time{_NUMBER} ms /\s*\d+ tokens",
    "prompt_tokens": r"prompt eval time\s*=\s*[\d.]+ ms /\s*(\d+) tokens",
    "decode_ms": rf"(?<!prompt) eval time{_NUMBER} ms /\s*\d+ runs",
    "steps": r"(?<!prompt) eval time\s*=\s*[\d.]+ ms /\s*(\d+) runs",
    "sampling_ms": rf"sampling time{_NUMBER} ms",
}
_OF_SPECULATIVE = {
    "prompt_tokens": r"encoded\s+(\d+) tokens in",
    # Seconds are printed to the millisecond, speeds to six digits.
    "prefill_speed": r"encoded .* speed:\s*([\d.]+) t/s",
    "tokens": r"decoded\s+(\d+) tokens in",
    "decode_speed": r"decoded .* speed:\s*([\d.]+) t/s",
    "proposed": rf"n_drafted{_NUMBER}",
    "accepted": rf"n_accept{_NUMBER}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build:
    """A folder with the programs, and how they are run."""

    folder: pathlib.Path
    threads: int
    limit_s: float  # that a program may take


class Unreadable(ValueError):
    """An output that lacks something: cut short, or of another version."""

    def __init__(self, program: str, output: bytes):
        """Takes what was printed, of which the message shows the end."""
        shown = " ".join(output.decode(errors="replace").split())[-200:] or "nothing"
        super().__init__(
            f"{program}: an output that is not understood; it ends: {shown}"
        )


def find(folder: pathlib.Path, *, threads: int, limit_s: float) -> Build:
    """Returns the build in a folder.

    Raises:
      ValueError: a program is missing.
    """
    missing = [name for name in PROGRAMS if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: no {', '.join(missing)}; name the folder `bin` of a build of "
            "llama.cpp, see docs/measurements.md"
        )
    return Build(folder=folder, threads=threads, limit_s=limit_s)


def convert(
    build: Build,
    head: pathlib.Path,
    target: pathlib.Path,
    path: pathlib.Path,
    *,
    pre_tokenizer: str,
    dtype: str,
) -> None:
    """Writes the GGUF file of a head that reads a target, by llama.cpp's converter.

    Args:
      head, target: folders.
      pre_tokenizer: llama.cpp's name of the target's.
      dtype: "bfloat16" or "float32".

    Raises:
      ValueError: no sources, or a head that it does not convert.
    """
    cache = build.folder.parent / "CMakeCache.txt"  # Says what the build is of.
    found = cache.is_file() and _SOURCES.search(cache.read_text(errors="replace"))
    script = pathlib.Path(found[1] if found else "") / "convert_hf_to_gguf.py"
    if not script.is_file():
        raise ValueError(
            f"{cache}: names no sources of llama.cpp with convert_hf_to_gguf.py, which "
            "writes heads as GGUF; leave the sources where they were built"
        )
    command = [sys.executable, "-c", _CONVERT, str(script), pre_tokenizer, str(head)]
    command += ["--target-model-dir", str(target), "--outfile", str(path)]
    command += ["--outtype", {"bfloat16": "bf16", "float32": "f32"}[dtype]]
    _run(build, command, name=str(script))
    if not path.is_file():
        raise ValueError(f"{script}: wrote no GGUF file of {head}")


def bench(
    build: Build,
    model: pathlib.Path,
    *,
    prompts: Sequence[int],
    tokens: int,
    repeats: int,
) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds by llama-bench's names, and its build and processor.

    Names are `pp64` of a prompt of 64, whole, and `tg64` of one of 64 tokens.

    Args:
      prompts: lengths of prompts, each a batch of its own.
      tokens: to be generated one by one, after nothing.
      repeats: of each test, after one that does not count.
    """
    program = str(build.folder / BENCH)
    command = [program, "-m", str(model), "-t", str(build.threads), "-o", "jsonl"]
    command += ["-r", str(repeats), "-n", str(tokens)]
    command += ["-p", ",".join(map(str, prompts))]
    done, found, told = _run(build, command, name=program), {}, {}
    try:
        for row in map(json.loads, done.stdout.splitlines()):
            size, seconds = row["n_prompt"], statistics.median(row["samples_ns"]) / 1e9
            found[f"pp{size}" if size else f"tg{row['n_gen']}"] = (
                seconds if size else seconds / row["n_gen"]
            )
            told = {"build": str(row["build_commit"]), "cpu": str(row["cpu_info"])}
    except (ValueError, KeyError, TypeError):
        raise Unreadable(program, done.stdout) from None
    if set(found) != {f"pp{n}" for n in prompts} | {f"tg{tokens}"}:
        raise Unreadable(program, done.stdout)
    return found, told


def perplexity(
    build: Build,
    model: pathlib.Path,
    text: pathlib.Path,
    *,
    window: int,
    windows: int,
) -> dict[str, float]:
    """Returns the `perplexity` of a text's windows, of each the second half.

    Args:
      window: tokens.
      windows: at most.
    """
    program = str(build.folder / PERPLEXITY)
    command = [program, "-m", str(model), "-f", str(text), "-c", str(window)]
    command += ["--chunks", str(windows), "-t", str(build.threads)]
    done = _run(build, command, name=program)
    patterns = {"perplexity": rf"Final estimate: PPL{_NUMBER}"}
    return _numbers(program, done.stdout + done.stderr, patterns)


def generate(
    build: Build,
    model: pathlib.Path,
    prompt: bytes,
    *,
    max_tokens: int,
    capacity: int,
    gamma: int | None = None,
    drafter: str | None = None,
    draft: pathlib.Path | None = None,
) -> tuple[compare.Generated, int]:
    """Decodes greedily, of which nothing is escaped or cut; returns what came, and how
    many tokens the prompt was read as.

    Args:
      capacity: positions of the cache.
      gamma: drafts of a round at most, never fewer by confidence; None: one token a
        step.
      drafter: ours, of `SPEC_TYPES`.
      draft: None: prompt lookup, by `LOOKED_UP` tokens.
    """
    threads = str(build.threads)
    flags = ["-m", str(model), "-t", threads, "-tb", threads]
    if gamma is None:
        program, read = str(build.folder / PLAIN), _read_plain
        flags += ["-n", str(max_tokens), "--no-display-prompt", "-no-cnv"]
    else:
        program, read = str(build.folder / SPECULATIVE), _read_speculative
        # It goes on until it has more than it was asked for; its last rounds draft
        # less.
        flags += ["-n", str(max_tokens - 1), "--spec-type", SPEC_TYPES[drafter]]
        if draft is None:
            sizes = "--spec-ngram-simple-size"
            flags += [f"{sizes}-n", str(LOOKED_UP), f"{sizes}-m", str(gamma)]
        else:
            flags += ["-md", str(draft), "-td", threads]
            flags += ["--spec-draft-n-max", str(gamma), "--spec-draft-p-min", "0"]
    with tempfile.NamedTemporaryFile() as file:
        file.write(prompt)
        file.flush()
        size = ("-c", str(capacity + _AHEAD), "-bf", file.name, "--no-escape")
        command = [program, *flags, *size, *_GREEDY]
        for _ in range(_TRIES - 1):  # What is cut short is run again.
            with contextlib.suppress(Unreadable):
                return read(program, _run(build, command, name=program), prompt)
        return read(program, _run(build, command, name=program), prompt)


def _read_plain(program, done, prompt) -> tuple[compare.Generated, int]:
    found, text = _numbers(program, done.stderr, _OF_PLAIN), done.stdout
    if not text.endswith(b"\n\n"):
        raise Unreadable(program, text)
    steps = int(found["steps"])
    generated = compare.Generated(
        text=text.removesuffix(b"\n\n").removesuffix(_END),
        count=steps + 1,  # The first comes from the prompt's own logits.
        prefill_s=found["prefill_ms"] / 1e3,
        decode_s=(found["decode_ms"] + found["sampling_ms"]) / 1e3,
        steps=steps,
    )
    return generated, int(found["prompt_tokens"])


def _read_speculative(program, done, prompt) -> tuple[compare.Generated, int]:
    found = _numbers(program, done.stderr, _OF_SPECULATIVE)
    beginning, end = b"\n\n" + prompt, b"\n\n\n\n"
    is_whole = done.stdout.startswith(beginning) and done.stdout.endswith(end)
    speeds = found["prefill_speed"], found["decode_speed"]
    if not (is_whole and all(speeds) and found["tokens"]):
        raise Unreadable(program, done.stdout)
    count, accepted = int(found["tokens"]), int(found["accepted"])
    counters = metrics.Counters(
        tokens=count,
        # Each round commits one token besides the drafts that it keeps.
        rounds=count - accepted,
        proposed=int(found["proposed"]),
        accepted=accepted,
    )
    generated = compare.Generated(
        text=done.stdout[len(beginning) : -len(end)],
        count=count,
        prefill_s=found["prompt_tokens"] / found["prefill_speed"],
        decode_s=count / found["decode_speed"],
        counters=counters,
    )
    return generated, int(found["prompt_tokens"])


def _run(
    build: Build, command: Sequence[str], *, name: str
) -> subprocess.CompletedProcess:
    """Runs a command to its end; errors call it `name`."""
    how = {"stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        done = subprocess.run(command, timeout=build.limit_s, **how)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{name}: not done after {build.limit_s:g} s; give --limit-s more"
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1][:200] if lines else "it says nothing"
        raise ValueError(f"{name}: ended with status {done.returncode}: {said}")
    return done


def _numbers(program: str, log: bytes, patterns: dict[str, str]) -> dict[str, float]:
    """The last number that each pattern finds in a log."""
    text = log.decode(errors="replace")
    found = {key: re.findall(pattern, text) for key, pattern in patterns.items()}
    try:
        return {key: float(numbers[-1]) for key, numbers in found.items()}
    except (IndexError, ValueError):
        raise Unreadable(program, log) from None
