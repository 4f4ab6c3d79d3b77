"""The command line of a script: its flags, its exit status, errors in a line.

This module imports nothing slow. Flags that several scripts share are in `flags`.
"""

import argparse
import contextlib
import functools
import importlib.util
import math
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


UNUSABLE, FAILED, INTERRUPTED = 1, 2, 130

EXTRAS = {
    "experiments": ("rich", "scipy", "tqdm"),
    "plot": ("matplotlib",),
    "train": ("optax", "orbax"),
    "oracle": ("torch", "transformers"),
}
"""Packages that scripts import and that an extra installs, by the extra's name."""


def require(extra: str) -> None:
    """Ends the process with a message if a package of an extra is not installed.

    Packages whose modules need the extra call this before the imports that would fail.
    """
    lacking = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if lacking:
        sys.exit(
            f"{pathlib.Path(sys.argv[0]).name}: error: {','.join(lacking)} is not "
            f"installed: pip install -e '.[{extra}]'"
        )


Parse = Callable[[Sequence[str] | None], argparse.Namespace]
"""The `parse_args` of a script: unusable flags end the process with status 1."""


def script(
    name: str,
    parse: Parse,
    work: Callable[[argparse.Namespace], bool | None],
    *,
    kept: str = "finished rows are in {out}",
    uses_jax: bool = True,
) -> Callable[..., int]:
    """Returns the `main(argv=None)` of a script, which returns the exit status of
    `work(parse(argv))`: 0, or `FAILED` where that returns False.

    Unusable input, an interrupt, a full disk and the like become one line on standard
    error, and so do logits of NaN, which allow no conclusion (status `FAILED`). Where
    the file of `work` is run, and not imported, the status ends the process.

    Args:
      name: the script's name, which begins that line.
      kept: what an interrupt leaves behind, with flags in braces; nothing without an
        `--out`, where there is one.
      uses_jax: check first that there is a device to run on.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        args, status = None, UNUSABLE
        try:
            args = parse(argv)
            if uses_jax:
                from spec_jax.ops import dispatch  # Scripts have it already.

                dispatch.backend()  # Raises if jax cannot start.
            is_well = work(args)
            return FAILED if is_well is not None and not is_well else 0
        except KeyboardInterrupt:
            left = kept.format(**vars(args)) if getattr(args, "out", args) else ""
            line, status = "; ".join(filter(None, ["interrupted", left])), INTERRUPTED
        except Exception as error:
            said = _line_of(error)
            if said is None:
                raise
            line = f"error: {_with_flags(said, args)}"
            if isinstance(error, FloatingPointError):
                status = FAILED
        print(f"{name}: {line}", file=sys.stderr)
        return status

    if work.__module__ == "__main__":
        status = main()
        if status == INTERRUPTED:
            # Skips the interpreter's clean-up: that of jax crashes in a computation.
            sys.stdout.flush()
            os._exit(status)
        sys.exit(status)
    return main


def _line_of(error: Exception) -> str | None:
    """Returns the message of an error that is no bug of the code; None for others."""
    line = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return line or "no memory left; ask for less, or free some"
    if isinstance(error, OSError):
        reason = error.strerror or line
        return reason if error.filename is None else f"{error.filename}: {reason}"
    # Subclasses of RuntimeError do not count: jax raises them for bugs of a program.
    known = ValueError | NotImplementedError | FloatingPointError
    if isinstance(error, known) or type(error) is RuntimeError:
        return line
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in line:
        return f"{line} Ask for shorter texts, or fewer prompts at once"
    return None


def _with_flags(line: str, args: argparse.Namespace | None) -> str:
    """Replaces the library's `page_size=12` by `--page-size 12`, if that was given."""
    for name, value in vars(args).items() if args else ():
        for given in value if isinstance(value, tuple | list) else (value,):
            # A file may have another value under the same name.
            text = rf"(?<![\w.]){name}={re.escape(repr(given))}(?![\w.]*\w)"
            line = re.sub(text, lambda _, n=name, v=given: f"{flag_of(n)} {v}", line)
    return line


class Parser(argparse.ArgumentParser):
    """A parser that exits with status 1 on a usage error, as on all unusable input.

    (`argparse` exits with 2, which means "tokens differ" here.)
    """

    def __init__(self, description: str):
        """Takes the docstring of a script, which --help prints as it is written."""
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form)

    def error(self, message: str):
        message = " ".join(message.split())
        self.exit(UNUSABLE, f"{self.prog}: error: {message} (flags: --help)\n")


