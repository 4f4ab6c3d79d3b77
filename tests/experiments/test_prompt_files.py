"""Prompt files: what is accepted, and that each fault is named where it stands."""

import collections
import json
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from experiments.lib import prompt_files


REPO = pathlib.Path(__file__).parents[2]
BUNDLED = REPO / "experiments" / "prompts" / "python_50.jsonl"


def parse(spec) -> list[prompt_files.Prompt]:
    return prompt_files.parse(str(spec), default_file=BUNDLED)


def write(path: pathlib.Path, *lines, encoding="utf-8") -> pathlib.Path:
    rows = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes("".join(row + "\n" for row in rows).encode(encoding))
    return path


def one_line_error(spec) -> str:
    """The message of the error that `spec` causes, which is a single line."""
    with pytest.raises(ValueError) as caught:
        parse(spec)
    (message,) = str(caught.value).splitlines()
    return message


def test_number_takes_the_first_bundled_prompts():
    assert parse(3) == parse(50)[:3]
    assert parse(1)[0].text == "def split_header(line):\n"
    assert [p.id for p in parse(50)] == [f"py-{i:02d}" for i in range(1, 51)]
    kinds = collections.Counter(p.category for p in parse(50))
    assert kinds == {"function": 22, "class": 18, "module": 10}
    # A prompt that ends in a space would ask for a token that text rarely has.
    lines = [line for p in parse(50) for line in p.text.split("\n")]
    assert all(line == line.rstrip() and "\t" not in line for line in lines)


def test_keys_in_order_of_preference(tmp_path):
    rows = [
        {"turns": ["t", "u"], "text": "x", "question": "q", "prompt": "p"},
        {"turns": ["t", "u"], "text": "x", "question": "q"},
        {"turns": ["t", "u"], "text": "x"},
        {"turns": ["t", "u"]},
        {"prompt": None, "text": "x"},
    ]
    prompts = parse(write(tmp_path / "a.jsonl", *rows))
    assert [p.text for p in prompts] == ["p", "q", "x", "t", "x"]
    assert [p.next_turns for p in prompts] == [(), (), (), ("u",), ()]


# Rows as data sets have them: GSM8K, HumanEval, MBPP, MT-bench and Spec-Bench.
DATA_SET_ROWS = [
    {"question": "How many eggs?", "answer": "9\n#### 9"},
    {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
    {"text": "Write a function.", "code": "R = 3", "task_id": 1, "test_list": []},
    {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]},
    {"question_id": 200, "category": "rag", "turns": ["What?"]},
]


def test_rows_of_data_sets(tmp_path):
    """All turns of a conversation, and the ids and categories that rows bring."""
    prompts = parse(write(tmp_path / "a.jsonl", *DATA_SET_ROWS))
    assert [(p.id, p.text, p.category, p.next_turns) for p in prompts] == [
        ("1", "How many eggs?", None, ()),
        ("HumanEval/0", "def f():\n", None, ()),
        ("1", "Write a function.", None, ()),
        ("81", "Compose.", "writing", ("Rewrite.",)),
        ("200", "What?", "rag", ()),
    ]
    assert all(p.history == () for p in prompts)


def test_messages(tmp_path):
    """What is answered is the user's last message, after those before it."""
    system = {"role": "system", "content": "Be brief."}
    asks, says = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [
        {"messages": [asks]},
        {"messages": [system, asks, says, {"role": "user", "content": "cd"}]},
        {"id": "x", "messages": [asks, says], "category": "k"},
    ]
    one, two, three = parse(write(tmp_path / "a.jsonl", *rows))
    assert (one.text, one.history, one.messages) == ("a", (), [asks])
    assert two.text == "cd" and two.history == (system, asks, says)
    # The answer that such files hold is left out: it is what will be generated.
    assert (three.id, three.text, three.history) == ("x", "a", ())


CATEGORIES = st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=40)


def prompts_of(categories) -> list[prompt_files.Prompt]:
    return [
        prompt_files.Prompt(id=str(i), text=str(i), category=category)
        for i, category in enumerate(categories)
    ]


@hypothesis.settings(deadline=None)
@hypothesis.given(CATEGORIES, st.data(), st.integers(0, 5))
def test_samples_are_stratified(categories, data, seed):
    """Each category has its share, within one; the order is that of the file."""
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
    """Seeds differ, a seed stays what it is, and every row can be drawn."""
    prompts = prompts_of(["a"] * 6 + ["b"] * 3)
    by_seed = [
        tuple(int(p.id) for p in prompt_files.sample(prompts, 3, seed=seed))
        for seed in range(60)
    ]
    assert by_seed[:2] == [(3, 4, 7), (4, 5, 7)]
    assert {place for places in by_seed for place in places} == set(range(9))
    path = tmp_path / "a.jsonl"
    assert parse("5@3") == prompt_files.sample(parse(50), 5, seed=3)
    # A sample is of the whole file: a faulty row is named wherever it stands.
    write(path, {"prompt": "x"}, {"prompt": "y"}, "{")
    assert "line 3" in one_line_error(f"{path}:1@0")
    assert len(parse(f"{path}:1")) == 1


def test_text_is_not_touched(tmp_path):
    texts = ["  x\n\n", "a\u2028b\x0cc", "\U0001f600"]
    lines = [json.dumps({"prompt": t}, ensure_ascii=False) for t in texts]
    assert [p.text for p in parse(write(tmp_path / "a.jsonl", *lines))] == texts


def test_plain_text_is_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n   \n  second \x0c{\n\nlast")
    prompts = parse(path)
    assert [p.text for p in prompts] == ["first", "  second \x0c{", "last"]
    assert [p.id for p in prompts] == ["1", "4", "6"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('{"prompt": "x"', "invalid JSON"),
        ('["x"]', "list, not an object"),
        ('{"answer": "x", "n": 1}', "keys found: answer, n"),
        ('{"prompt": " \\n"}', "empty"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "is missing"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "of 'system'"),
        ('{"messages": [{"role": "user", "content": [{}]}]}', "message 1 is no object"),
    ],
    ids=lambda value: value[:24],
)
def test_faulty_row_is_named_with_its_line(tmp_path, fault, said):
    path = write(tmp_path / "a.jsonl", {"prompt": "x"}, "", fault)
    message = one_line_error(path)
    assert f"{path}, line 3:" in message and said in message
