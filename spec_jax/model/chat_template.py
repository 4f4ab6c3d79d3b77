"""Chat templates: Jinja source and messages in, a prompt out, within bounds.

A template comes with a model's files, from anybody. It is run in Jinja's sandbox with
the settings, filters and globals of Hugging Face's, on copies of the messages, and is
stopped after a time and a number of characters. Both are counted in the thread that
renders, at each loop iteration, call, filter and growing operator of the template.
"""

import datetime
import functools
import json
import re
import string
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor


# Far above what any model's template needs: Qwen3's is of 4 kB and takes 1 ms.
MAX_SOURCE = 2**18  # characters
MAX_SECONDS = 10.0  # of the thread's own time, so that a busy machine changes nothing
MAX_CHARACTERS = 2**24  # of one value, and of all that is written
_MAX_WORK = 2**28  # of one operation: characters that it may write
_MAX_CONTAINERS = 2**18
_MAX_BITS = 2**16  # of an integer
_MAX_MESSAGE = 200  # characters

# Filters and methods whose result may be as long as the product of their arguments.
_GROWING = frozenset(
    "batch center expandtabs indent join ljust pprint replace rjust round slice string "
    "tojson translate urlize wordwrap xmlattr zfill".split()
)
_BRACES = ("format", "format_map")  # Methods that take a format.
_DIGITS = re.compile(r"\d{6}")
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")


def render(source: str, messages: Sequence[Any], **variables: Any) -> str:
    """Renders `messages` by a template.

    Args:
      source: the template.
      messages: of text, numbers, truth values, None, lists, tuples and mappings of
        such; they are copied.
      variables: further names that the template may use, with values as in messages.

    Raises:
      ValueError: the template is not valid, refuses the messages, fails, or exceeds a
        bound; or the messages hold something else. The message is one line.
    """
    try:
        code = _compile(source)
        environment = _Environment()
        template = jinja2.Template.from_code(
            environment, code, environment.make_globals(None)
        )
        return template.render(messages=_plain(messages), **_plain(variables))
    except Exception as error:  # A template may raise whatever Python can.
        raise ValueError(_one_line(error)) from None