def parser(doc: str, text: str, **kinds: Any) -> Parse:
    """Returns the `parse_args` of a script with that docstring and flags; see `add`."""

    def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
        made = Parser(doc)
        add(made, text, **kinds)
        return made.parse_args(argv)

    return parse_args


def flag_of(name: str) -> str:
    """Returns the name of an attribute on the command line."""
    return "--" + name.replace("_", "-")


def output(text: str) -> pathlib.Path:
    """Parses a flag that names a file to be written, in an existing folder."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a directory" if path.is_dir() else "is in no directory that exists"
        raise ValueError(f"{path}: {why}; name a file")
    return path


def positive(text: str, *, least: int = 1) -> int:
    """Parses a flag that counts something."""
    value = int(text) if text.removeprefix("-").isdecimal() else None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least}, and whole")
    return value


def number(text: str, *, above: float = -math.inf) -> float:
    """Parses a flag that is a finite number above `above`."""
    with contextlib.suppress(ValueError):
        if above < float(text) < math.inf:
            return float(text)
    bound = "" if above == -math.inf else f" above {above}"
    raise ValueError(f"{text} must be a finite number{bound}")


def one_of(choices: Collection[str], *, can_import: bool = False) -> Callable:
    """Returns the type of a flag that is one of `choices`, or may be module:Name."""

    def parse(text: str) -> str:
        if text not in choices and not (can_import and ":" in text):
            more = ", nor written as package.module:Name" if can_import else ""
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}{more}")
        return text

    return parse


def names(kind: Callable[[str], Any], *, is_sorted: bool = False) -> Callable:
    """Returns the type of a flag that lists values, each once, as given or sorted."""

    def parse(text: str) -> tuple:
        values = dict.fromkeys(kind(part.strip()) for part in text.split(","))
        return tuple(sorted(values) if is_sorted else values)

    return parse


KINDS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "TOKENS", "ROWS"), positive),
    **dict.fromkeys(
        ("N,N,...", "K,K,...", "TOKENS,..."), names(positive, is_sorted=True)
    ),
    "T,...": names(number, is_sorted=True),
    **dict.fromkeys(("P", "T"), float),
    "RATE": functools.partial(number, above=0),
    "FILE": output,
    "DIR": pathlib.Path,
    "I": functools.partial(positive, least=0),
    "PATTERN": re.compile,
    "TEXT": str,
}
"""Types of flags by the names of their values; their `ValueError` is the message."""

_FLAG = re.compile(r"([\w/-]+)(?: ([^\s=]+))?(?:=(\S+))?\s+(.*)", re.DOTALL)


def add(group: argparse._ActionsContainer, text: str, **kinds: Any) -> None:
    """Adds the flags that a text lists in the form of a help text, one after the other.

    Args:
      text: `--name/--alias VALUE=default  help`, continued on indented lines; without
        a VALUE the flag is a switch, `VALUE!` is required, with `VALUE*` it may be
        given several times, and `VALUE+` takes several values, of which the default has
        commas between them. The help ends with the default. A name without dashes is
        that of a positional argument, of which `VALUE*` are any number.
      kinds: the type of each VALUE, or its choices, in addition to `KINDS`.
    """
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        name, value, default, words = _FLAG.fullmatch(entry).groups()
        words = " ".join(words.split())
        how: dict[str, Any] = {"action": "store_true"}
        if value is not None:
            value, many = value.rstrip("!*+"), value[-1]
            kind = (KINDS | kinds)[value]
            how = {"type": _typed(kind), "default": default}
            how |= {"metavar": value} if callable(kind) else {"choices": kind}
            # As a value, since scripts compare values with it.
            if callable(kind) and default is not None:
                several = many == "+" and [*map(kind, default.split(","))]
                how["default"] = several or kind(default)
            if many == "!":
                how["required"] = True
            elif many == "*" and name.startswith("-"):
                how |= {"action": "append", "default": []}
            elif many in "*+":
                how["nargs"] = many
        if default is not None:
            words += f" (default: {default})"
        group.add_argument(*name.split("/"), help=words, **how)


def _typed(kind: Any) -> Callable[[str], Any]:
    """Returns the type of a flag, whose usage error is the message of its kind."""

    def parse(text: str) -> Any:
        try:
            return kind(text) if callable(kind) else _choice(text)
        except (ValueError, re.error) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _choice(text: str) -> str:
    """Returns the text of a choice; raises `ValueError` for removed implementations."""
    from spec_jax.typing import REMOVED_IMPLS

    if text in REMOVED_IMPLS:
        raise ValueError(REMOVED_IMPLS[text])
    return text
