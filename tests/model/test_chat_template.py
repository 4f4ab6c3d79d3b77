"""Chat templates: the same text as Hugging Face's, limits of time, and failures."""

import concurrent.futures
import json

import numpy as np
import pytest

from spec_jax.model import chat_template


CALL = {"function": {"name": "sök", "arguments": {"at": 1_700_000_000, "é": [0.5]}}}
CHATS = {
    "one": [{"role": "user", "content": "<é> & 'x'\n"}],
    "system": [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
    "tools": [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "here"},
        {"role": "tool", "content": "there"},
        {"role": "user", "content": [{"type": "text", "text": "parts"}]},
    ],
}
# Features that released templates use, and features that Hugging Face adds to Jinja.
FEATURES = {
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ messages | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
    "generation": """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
    {%- generation -%} {{ message.content }} {%- set x = 1 %}{% endgeneration %}
{%- elif loop.first %}{% continue %}{% endif %}
[{{ message.role }}{{ x }}]
{% endfor %}""",
    "macros": "{% macro show(m, sep=':') %}{{ m.role ~ sep ~ m.content ~ 1 }}"
    "{{ caller() if caller }}{% endmacro %}{% for m in messages %}{{ show(m) }}"
    "{% call show(m, sep=loop.index) %}<{{ m['role'] | upper }}>{% endcall %}"
    "{% endfor %}",
    "loop": "{% macro at(l) %}{{ l.index }}{{ l.last }}{% endmacro %}"
    "{% for m in messages %}{{ at(loop) }}{{ m.role }}{% endfor %}",
    "recursive": "{% for x in [[1, [2]], [3]] recursive %}"
    "({{ loop(x) if x is iterable else x }}){% endfor %}",
    "operators": "{{ 'ab' * 3 }}{{ [0] * 2 + [1] }}{{ 7 // 2 }}{{ 2 ** 10 }}"
    "{{ -7 % 4 }}{{ '%s is %5.2f' % ('x', 1.5) }}"
    "{{ '{:>4}|{}'.format('a', 17000000000) }}"
    "{{ '%d' | format(1700000000) }}{{ 1 ~ none ~ undefined_name }}{{ 1.5 * 2 }}"
    "{{ 1.5 * 1700000000 }}{{ 1700000000 * 0.5 }}{{ 2 * 'ab' }}",
    "filters": "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text + m.role | trim | title %}{% endfor %}{{ ns.text }}"
    "{{ messages | map(attribute='role') | join(', ') }}{{ 'a b' | replace(' ', '-') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ 'x' | center(7) }}{{ 'a\\nb' | indent(4, first=true) }}{{ dict(a=1).items() }}"
    "{{ '%5s' | format('y') }}{{ range(3) | list }}{{ messages[::-1] | length }}",
    "blocks": "{% set x %}<{% for m in messages %}{{ m.role }},{% endfor %}>"
    "{% endset %}{% filter upper %}{{ x }}{% endfilter %}{% block b %}!{% endblock %}"
    "{{ self.b() }}",
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("chat", CHATS)
def test_text_is_that_of_hugging_face(feature, chat):
    """Fails if a filter, a global or a setting differs from Hugging Face's."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils

    source, messages = FEATURES[feature], CHATS[chat]
    (expected,), _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=source
    )
    assert chat_template.render(source, messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% set _ = dict.update(messages[0], content='changed') %}",
        "{% set _ = dict.pop(messages[0].inner, 'a') %}",
        "{% set _ = dict.clear(messages[0]) %}",
    ],
)
def test_messages_are_not_changed(template):
    """Fails if a template can change the messages of the caller."""
    messages = [{"role": "user", "content": "mine", "inner": {"a": [1]}}]
    before = json.dumps(messages)
    chat_template.render(template, messages)
    assert json.dumps(messages) == before


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive": "{% for a in range(999) recursive %}{{ loop(range(999)) if "
    "loop.depth < 5 }}{% endfor %}",
    "filters": "{% for i in range(99) %}{% set l = range(99999) | map('upper') | "
    "map('lower') | map('title') | list %}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_time_is_bounded(monkeypatch, name):
    """Fails if a loop, a recursion or a filter has no end outside the main thread."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        ended = pool.submit(chat_template.render, ENDLESS[name], [])
        with pytest.raises(ValueError, match="takes more than 0.05 s to render; use"):
            ended.result()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\\nalternate') }}", "^roles must alternate$"),
        ("{{ raise_exception('x' * 9999) }}", "^x{200} ...$"),
        ("{{ 1 // 0 }}", "^ZeroDivisionError: .*by zero$"),
        ("{{ range(10**9) }}", "^OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "^RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "^RecursionError|MemoryError"),
        ("{% include 'x' %}", "^TypeError: no loader"),
        ("{% generation %}", "^Unexpected end of template.*endgeneration"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_failures_are_one_line(template, message):
    """Fails if an error of a template is not raised as a `ValueError` of one line."""
    with pytest.raises(ValueError, match=message) as caught:
        chat_template.render(template, [])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [b"bytes", np.arange(3), object()])
def test_messages_of_something_else(value):
    """Fails if a template is given objects whose methods it could call."""
    kind = type(value).__name__
    with pytest.raises(ValueError, match=f"messages or options hold {kind}; give text"):
        chat_template.render("x", [{"role": "user", "content": value}])


def test_messages_that_hold_themselves():
    messages = []
    messages.append(messages)
    with pytest.raises(ValueError, match="^RecursionError"):
        chat_template.render("x", messages)