def check_options(source: str, options: Collection[str], *, own: set[str]) -> None:
    """Raises `ValueError` for options that a template does not read.

    Args:
      own: names that are no options, and are refused.
    """
    if not options:
        return
    try:
        _compile(source)  # Refuses what is too long to be parsed.
        parsed = _Environment().parse(source)
        known = jinja2.meta.find_undeclared_variables(parsed) - own
    except Exception as error:
        raise ValueError(_one_line(error)) from None
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"does not read {', '.join(unknown)}; its options are "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _one_line(error: Exception) -> str:
    """Returns an exception's message, with its type where that is not implied."""
    text = " ".join(str(error).split())
    if len(text) > _MAX_MESSAGE:
        text = text[:_MAX_MESSAGE] + " ..."
    if isinstance(error, (jinja2.TemplateError, _BoundError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> types.CodeType:
    """Compiles a template so that loops and macros count their steps."""
    if len(source) > MAX_SOURCE:
        raise _BoundError(
            f"has {len(source)} characters, more than the {MAX_SOURCE} that are "
            "accepted; use another template"
        )
    environment = _Environment()
    return environment.compile(_Counting().visit(environment.parse(source)))


def _plain(value: Any) -> Any:
    """Copies what JSON can hold: a template cannot reach the caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = (_plain(item) for item in value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise _BoundError(
        f"the messages or options hold {type(value).__name__}; give text, numbers, "
        "lists and mappings"
    )


class _BoundError(ValueError):
    """A template, or what it is given, is outside the bounds of this module."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what an assistant says, for training; no effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Parses the block's contents, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Counting(jinja2.visitor.NodeTransformer):
    """Adds a step to each loop and macro, and makes `a ~ b` a call."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._with_step(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._with_step(node)

    def _with_step(self, node: Any) -> jinja2.nodes.Node:
        """Counts the text of its own body, too, as written once each time."""
        texts = node.find_all(jinja2.nodes.TemplateData)
        length = jinja2.nodes.Const(sum(len(text.data) for text in texts))
        self.generic_visit(node)  # changes it in place
        step = jinja2.nodes.ExprStmt(_call("step", [length]))
        node.body.insert(0, step.set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)  # changes it in place
        return _call("join_texts", node.nodes).set_lineno(node.lineno)


def _call(name: str, arguments: list) -> jinja2.nodes.Call:
    """Builds a call of a method of `_Environment` for a template's code."""
    function = jinja2.nodes.EnvironmentAttribute(name)
    return jinja2.nodes.Call(function, arguments, [], None, None)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of one rendering, with what is left of its time and characters."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_write,
        )
        self._deadline = time.thread_time() + MAX_SECONDS
        self._characters_left = MAX_CHARACTERS
        self.filters["tojson"] = _to_json
        self.filters = {
            name: self._bounded_filter(name, function)
            for name, function in self.filters.items()
        }
        del self.globals["lipsum"]  # Random text, and a loop that is not counted.
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now

    def step(self, num_characters: int = 0) -> str:
        """Counts one step, and text that is written; raises when a bound is met."""
        if time.thread_time() > self._deadline:
            raise _BoundError(
                f"takes more than {MAX_SECONDS:g} s to render; use another template"
            )
        self._characters_left -= num_characters
        if self._characters_left < 0:
            raise _BoundError(
                f"writes more than {MAX_CHARACTERS} characters; use another template, "
                "or shorter messages"
            )
        return ""

    def join_texts(self, *parts: Any) -> str:
        """Evaluates `a ~ b ~ ..` of a template."""
        self._check_length(sum(_size(part) for part in parts))
        return "".join(str(part) for part in parts)

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902
        """Calls a template's function; named as in Jinja, for the sake of `kwargs`."""
        __self.step()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", "")
        name = getattr(__obj, "__name__", "")
        args = _seen(name, args)
        if name in _BRACES and isinstance(owner, str):
            __self._check_format(_has_wide_braces(owner), owner, args, kwargs)
        __self._check_growth(name, owner, *args, *kwargs.values())
        return __self._checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator whose result may be larger than its operands."""
        self.step()
        if isinstance(left, int) and isinstance(right, int):
            bits = {
                "*": left.bit_length() + right.bit_length(),
                "**": left.bit_length() * max(right, 1),
            }.get(operator, 0)
            if bits > _MAX_BITS:
                raise _BoundError(f"computes an integer of {bits} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_format(_WIDE_PERCENT.search(left), left, right)
        elif operator == "*":
            repeated, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(repeated, Collection):
                self._check_growth("join", repeated, count)
        elif hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_length(len(left) + len(right))
        return self._checked(super().call_binop(context, operator, left, right))

    def _strftime_now(self, form: str) -> str:
        """Formats the local time for a template."""
        self._check_format(_WIDE_PERCENT.search(form), form)
        return datetime.datetime.now().strftime(form)

    def _bounded_filter(self, name: str, function: Callable) -> Callable:
        """Makes a filter count; attributes that Jinja set on the function are kept."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args, **kwargs):
            self.step()
            args = _seen(name, args)
            if name == "format":
                text = str(args[first])
                self._check_format(_WIDE_PERCENT.search(text), text, args, kwargs)
            self._check_growth(name, *args[first:], *kwargs.values())
            return self._checked(function(*args, **kwargs))

        return bounded

    def _check_growth(self, name: str, owner: Any, *others: Any) -> None:
        """Refuses, before it is done, what could fill the memory; numbers are widths
        and repetitions.
        """
        if name not in _GROWING:
            return
        sizes = (abs(x) if isinstance(x, int) else _size(x) for x in others)
        if max(_size(owner), 1) * max(sum(sizes), 1) > _MAX_WORK:
            raise _BoundError(f"an operation of more than {_MAX_WORK} characters")

    def _check_format(self, is_wide: Any, *values: Any) -> None:
        """Refuses a format of very wide fields, or of very much else."""
        text, *others = values
        if is_wide or len(text) * max(_size(others), 1) > _MAX_WORK:
            raise _BoundError(f"a format of more than {_MAX_WORK} characters")

    def _check_length(self, length: int) -> None:
        if length > MAX_CHARACTERS:
            raise _BoundError(
                f"makes a value of more than {MAX_CHARACTERS} characters or items; use "
                "another template, or shorter messages"
            )

    def _checked(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            self._check_length(len(value))
        return value


@jinja2.pass_context  # So that Jinja does not write constants when it compiles.
def _write(context: jinja2.runtime.Context, value: Any) -> Any:
    """Counts a value that is written out; Jinja makes text of it."""
    cast(_Environment, context.environment).step(_size(value))
    return value


def _seen(name: str, args: tuple) -> tuple:
    """Lists in the place of iterators, whose length cannot be seen, where it counts."""
    if name not in _GROWING:
        return args
    return tuple(list(x) if isinstance(x, Iterator) else x for x in args)


def _has_wide_braces(text: str) -> bool:
    """Returns whether a format's field has a great width, or takes it from a value."""
    fields = string.Formatter().parse(text)
    specs = (spec for _, _, spec, _ in fields if spec)
    return any("{" in spec or _DIGITS.search(spec) for spec in specs)


def _size(value: Any) -> int:
    """Estimates the number of characters of `value` as text.

    Stops counting at `_MAX_WORK`, and there are more than that in `_MAX_CONTAINERS`:
    lists that hold each other may have any number.
    """
    total, num_containers, pending = 0, 0, [iter((value,))]
    while pending:
        for item in pending[-1]:
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, int):
                total += 1 + item.bit_length() // 3
            else:
                total += 2
                num_containers += 1
                pending.append(_items(item))
                break
            if total > _MAX_WORK:
                return total
        else:
            pending.pop()
        if num_containers > _MAX_CONTAINERS:
            return _MAX_WORK + 1
    return total


def _items(value: Any) -> Iterator:
    """Returns a container's items; no items of anything else, such as a generator."""
    if isinstance(value, Mapping):
        return (part for item in value.items() for part in item)
    return iter(value if isinstance(value, Collection) else ())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encodes as Hugging Face does: Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
