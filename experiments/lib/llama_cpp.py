"""llama.cpp's programs: run on GGUF files, and their output read.

Knows their flags and what they print, as of llama.cpp 0.5; knows nothing of JAX. A
program that is missing, fails, takes too long or prints something else is a
`ValueError` of one line that names it.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence


BENCH, PLAIN, SPECULATIVE = PROGRAMS = (
    "llama-bench",
    "llama-completion",
    "llama-speculative-simple",
)

SPEC_TYPES = {
    "draft-model": "draft-simple",
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
_SHOWN_CHARACTERS = 200

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What one generation produced."""

    text: bytes  # without the prompt and without a stop token
    prompt_tokens: int
    tokens: int  # the stop token counted
    prefill_s: float
    decode_s: float  # with the choice of tokens, without loading and printing
    steps: int  # tokens that `decode_s` was spent on
    ids: list[int] | None = None  # of our side; llama.cpp prints no tokens
    rounds: int | None = None  # None of plain decoding
    proposed: int | None = None  # drafts
    accepted: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """A test of llama-bench: seconds of each repetition."""

    seconds: list[float]  # of the whole prompt, or of one generated token
    build: str  # the commit, or whatever the build says
    cpu: str


class Unreadable(ValueError):
    """An output that lacks something: cut short, or of another version."""


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
    script = _sources(build) / "convert_hf_to_gguf.py"
    command = ["-c", _CONVERT, str(script), pre_tokenizer, str(head)]
    command += ["--target-model-dir", str(target), "--outfile", str(path)]
    command += ["--outtype", {"bfloat16": "bf16", "float32": "f32"}[dtype]]
    _call(build, script, [sys.executable, *command])
    if not path.is_file():
        raise ValueError(f"{script}: wrote no GGUF file of {head}")


def _sources(build: Build) -> pathlib.Path:
    """The folder that a build is of, as CMake noted it."""
    cache = build.folder.parent / "CMakeCache.txt"
    found = cache.is_file() and _SOURCES.search(cache.read_text(errors="replace"))
    if not found or not (pathlib.Path(found[1]) / "convert_hf_to_gguf.py").is_file():
        raise ValueError(
            f"{cache}: names no sources of llama.cpp with convert_hf_to_gguf.py, which "
            "writes heads as GGUF; leave the sources where they were built"
        )
    return pathlib.Path(found[1])


