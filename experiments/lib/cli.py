"""The command line of a script: its flags, exit status, interrupts, errors in a line.

Imports nothing that takes time: `start` is called before whatever does. Flags that
several scripts share are in `flags`.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import pathlib
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from experiments.lib import files, interrupts as interrupts_lib


UNUSABLE, NOT_FINITE, INTERRUPTED = 1, 2, 130

FIGURES = (".png", ".svg")
"""What figures can be written as."""

PLOT = "pip install -e '.[plot]'"
"""What installs what draws them."""

EXTRAS = {"experiments": ("rich", "scipy"), "train": ("optax", "orbax")}
"""What scripts import that is not installed with the package, by what installs it."""

PIPE_CLOSED = 141
"""What a shell reports of a program that SIGPIPE ended, as in `script.py | head -1`."""


def start(*extras: str) -> None:
    """Lets Ctrl-C end the process with a line, until `run` is called.

    Ends it with a line where something of `EXTRAS` is not installed.

    Args:
      extras: that the script needs besides `experiments`.

    The first call of a script, before the imports: jax takes seconds. Standard streams
    that are closed, as by the shell's `>&-`, print nothing from here on.
    """
    _open_closed_streams()
    # A script that a shell runs in the background ignores interrupts.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end_at_once)
    lacking = [
        (extra, module)
        for extra in ("experiments", *extras)
        for module in EXTRAS[extra]
        if importlib.util.find_spec(module) is None
    ]
    if lacking:
        names = [",".join(dict.fromkeys(each)) for each in zip(*lacking, strict=True)]
        script = pathlib.Path(sys.argv[0]).name
        print(
            f"{script}: error: {names[1]} is not installed: pip install -e "
            f"'.[{names[0]}]'",
            file=sys.stderr,
        )
        sys.exit(UNUSABLE)


def _open_closed_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which else the next file would get, and
            # with it what libraries and processes print.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)


def _end_at_once(*_) -> NoReturn:
    name = pathlib.Path(sys.argv[0]).name
    os.write(2, f"{name}: interrupted\n".encode(errors="replace"))
    os._exit(INTERRUPTED)


def rows_in_out(args: argparse.Namespace) -> str:
    """What an interrupted script leaves behind that writes rows as they come."""
    return f"finished rows are in {args.out}" if args.out else ""


def run(
    name: str,
    parse: Callable[[], argparse.Namespace],
    work: Callable[[argparse.Namespace], int],
    *,
    kept: Callable[[argparse.Namespace], str] = rows_in_out,
    uses_jax: bool = True,
) -> int:
    """Returns the exit status of `work(parse())`.

    Unusable input, an interrupt, a full disk and the like become one line on standard
    error, and so do logits of NaN, of which nothing is to be concluded (`NOT_FINITE`);
    a reader that closes the pipe of standard output ends the script in silence
    (`PIPE_CLOSED`). Characters that standard output cannot encode are replaced.

    Args:
      name: of the script, for the line.
      kept: what an interrupt leaves behind, to be said.
      uses_jax: check first that there is a device to run on.
    """
    args = None
    with interrupts_lib.Interrupts() as interrupts, _replaced_characters():
        try:
            args = parse()
            if uses_jax:
                from spec_jax.ops import dispatch  # The scripts have it by now.

                dispatch.backend()  # Says why, where jax cannot start.
            status = work(args)
            sys.stdout.flush()
            if interrupts.came:  # A library has caught it.
                raise KeyboardInterrupt
            return status
        except SystemExit:
            raise
        except BaseException as error:
            interrupts.ignore()
            # A library may have made something else of it.
            if interrupts.came or isinstance(error, KeyboardInterrupt):
                left = kept(args) if args else ""
                line = f"interrupted{'; ' if left else ''}{left}"
                status = INTERRUPTED
            elif isinstance(error, BrokenPipeError):
                return PIPE_CLOSED
            else:
                line, status = _line_of(error), UNUSABLE
                if line is None:
                    raise
                if isinstance(error, MemoryError) and not _one_line(error):
                    line += f" (it ran with {_sizes(args)})" if _sizes(args) else ""
                line = f"error: {_with_flags(line, args)}"
                if isinstance(error, FloatingPointError):
                    status = NOT_FINITE
            print(f"{name}: {line}", file=sys.stderr)
            return status


def script(
    name: str,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    work: Callable[[argparse.Namespace], int],
    **options: Any,
) -> Callable[..., int]:
    """Returns the `main(argv=None)` of a script; options and result as of `run`."""

    def main(argv: Sequence[str] | None = None) -> int:
        return run(name, lambda: parse(argv), work, **options)

    return main


def end(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit status of `main()`."""
    try:
        status = main()
    except SystemExit as exit_:
        status = exit_.code
    try:
        sys.stdout.flush()
        can_print = True
    except OSError as error:
        can_print = False
        if not status:  # A usage message, `run` has said all else.
            is_pipe = isinstance(error, BrokenPipeError)
            status = PIPE_CLOSED if is_pipe else UNUSABLE
    if status == INTERRUPTED or not can_print:
        # Without the clean-up of the interpreter: that of jax crashes where a
        # computation was interrupted, and that of a stream fails again.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def _replaced_characters() -> Iterator[None]:
    """Standard output prints `?` for what its encoding lacks."""
    stream = sys.stdout
    if not hasattr(stream, "reconfigure"):
        yield
        return
    errors = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        # Changing it writes out what is buffered, which can fail again.
        with contextlib.suppress(OSError):
            stream.reconfigure(errors=errors)


