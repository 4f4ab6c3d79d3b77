"""Prompt files: rows that are accepted, and faults, which are named with their line."""

import collections
import json
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from experiments.lib import prompt_files


def parse(spec) -> list[prompt_files.Prompt]:
    return prompt_files.parse(str(spec))


def write(path: pathlib.Path, *lines) -> pathlib.Path:
    rows = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes("".join(row + "\n" for row in rows).encode())
    return path


def one_line_error(spec) -> str:
    """Returns the message of the error that `spec` causes, which is a single line."""
    with pytest.raises(ValueError) as caught:
        parse(spec)
    (message,) = str(caught.value).splitlines()
    return message


def test_number_takes_the_first_bundled_prompts():
    every = parse(50)
    assert parse(3) == every[:3] and every[0].text == "def split_header(line):\n"
    assert [p.id for p in every] == [f"py-{i:02d}" for i in range(1, 51)]
    kinds = collections.Counter(p.category for p in every)
    assert kinds == {"function": 22, "class": 18, "module": 10}
    # A prompt that ends in a space would ask for a token that text rarely has.
    lines = [line for p in every for line in p.text.split("\n")]
    assert all(line == line.rstrip() and "\t" not in line for line in lines)


SYSTEM, ASKS = ({"role": r, "content": c} for r, c in (("system", "x"), ("user", "a")))
SAYS, AGAIN = ({"role": r, "content": "cd"} for r in ("assistant", "user"))
READ = (
    # Keys in order of preference.
    ({"turns": ["t"], "text": "x", "question": "q", "prompt": "p"}, {"text": "p"}),
    ({"turns": ["t", "u"], "text": "x", "question": "q"}, {"text": "q"}),
    ({"turns": ["t", "u"], "text": "x"}, {"text": "x", "next_turns": ()}),
    ({"prompt": None, "text": "x"}, {"text": "x"}),
    # Rows as data sets have them: HumanEval, MBPP, MT-bench and Spec-Bench.
    ({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
     {"id": "HumanEval/0", "text": "def f():\n"}),
    ({"text": "Write it.", "code": "R = 3", "task_id": 2, "test_list": []},
     {"id": "2", "text": "Write it."}),
    ({"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]},
     {"id": "81", "text": "Compose.", "category": "writing",
      "next_turns": ("Rewrite.",)}),
    # The prompt is the user's last message, after those before it; an answer that
    # the file holds is left out, as one will be generated.
    ({"messages": [ASKS]}, {"text": "a", "messages": [ASKS]}),
    ({"messages": [SYSTEM, ASKS, SAYS, AGAIN]},
     {"text": "cd", "history": (SYSTEM, ASKS, SAYS)}),
    ({"id": "x", "messages": [ASKS, SAYS]}, {"id": "x", "text": "a"}),
    # Text stays as it is.
    *(({"prompt": text}, {"text": text})
      for text in ("  x\n\n", "a\u2028b\x0cc", "\U0001f600")),
)  # fmt: skip


def test_a_row_is_a_prompt(tmp_path):
    """Fails if a key, a turn, a message or the id of a row is lost."""
    for row, expected in READ:
        line = json.dumps(row, ensure_ascii=False)
        (found,) = parse(write(tmp_path / "a.jsonl", line))
        own = {"id": "1", "category": None, "next_turns": (), "history": ()} | expected
        assert {name: getattr(found, name) for name in own} == own


def prompts_of(categories) -> list[prompt_files.Prompt]:
    numbered = enumerate(categories)
    return [prompt_files.Prompt(id=str(i), text="x", category=c) for i, c in numbered]


CATEGORIES = st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=40)


@hypothesis.settings(deadline=None)
@hypothesis.given(CATEGORIES, st.data(), st.integers(0, 5))
def test_samples_are_stratified(categories, data, seed):
    """Checks that each category has its share, within one, in the order of the file."""
    prompts = prompts_of(categories)
    size = data.draw(st.integers(1, len(prompts)))
    taken = prompt_files.sample(prompts, size, seed=seed)
    assert len(taken) == size
    places = [int(prompt.id) for prompt in taken]
    assert places == sorted(set(places))
    found = collections.Counter(prompt.category for prompt in taken)
    for category, count in collections.Counter(categories).items():
        assert abs(found[category] - size * count / len(prompts)) < 1
    assert prompt_files.sample(prompts, size, seed=seed) == taken


def test_samples_by_hand(tmp_path):
    """Fails if seeds draw alike, a seed draws differently, or a row is never drawn."""
    prompts = prompts_of(["a"] * 6 + ["b"] * 3)
    places = lambda seed: [
        int(prompt.id) for prompt in prompt_files.sample(prompts, 3, seed=seed)
    ]
    assert (places(0), places(1)) == ([3, 4, 7], [4, 5, 7])
    assert {place for seed in range(60) for place in places(seed)} == set(range(9))
    path = tmp_path / "a.jsonl"
    assert parse("5@3") == prompt_files.sample(parse(50), 5, seed=3)
    # A sample needs the whole file: a faulty row is named wherever it is.
    write(path, {"prompt": "x"}, {"prompt": "y"}, "{")
    assert "line 3" in one_line_error(f"{path}:1@0")
    assert len(parse(f"{path}:1")) == 1


def test_plain_text_is_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n   \n  second \x0c{\n\nlast")
    prompts = parse(path)
    assert [p.text for p in prompts] == ["first", "  second \x0c{", "last"]
    assert [p.id for p in prompts] == ["1", "4", "6"]


def test_faulty_row_is_named_with_its_line(tmp_path):
    for fault, said in (
        ('{"prompt": "x"', "no JSON"),
        ('["x"]', "not a JSON object but a list"),
        ('{"answer": "x", "n": 1}', "keys found: answer, n"),
        ('{"prompt": " \\n"}', "empty"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "is missing"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "of 'system'"),
        ('{"messages": [{"role": "user", "content": [{}]}]}', "message 1 is no object"),
    ):
        path = write(tmp_path / "a.jsonl", {"prompt": "x"}, "", fault)
        message = one_line_error(path)
        assert f"{path}, line 3:" in message and said in message