def bench(
    build: Build,
    model: pathlib.Path,
    *,
    prompts: Sequence[int],
    tokens: int,
    repeats: int,
) -> dict[str, Speed]:
    """Speeds by llama-bench's names: `pp64` of a prompt of 64, `tg64` of 64 tokens.

    Args:
      prompts: lengths of prompts, each a batch of its own; none with ().
      tokens: to be generated one by one, after nothing.
      repeats: of each test, after one that does not count.
    """
    command = ["-m", str(model), "-t", str(build.threads), "-o", "jsonl"]
    command += ["-r", str(repeats), "-n", str(tokens)]
    command += ["-p", ",".join(map(str, prompts)) if prompts else "0"]
    done = _run(build, BENCH, command)
    wanted = {f"pp{n}" for n in prompts} | {f"tg{tokens}"}
    found = {}
    try:
        for line in done.stdout.decode().splitlines():
            row = json.loads(line)
            size = row["n_prompt"] or row["n_gen"]
            name = f"pp{size}" if row["n_prompt"] else f"tg{size}"
            per = 1 if row["n_prompt"] else size
            found[name] = Speed(
                seconds=[ns / per / 1e9 for ns in row["samples_ns"]],
                build=str(row["build_commit"]),
                cpu=str(row["cpu_info"]),
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unreadable(build, BENCH, done.stdout) from None
    if set(found) != wanted or not all(speed.seconds for speed in found.values()):
        raise _unreadable(build, BENCH, done.stdout)
    return found


def complete(
    build: Build,
    model: pathlib.Path,
    prompt: bytes,
    *,
    max_tokens: int,
    capacity: int,
) -> Generated:
    """Decodes greedily, one token a step, up to the end of the text.

    Args:
      capacity: positions of the cache.
    """
    flags = ["-m", str(model), "-n", str(max_tokens)]
    flags += ["--no-display-prompt", "-no-cnv"]

    def read(done: subprocess.CompletedProcess) -> Generated:
        found, text = _read(build, PLAIN, done.stderr, _OF_PLAIN), done.stdout
        if not text.endswith(b"\n\n"):
            raise _unreadable(build, PLAIN, text)
        steps = int(found["steps"])
        return Generated(
            text=text.removesuffix(b"\n\n").removesuffix(_END),
            prompt_tokens=int(found["prompt_tokens"]),
            tokens=steps + 1,  # The first comes from the prompt's own logits.
            prefill_s=found["prefill_ms"] / 1e3,
            decode_s=(found["decode_ms"] + found["sampling_ms"]) / 1e3,
            steps=steps,
        )

    return _generate(build, PLAIN, flags, prompt, read, capacity=capacity)


def speculate(
    build: Build,
    model: pathlib.Path,
    draft: pathlib.Path | None,
    prompt: bytes,
    *,
    drafter: str,
    gamma: int,
    max_tokens: int,
    capacity: int,
) -> Generated:
    """Decodes greedily in rounds of at most `gamma` drafts, never fewer by confidence.

    Args:
      draft: None: prompt lookup, by `LOOKED_UP` tokens.
      drafter: ours, of `SPEC_TYPES`.
    """
    # It goes on until it has more than it was asked for; its last rounds draft less.
    flags = ["-m", str(model), "-n", str(max_tokens - 1)]
    flags += ["--spec-type", SPEC_TYPES[drafter]]
    if draft is None:
        sizes = "--spec-ngram-simple-size"
        flags += [f"{sizes}-n", str(LOOKED_UP), f"{sizes}-m", str(gamma)]
    else:
        flags += ["-md", str(draft), "-td", str(build.threads)]
        flags += ["--spec-draft-n-max", str(gamma), "--spec-draft-p-min", "0"]

    def read(done: subprocess.CompletedProcess) -> Generated:
        found = _read(build, SPECULATIVE, done.stderr, _OF_SPECULATIVE)
        beginning, end = b"\n\n" + prompt, b"\n\n\n\n"
        is_whole = done.stdout.startswith(beginning) and done.stdout.endswith(end)
        speeds = found["prefill_speed"], found["decode_speed"]
        if not (is_whole and all(speeds) and found["tokens"]):
            raise _unreadable(build, SPECULATIVE, done.stdout)
        tokens, accepted = int(found["tokens"]), int(found["accepted"])
        return Generated(
            text=done.stdout[len(beginning) : -len(end)],
            prompt_tokens=int(found["prompt_tokens"]),
            tokens=tokens,
            prefill_s=found["prompt_tokens"] / found["prefill_speed"],
            decode_s=tokens / found["decode_speed"],
            steps=tokens,
            # Each round commits one token besides the drafts that it keeps.
            rounds=tokens - accepted,
            proposed=int(found["proposed"]),
            accepted=accepted,
        )

    return _generate(build, SPECULATIVE, flags, prompt, read, capacity=capacity)


def _generate(
    build: Build,
    name: str,
    flags: Sequence[str],
    prompt: bytes,
    read: Callable[[subprocess.CompletedProcess], Generated],
    *,
    capacity: int,
) -> Generated:
    """Runs a program on a prompt, of which nothing is escaped or cut; reads its output.

    What is cut short is run again.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(prompt)
        file.flush()
        threads = ("-t", str(build.threads), "-tb", str(build.threads))
        size = ("-c", str(capacity + _AHEAD), "-bf", file.name, "--no-escape")
        arguments = [*flags, *threads, *size, *_GREEDY]
        for _ in range(_TRIES - 1):
            with contextlib.suppress(Unreadable):
                return read(_run(build, name, arguments))
        return read(_run(build, name, arguments))


def _run(
    build: Build, name: str, arguments: Sequence[str]
) -> subprocess.CompletedProcess:
    """Runs one of the programs to its end."""
    program = build.folder / name
    return _call(build, program, [str(program), *arguments])


def _call(
    build: Build, program: pathlib.Path, command: Sequence[str]
) -> subprocess.CompletedProcess:
    """Runs a command to its end; `program` is what errors name."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=build.limit_s,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{program}: not done after {build.limit_s:g} s; give --limit-s more"
        ) from None
    except OSError as error:
        raise ValueError(f"{program}: cannot be run ({error.strerror})") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1][:_SHOWN_CHARACTERS] if lines else "it says nothing"
        raise ValueError(f"{program}: ended with status {done.returncode}: {said}")
    return done


def _read(
    build: Build, name: str, log: bytes, patterns: dict[str, str]
) -> dict[str, float]:
    """The last number that each pattern finds in a log."""
    text, found = log.decode(errors="replace"), {}
    for key, pattern in patterns.items():
        numbers = re.findall(pattern, text)
        try:
            found[key] = float(numbers[-1])
        except (IndexError, ValueError):
            raise _unreadable(build, name, log, lacks=key) from None
    return found


def _unreadable(
    build: Build, name: str, output: bytes, *, lacks: str = ""
) -> Unreadable:
    """The error of an output that another version prints, perhaps."""
    text = output.decode(errors="replace").strip()
    shown = " ".join(text.split())[-_SHOWN_CHARACTERS:] or "nothing"
    missing = f" ({lacks} is missing)" if lacks else ""
    return Unreadable(
        f"{build.folder / name}: an output that is not understood{missing}; it ends: "
        f"{shown}"
    )