def _line_of(error: BaseException) -> str | None:
    """The line for an error that is not a fault of the program; None for others."""
    if isinstance(error, MemoryError):
        return _one_line(error) or "no memory left; ask for less, or free some"
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, ValueError | NotImplementedError | FloatingPointError):
        return _one_line(error)
    # Not of its subclasses: jax raises those for faults of a program.
    if type(error) is RuntimeError:
        return _one_line(error)
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"{_one_line(error)} Ask for shorter texts, or fewer prompts at once"
    return None


_SIZES = ("prompts", "gen_tokens", "batch", "gamma", "contexts", "rows", "repeats")


def _sizes(args: argparse.Namespace | None) -> str:
    """The flags that say how much is asked for, as they were given or by default."""
    given = {name: getattr(args, name, None) for name in _SIZES}
    return " ".join(f"{flag_of(n)} {x}" for n, x in given.items() if x is not None)


def _with_flags(line: str, args: argparse.Namespace | None) -> str:
    """What the library calls `page_size=12` is `--page-size 12`, if that was given."""
    for name, value in vars(args).items() if args else ():
        for given in value if isinstance(value, tuple | list) else (value,):
            # What a file says under the same name has another value.
            text = rf"(?<![\w.]){name}={re.escape(repr(given))}(?![\w.]*\w)"
            line = re.sub(text, lambda _, n=name, v=given: f"{flag_of(n)} {v}", line)
    return line


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _of_system(error: OSError) -> str:
    reason = error.strerror or _one_line(error)
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    try:
        print(flush=True)  # Files are named in their errors; is it this one?
    except OSError:
        return f"standard output: cannot be written ({reason})"
    return reason


class Parser(argparse.ArgumentParser):
    """Exits with status 1 on a usage error, as on all unusable input.

    (`argparse` takes 2, which is "tokens differ" here.) So it does where a flag of
    type `output` or `figure` names a file that another flag reads or writes.
    """

    def __init__(self, description: str):
        """Takes the docstring of a script, printed as it is written."""
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form)

    def parse_args(self, args=None, namespace=None):
        parsed = super().parse_args(args, namespace)
        self._check_outputs(parsed)
        return parsed

    def error(self, message: str):
        message = " ".join(message.split())
        self.exit(UNUSABLE, f"{self.prog}: error: {message} (flags: --help)\n")

    def _check_outputs(self, args: argparse.Namespace) -> None:
        """Exits with a usage error where an output would replace something needed."""
        outputs, inputs = {}, {"the script": _bundled()}
        for action in self._actions:
            name = action.option_strings[0] if action.option_strings else action.dest
            value = getattr(args, action.dest, None)
            if value is None:
                continue
            if action.type in (output, figure):
                outputs[name] = value
            elif action.type in (source, text_source):
                inputs[name] = value
        # Rows may go to a terminal or to /dev/null, and all of them to one.
        outputs = {
            name: path
            for name, path in outputs.items()
            if path.is_file() or not path.exists()
        }
        for name, path in outputs.items():
            for reader, value in inputs.items():
                if any(files.is_same(path, file) for file in _files_of(value)):
                    self.error(
                        f"{name} {path} would replace what {reader} reads: name "
                        "another file"
                    )
        names = list(outputs)
        for i, name in enumerate(names):
            for other in names[:i]:
                if files.is_same(outputs[name], outputs[other]):
                    self.error(
                        f"{other} and {name} write to one file, {outputs[name]}: name "
                        "two"
                    )


