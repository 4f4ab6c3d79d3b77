"""Runs of llama.cpp's programs on GGUF files, and parsers of their output.

Flags and output are those of llama.cpp 0.5. A program that is missing, fails or prints
something else raises a `ValueError` of one line.
"""

import contextlib
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from experiments.lib import compare, processes
from spec_jax.analysis import metrics


BENCH, PLAIN, SPECULATIVE = PROGRAMS = (
    "llama-bench",
    "llama-completion",
    "llama-speculative-simple",
)

SPEC_TYPES = {
    "ngram": "ngram-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
"""llama.cpp's names of sources of drafts, by our names."""

LOOKED_UP = 2
"""Number of tokens whose last occurrence its prompt lookup continues."""

_END = b" [end of text]\n"
# Greedy, by the shortest chain of samplers that it has.
_GREEDY = ("--temp", "0", "--samplers", "top_k", "--top-k", "1")
_TRIES = 10
"""How often a program is run if its output is cut short: a thread writes the output,
which the end of the program does not wait for, and which a busy machine delays."""

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
"""Script that runs llama.cpp's converter. It recognises pre-tokenizers of released
models by digests of their tokens of a text; here any other is given by its name."""

_AHEAD = 32
"""Extra positions of a cache, so that the last rounds draft no less than others."""

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


class Unreadable(ValueError):
    """Error for an output that lacks something: cut short, or of another version."""


def convert(
    folder: pathlib.Path,
    head: pathlib.Path,
    target: pathlib.Path,
    path: pathlib.Path,
    *,
    pre_tokenizer: str,
    dtype: str,
) -> None:
    """Writes the GGUF file of a head that reads a target, by llama.cpp's converter.

    Args:
      folder: `bin` of a build, whose sources have the converter.
      head, target: folders.
      pre_tokenizer: llama.cpp's name of the target's pre-tokenizer.
      dtype: "bfloat16" or "float32".

    Raises:
      ValueError: no sources, or a head that it does not convert.
    """
    cache = folder.parent / "CMakeCache.txt"  # Names the sources.
    found = cache.is_file() and _SOURCES.search(cache.read_text(errors="replace"))
    script = pathlib.Path(found[1] if found else "") / "convert_hf_to_gguf.py"
    if not script.is_file():
        raise ValueError(
            f"{cache}: names no sources of llama.cpp with convert_hf_to_gguf.py, which "
            "writes heads as GGUF; leave the sources where they were built"
        )
    kind = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    command = ("-c", _CONVERT, script, pre_tokenizer, head, "--outtype", kind)
    _run(sys.executable, *command, "--target-model-dir", target, "--outfile", path)
    if not path.is_file():
        raise ValueError(f"{script}: wrote no GGUF file of {head}")


def bench(
    folder: pathlib.Path,
    model: pathlib.Path,
    *,
    prompts: Sequence[int],
    tokens: int,
    repeats: int,
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns median seconds by llama-bench's names, and its build and processor.

    `pp64` is the time of a whole prompt of 64 tokens, `tg64` that of one of 64 tokens.

    Args:
      prompts: lengths of prompts, each a batch of its own.
      tokens: number of tokens to generate one by one, after an empty prompt.
      repeats: timed runs of each test, after a warm-up.
    """
    flags = ["-m", model, "-t", processes.usable_cores(), "-o", "jsonl", "-n", tokens]
    flags += ["-r", repeats, "-p", ",".join(map(str, prompts))]
    done, found, told = _run(folder / BENCH, *flags), {}, {}
    try:
        for row in map(json.loads, done.stdout.splitlines()):
            size, seconds = row["n_prompt"], statistics.median(row["samples_ns"]) / 1e9
            name = f"pp{size}" if size else f"tg{row['n_gen']}"
            found[name] = seconds if size else seconds / row["n_gen"]
            told = {"build": str(row["build_commit"]), "cpu": str(row["cpu_info"])}
    except (ValueError, KeyError, TypeError):
        raise _unreadable(done) from None
    if set(found) != {f"pp{n}" for n in prompts} | {f"tg{tokens}"}:
        raise _unreadable(done)
    return found, told


def generate(
    folder: pathlib.Path,
    model: pathlib.Path,
    prompt: bytes,
    *,
    num_prompt: int,
    max_tokens: int,
    capacity: int,
    gamma: int | None = None,
    drafter: str | None = None,
    draft: pathlib.Path | None = None,
) -> compare.Generated:
    """Decodes greedily after a prompt that is taken literally.

    Args:
      num_prompt: tokens of the prompt; a `ValueError` says that it reads others.
      capacity: positions of the cache.
      gamma: drafts of a round at most, never fewer by confidence; None: one token a
        step.
      drafter: our name, a key of `SPEC_TYPES`.
      draft: GGUF file of the draft; None: prompt lookup, by `LOOKED_UP` tokens.
    """
    threads = processes.usable_cores()
    flags = ["-m", model, "-t", threads, "-tb", threads, "-c", capacity + _AHEAD]
    if gamma is None:
        program, read = PLAIN, _read_plain
        flags += ["-n", max_tokens, "--no-display-prompt", "-no-cnv"]
    else:
        program, read = SPECULATIVE, _read_speculative
        # The program ends once it has more tokens than it was asked for; its last
        # rounds draft less.
        flags += ["-n", max_tokens - 1, "--spec-type", SPEC_TYPES[drafter]]
        if draft is None:
            sizes = "--spec-ngram-simple-size"
            flags += [f"{sizes}-n", LOOKED_UP, f"{sizes}-m", gamma]
        else:
            flags += ["-md", draft, "-td", threads]
            flags += ["--spec-draft-n-max", gamma, "--spec-draft-p-min", 0]
    with tempfile.NamedTemporaryFile() as file:
        file.write(prompt)
        file.flush()
        flags += ["-bf", file.name, "--no-escape", *_GREEDY]
        for _ in range(_TRIES):
            done = _run(folder / program, *flags)
            with contextlib.suppress(Unreadable):  # Again where output is cut short.
                return read(done, prompt, num_prompt)
    raise _unreadable(done)


Done = subprocess.CompletedProcess


def _read_plain(done: Done, prompt: bytes, num_prompt: int) -> compare.Generated:
    found, text = _numbers(done, _OF_PLAIN, num_prompt), done.stdout
    if not text.endswith(b"\n\n"):
        raise _unreadable(done)
    steps = int(found["steps"])
    return compare.Generated(
        text=text.removesuffix(b"\n\n").removesuffix(_END),
        count=steps + 1,  # The first comes from the prompt's logits.
        prefill_s=found["prefill_ms"] / 1e3,
        decode_s=(found["decode_ms"] + found["sampling_ms"]) / 1e3,
        steps=steps,
    )


def _read_speculative(done: Done, prompt: bytes, num_prompt: int) -> compare.Generated:
    found = _numbers(done, _OF_SPECULATIVE, num_prompt)
    beginning, end = b"\n\n" + prompt, b"\n\n\n\n"
    is_whole = done.stdout.startswith(beginning) and done.stdout.endswith(end)
    speeds = found["prefill_speed"], found["decode_speed"]
    if not (is_whole and all(speeds) and found["tokens"]):
        raise _unreadable(done)
    count, accepted = int(found["tokens"]), int(found["accepted"])
    counters = metrics.Counters(
        tokens=count,
        # Each round commits one token besides the drafts that it keeps.
        rounds=count - accepted,
        proposed=int(found["proposed"]),
        accepted=accepted,
    )
    return compare.Generated(
        text=done.stdout[len(beginning) : -len(end)],
        count=count,
        prefill_s=found["prompt_tokens"] / found["prefill_speed"],
        decode_s=count / found["decode_speed"],
        counters=counters,
    )


def _run(program: str | pathlib.Path, *flags: object) -> Done:
    """Runs a program to its end; raises `ValueError` where it fails."""
    command = [str(word) for word in (program, *flags)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1][:200] if lines else "it says nothing"
        raise ValueError(f"{program}: ended with status {done.returncode}: {said}")
    return done


def _numbers(done: Done, patterns: dict[str, str], num_prompt: int) -> dict[str, float]:
    """Returns the last number that each pattern finds in what was logged."""
    text = done.stderr.decode(errors="replace")
    try:
        found = {key: float(re.findall(x, text)[-1]) for key, x in patterns.items()}
    except (IndexError, ValueError):
        raise _unreadable(done) from None
    if found["prompt_tokens"] != num_prompt:
        raise ValueError(
            f"llama.cpp reads a prompt of {num_prompt} tokens as "
            f"{found['prompt_tokens']:.0f}: its tokenizer is another"
        )
    return found


def _unreadable(done: Done) -> Unreadable:
    """Returns the error that shows the end of what was printed."""
    printed = (done.stdout or done.stderr).decode(errors="replace")
    end = " ".join(printed.split())[-200:] or "nothing"
    return Unreadable(
        f"{done.args[0]}: an output that is not understood; it ends: {end}"
    )
