"""The bundled prompts: fifty beginnings of Python source, valid so far."""

import ast
import collections
import itertools
import pathlib

import pytest

from experiments.lib import prompt_files


BUNDLED = pathlib.Path(__file__).parents[2] / "experiments/prompts/python_50.jsonl"
PROMPTS = prompt_files.parse("50", default_file=BUNDLED)

# An ending is the rest of the statement at hand, then a block below it, then the
# handlers that open `try` statements wait for.
RESTS = ("", "pass", " x", "x", "(x)", ")", "x)", "x)}", "x}", "1}", ":")
BLOCKS = ("", *("\n" + " " * indent + "pass" for indent in range(4, 24, 4)))
HANDLERS = ("", *(f"\n{' ' * i}finally:\n{' ' * i} x" for i in (4, 8)))


def _is_a_beginning(source: str) -> bool:
    """Whether some ending makes `source` a valid module."""
    for ending in itertools.product(RESTS, BLOCKS, HANDLERS, HANDLERS):
        try:
            ast.parse(source + "".join(ending))
        except SyntaxError:
            continue
        return True
    return False


def test_file_is_what_it_says():
    assert [p.id for p in PROMPTS] == [f"py-{i:02d}" for i in range(1, 51)]
    kinds = collections.Counter(p.category for p in PROMPTS)
    assert kinds == {"function": 22, "class": 18, "module": 10}
    assert len({p.text for p in PROMPTS}) == 50
    num_lines = [p.text.count("\n") for p in PROMPTS]
    assert min(num_lines) == 1
    assert 20 <= max(num_lines) <= 30


def test_no_trailing_spaces_and_no_tabs():
    # A prompt that ends in a space would ask for a token that text rarely has.
    for prompt in PROMPTS:
        assert "\t" not in prompt.text, prompt.id
        assert all(x == x.rstrip() for x in prompt.text.split("\n")), prompt.id


@pytest.mark.few(10)
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.id)
def test_prompt_is_valid_python_so_far(prompt):
    assert _is_a_beginning(prompt.text)


@pytest.mark.parametrize(
    "source", ["def f(:\n", "x = ]\n", "class A\n    x\n", "if x:\nreturn y z\n"]
)
def test_the_check_refuses_what_is_no_python(source):
    assert not _is_a_beginning(source)
