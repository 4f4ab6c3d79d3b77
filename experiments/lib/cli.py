"""The command line of a script: its flags, its exit status, errors in a line.

Imports nothing that takes time. Flags that several scripts share are in `flags`.
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
from typing import Any, NoReturn


UNUSABLE, NOT_FINITE, INTERRUPTED = 1, 2, 130

EXTRAS = {
    "experiments": ("rich", "scipy", "tqdm"),
    "plot": ("matplotlib",),
    "train": ("optax", "orbax"),
    "oracle": ("torch", "transformers"),
}
"""What scripts import that is not installed with the package, by what installs it."""


def require(extra: str) -> None:
    """Ends the process with a line where something of an extra is not installed.

    The packages whose modules need it call it, before the imports that would fail.
    """
    lacking = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if lacking:
        sys.exit(
            f"{pathlib.Path(sys.argv[0]).name}: error: {','.join(lacking)} is not "
            f"installed: pip install -e '.[{extra}]'"
        )


def rows_in_out(args: argparse.Namespace) -> str:
    """Says where an interrupted script leaves the rows that it has written."""
    return f"finished rows are in {args.out}" if args.out else ""


def script(
    name: str,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    work: Callable[[argparse.Namespace], int],
    *,
    kept: Callable[[argparse.Namespace], str] = rows_in_out,
    uses_jax: bool = True,
) -> Callable[..., int]:
    """Returns the `main(argv=None)` of a script: the exit status of `work(parse())`.

    Unusable input, an interrupt, a full disk and the like become one line on standard
    error, and so do logits of NaN, of which nothing is to be concluded (`NOT_FINITE`).

    Args:
      name: of the script, for the line.
      kept: what an interrupt leaves behind, to be said.
      uses_jax: check first that there is a device to run on.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        args, status = None, UNUSABLE
        try:
            args = parse(argv)
            if uses_jax:
                from spec_jax.ops import dispatch  # The scripts have it by now.

                dispatch.backend()  # Says why, where jax cannot start.
            return work(args)
        except KeyboardInterrupt:
            left = kept(args) if args else ""
            line, status = "; ".join(filter(None, ["interrupted", left])), INTERRUPTED
        except Exception as error:
            said = _line_of(error)
            if said is None:
                raise
            line = f"error: {_with_flags(said, args)}"
            if isinstance(error, FloatingPointError):
                status = NOT_FINITE
        print(f"{name}: {line}", file=sys.stderr)
        return status

    return main


def end(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit status of `main()`."""
    status = main()
    if status == INTERRUPTED:
        # Without the clean-up of the interpreter: jax's crashes in a computation.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _line_of(error: Exception) -> str | None:
    """Returns the line of an error that is no fault of the program; None for others."""
    line = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return line or "no memory left; ask for less, or free some"
    if isinstance(error, OSError):
        reason = error.strerror or line
        return reason if error.filename is None else f"{error.filename}: {reason}"
    # Not subclasses of RuntimeError: jax raises those for faults of a program.
    known = ValueError | NotImplementedError | FloatingPointError
    if isinstance(error, known) or type(error) is RuntimeError:
        return line
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in line:
        return f"{line} Ask for shorter texts, or fewer prompts at once"
    return None


def _with_flags(line: str, args: argparse.Namespace | None) -> str:
    """Writes `--page-size 12` for the library's `page_size=12`, if that was given."""
    for name, value in vars(args).items() if args else ():
        for given in value if isinstance(value, tuple | list) else (value,):
            # A file may say another value under the same name.
            text = rf"(?<![\w.]){name}={re.escape(repr(given))}(?![\w.]*\w)"
            line = re.sub(text, lambda _, n=name, v=given: f"{flag_of(n)} {v}", line)
    return line


class Parser(argparse.ArgumentParser):
    """Exits with status 1 on a usage error, as on all unusable input.

    (`argparse` takes 2, which is "tokens differ" here.)
    """

    def __init__(self, description: str):
        """Takes the docstring of a script, printed as it is written."""
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form)

    def error(self, message: str):
        message = " ".join(message.split())
        self.exit(UNUSABLE, f"{self.prog}: error: {message} (flags: --help)\n")


def flag_of(name: str) -> str:
    """How the attribute is called on the command line."""
    return "--" + name.replace("_", "-")


def output(text: str) -> pathlib.Path:
    """The type of a flag that names a file to be written, in a folder that is there."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a directory" if path.is_dir() else "is in no directory that exists"
        raise ValueError(f"{path}: {why}; name a file")
    return path


def positive(text: str, *, least: int = 1) -> int:
    """The type of a flag that counts something."""
    value = int(text) if text.removeprefix("-").isdecimal() else None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least}, and whole")
    return value


def number(text: str, *, above: float = -math.inf) -> float:
    """The type of a flag that is a number, and none of those that are not finite."""
    with contextlib.suppress(ValueError):
        if above < float(text) < math.inf:
            return float(text)
    bound = "" if above == -math.inf else f" above {above}"
    raise ValueError(f"{text} must be a finite number{bound}")


def one_of(choices: Collection[str], *, can_import: bool = False) -> Callable:
    """The type of a flag that is a name, or where it can be imported module:Name."""

    def parse(text: str) -> str:
        if text not in choices and not (can_import and ":" in text):
            more = ", nor written as package.module:Name" if can_import else ""
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}{more}")
        return text

    return parse


def names(kind: Callable[[str], Any], *, is_sorted: bool = False) -> Callable:
    """The type of a flag that lists values: in the order given, each of them once."""

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
"""Types of flags by the names of their values; `ValueError` says what is wrong."""

_FLAG = re.compile(r"([\w/-]+)(?: ([^\s=]+))?(?:=(\S+))?\s+(.*)", re.DOTALL)


def add(group: argparse._ActionsContainer, text: str, **kinds: Any) -> None:
    """Adds the flags that a text lists as their help does, one after the other.

    Args:
      text: `--name/--alias VALUE=default  help`, continued on indented lines; without
        a VALUE the flag is a switch, with `VALUE*` it may be given again, and after
        `VALUE+` others may follow. The help gets the default. A name without dashes is
        one of an argument.
      kinds: the type of each VALUE, or the choices that there are; more than `KINDS`.
    """
    for entry in re.split(r"\n(?=--)", textwrap.dedent(text).strip()):
        name, value, default, words = _FLAG.fullmatch(entry).groups()
        words = " ".join(words.split())
        how: dict[str, Any] = {"action": "store_true"}
        if value is not None:
            value, many = value.rstrip("*+"), value[-1]
            kind = (KINDS | kinds)[value]
            how = {"type": _typed(kind), "default": default}
            if not callable(kind):
                how["choices"] = kind
            else:  # As a script compares a value with it.
                how["metavar"] = value
                how["default"] = None if default is None else kind(default)
            if many == "*":
                how |= {"action": "append", "default": []}
            elif many == "+":
                how |= {"nargs": "+", "default": default and [kind(default)]}
        if default is not None:
            words += f" (default: {default})"
        group.add_argument(*name.split("/"), help=words, **how)


def _typed(kind: Any) -> Callable[[str], Any]:
    """The type of a flag, whose line is what its kind says of a text."""

    def parse(text: str) -> Any:
        try:
            return kind(text) if callable(kind) else _choice(text)
        except (ValueError, re.error) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _choice(text: str) -> str:
    """Returns the text of a choice; implementations that were removed say so."""
    from spec_jax.typing import REMOVED_IMPLS

    if text in REMOVED_IMPLS:
        raise ValueError(REMOVED_IMPLS[text])
    return text