def output(text: str) -> pathlib.Path:
    """The type of a flag that names a file to be written, found to be writable."""
    path = pathlib.Path(text)
    try:
        files.check_output(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def figure(text: str) -> pathlib.Path:
    """The type of a flag that names a figure to be drawn: as `output`, in `FIGURES`."""
    if pathlib.Path(text).suffix not in FIGURES:
        raise argparse.ArgumentTypeError(f"{text}: not a {' or '.join(FIGURES)} file")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{text}: needs matplotlib; {PLOT}")
    return output(text)


def source(text: str) -> pathlib.Path:
    """The type of a flag that names a file or a folder to be read."""
    return pathlib.Path(text)


def text_source(text: str) -> str:
    """The type of a flag that names a file, and which part of it: FILE:N."""
    return text


def _files_of(value: object) -> Iterator[pathlib.Path]:
    """The files that a flag of type `source` or `text_source` may name."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _files_of(each)
        return
    text = "/dev/stdin" if value == "-" else str(value)
    # FILE:N and the like; whichever is there is it.
    for path in (pathlib.Path(text), pathlib.Path(text.rpartition(":")[0] or text)):
        try:
            found = path.iterdir() if path.is_dir() else [path]
            yield from (file for file in found if file.is_file())
        except OSError:
            continue  # Whoever reads it says why it cannot be read.


def flag_of(name: str) -> str:
    """How the attribute is called on the command line."""
    return "--" + name.replace("_", "-")


def whole(text: str) -> int:
    """The type of a flag that is a number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} must be at least 0")
    return value


def positive(text: str) -> int:
    """The type of a flag that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def rate(text: str) -> float:
    """The type of a flag that is a number above 0."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return value


def positives(text: str) -> tuple[int, ...]:
    """The type of a flag that lists counts: in order, each of them once."""
    try:
        return tuple(sorted({positive(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of whole numbers, such as 1,2,4"
        ) from None


def one_of(choices: Collection[str], *, can_import: bool = False) -> Callable:
    """The type of a flag that is a name, or where it can be imported module:Name."""

    def parse(text: str) -> str:
        if text not in choices and not (can_import and ":" in text):
            more = ", nor written as package.module:Name" if can_import else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(choices)}{more}"
            )
        return text

    return parse


def names(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    """The type of a flag that lists values: in the order given, each of them once."""

    def parse(text: str) -> tuple:
        try:
            return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no list, such as 4,1,2 ({error})"
            ) from None

    return parse


def pattern(text: str) -> re.Pattern:
    """The type of a flag that chooses names: a regular expression found in them."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no regular expression: {error}"
        ) from None


KINDS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "TOKENS", "ROWS"), positive),
    **dict.fromkeys(("N,N,...", "K,K,...", "TOKENS,..."), positives),
    **dict.fromkeys(("P", "T"), float),
    "RATE": rate,
    "FILE": output,
    "DIR": source,
    "I": whole,
    "PATTERN": pattern,
    "TEXT": str,
}
"""Types of flags by the names of their values."""

_FLAG = re.compile(r"(--[\w/-]+)(?: ([^\s=]+))?(?:=(\S+))?\s+(.*)", re.DOTALL)


def add(group: argparse._ActionsContainer, text: str, **kinds: Any) -> None:
    """Adds the flags that a text lists as their help does, one after the other.

    Args:
      text: `--name/--alias VALUE=default  help`, continued on indented lines; without
        a VALUE the flag is a switch. The help gets the default.
      kinds: the type of each VALUE, or the choices that there are; more than `KINDS`.
    """
    for entry in re.split(r"\n(?=--)", textwrap.dedent(text).strip()):
        name, value, default, words = _FLAG.fullmatch(entry).groups()
        words = " ".join(words.split())
        if value is None:
            group.add_argument(*name.split("/"), action="store_true", help=words)
            continue
        kind = (KINDS | kinds)[value]
        if default is not None:
            words += f" (default: {default})"
        if callable(kind):
            typed = {"type": kind, "metavar": value}
            default = None if default is None else kind(default)
        else:
            typed = {"choices": kind, "type": _choice}
        group.add_argument(*name.split("/"), default=default, help=words, **typed)


def _choice(text: str) -> str:
    """The type of a flag with choices: implementations that were removed say so."""
    from spec_jax.typing import REMOVED_IMPLS

    if text in REMOVED_IMPLS:
        raise argparse.ArgumentTypeError(REMOVED_IMPLS[text])
    return text


def _bundled() -> list[pathlib.Path]:
    """What comes with the package: prompts, the embedded models, and heads."""
    package = pathlib.Path(importlib.util.find_spec("spec_jax").origin).parent
    prompts = pathlib.Path(__file__).parents[1] / "prompts"
    models = (package / "assets").iterdir()
    return [prompts, *sorted(folder for folder in models if folder.is_dir())]
