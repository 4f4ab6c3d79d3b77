"""Renders chat templates: makes a prompt of Jinja source and messages, within a time.

A template comes with a model's files and is not trusted. It runs in Jinja's sandbox,
with Hugging Face's settings, filters and globals, on copies of the messages, and is
interrupted after `MAX_SECONDS`. Its memory is not bounded, as in Hugging Face.
"""

import contextlib
import ctypes
import datetime
import functools
import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox


# Far above what any model's template needs: Qwen3's takes 1 ms.
MAX_SECONDS = 10.0
_MAX_MESSAGE = 200  # characters


def render(source: str, messages: Sequence[Any], **variables: Any) -> str:
    """Renders `messages` by a template.

    Args:
      source: the template.
      messages: of text, numbers, truth values, None, lists, tuples and mappings of
        such; they are copied.
      variables: further names that the template may use, with values as in messages.

    Raises:
      ValueError: the template is not valid, refuses the messages, fails, or takes too
        long; or the messages hold something else. The message is one line.
    """
    try:
        with _time_limit(MAX_SECONDS):
            template = _compile(source)
            return template.render(messages=_plain(messages), **_plain(variables))
    except Exception as error:  # A template may raise whatever Python can.
        raise ValueError(_one_line(error)) from None


def check_options(source: str, options: Collection[str], *, own: set[str]) -> None:
    """Raises `ValueError` for options that a template does not read.

    Args:
      own: names that the caller sets, which are refused as options.
    """
    if not options:
        return
    try:
        parsed = _environment().parse(source)
        known = jinja2.meta.find_undeclared_variables(parsed) - own
    except Exception as error:
        raise ValueError(_one_line(error)) from None
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"does not read {', '.join(unknown)}; its options are "
            f"{', '.join(sorted(known)) or 'none'}"
        )


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `_TooLongError` in this thread after `seconds`, between two bytecodes."""
    thread = ctypes.c_ulong(threading.get_ident())
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    timer = threading.Timer(
        seconds, interrupt, (thread, ctypes.py_object(_TooLongError))
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        interrupt(thread, None)  # Clears an interrupt that came too late.


def _one_line(error: Exception) -> str:
    """Returns an exception's message, with its type unless a template raised it."""
    text = " ".join(str(error).split())
    if len(text) > _MAX_MESSAGE:
        text = text[:_MAX_MESSAGE] + " ..."
    if isinstance(error, _TooLongError):
        return f"takes more than {MAX_SECONDS:g} s to render; use another template"
    if isinstance(error, (jinja2.TemplateError, _RefusedError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _plain(value: Any) -> Any:
    """Copies what JSON can hold: a template cannot reach the caller's objects."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    for kind in (bool, str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise _RefusedError(
        f"the messages or options hold {type(value).__name__}; give text, numbers, "
        "lists and mappings"
    )


class _RefusedError(ValueError):
    """Messages or options hold what a template may not have."""


class _TooLongError(Exception):
    """A template takes too long; a timer raises it, and so without a message."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what an assistant says, for training; no effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Parses the block's contents, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    now = datetime.datetime.now
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
