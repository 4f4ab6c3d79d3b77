"""Prompt files: what is accepted, and that each fault is named where it stands."""

import json
import pathlib

import pytest

from experiments.support import prompt_files


REPO = pathlib.Path(__file__).parents[2]
BUNDLED = REPO / "experiments" / "prompts" / "python_50.jsonl"
DATA = REPO.parent / "shared" / "data"


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


@pytest.mark.parametrize("number", ["0", "-4", "51", "1000000"])
def test_number_out_of_range(number):
    message = one_line_error(number)
    assert number in message and "50" in message


def test_keys_in_order_of_preference(tmp_path):
    rows = [
        {"turns": ["t", "u"], "text": "x", "question": "q", "prompt": "p"},
        {"turns": ["t", "u"], "text": "x", "question": "q"},
        {"turns": ["t", "u"], "text": "x"},
        {"turns": ["t", "u"]},
        {"prompt": None, "text": "x"},
    ]
    texts = [p.text for p in parse(write(tmp_path / "a.jsonl", *rows))]
    assert texts == ["p", "q", "x", "t", "x"]


def test_ids_and_categories(tmp_path):
    rows = [
        {"prompt": "a", "id": "one", "task_id": "no", "kind": "k"},
        {"prompt": "b", "task_id": "T/2", "category": "c", "kind": "k"},
        {"prompt": "c", "question_id": 83},
        "",
        {"prompt": "d", "id": None, "category": 5},
        {"prompt": "e", "id": 0},
    ]
    prompts = parse(write(tmp_path / "a.jsonl", *rows))
    assert [p.id for p in prompts] == ["one", "T/2", "83", "5", "0"]
    assert [p.category for p in prompts] == ["k", "c", None, None, None]


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


def test_limit(tmp_path):
    rows = [{"prompt": str(i)} for i in range(5)]
    path = write(tmp_path / "a.jsonl", *rows)
    assert [p.text for p in parse(f"{path}:2")] == ["0", "1"]
    assert len(parse(f"{path}:5")) == len(parse(path)) == 5
    message = one_line_error(f"{path}:6")
    assert "6" in message and "5" in message and str(path) in message
    assert "at least 1" in one_line_error(f"{path}:0")


def test_colons_in_paths(tmp_path):
    plain = write(tmp_path / "a:b", "x", "y")
    assert len(parse(plain)) == 2
    assert len(parse(f"{plain}:1")) == 1
    # The whole name exists as a file: its `:1` is no limit.
    write(tmp_path / "a:b:1", "p", "q", "r")
    assert len(parse(f"{plain}:1")) == 3
    assert len(parse(f"{plain}:1:2")) == 2
    assert "no such file" in one_line_error(f"{plain}:x")
    assert "no such file" in one_line_error(f"{plain}:-1")


def test_nothing_is_read_beyond_the_limit(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "x"}, "{broken")
    assert len(parse(f"{path}:1")) == 1
    assert "line 2" in one_line_error(path)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('{"prompt": "x"', "invalid JSON"),
        ("['x']", "invalid JSON"),
        ('["x"]', "list, not an object"),
        ('"x"', "str, not an object"),
        ('{"answer": "x", "n": 1}', "keys found: answer, n"),
        ("{}", "keys found: none"),
        ('{"turns": []}', "keys found: turns"),
        ('{"turns": "x"}', "keys found: turns"),
        ('{"prompt": 3}', "keys found: prompt"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": " \\n"}', "empty"),
        ('{"turns": ["", "x"]}', "empty"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "x", "n": ' + "9" * 5000 + "}", "unreadable JSON"),
        ("[" * 100_000, "unreadable JSON"),
    ],
    ids=lambda value: value[:24],
)
def test_faulty_row_is_named_with_its_line(tmp_path, fault, said):
    path = write(tmp_path / "a.jsonl", {"prompt": "x"}, "", fault)
    message = one_line_error(path)
    assert f"{path}, line 3:" in message and said in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_not_utf8(tmp_path, name):
    path = write(
        tmp_path / name, '{"prompt": "x"}', '{"prompt": "é"}', encoding="latin1"
    )
    message = one_line_error(path)
    assert f"{path}, line 2: not UTF-8" in message and "0xe9" in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_empty_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert "no prompts" in one_line_error(tmp_path / name)
    assert "no prompts" in one_line_error(f"{tmp_path / name}:3")


def test_missing_file_folder_and_nonsense(tmp_path):
    missing = tmp_path / "missing.jsonl"
    for spec in (missing, f"{missing}:7"):
        message = one_line_error(spec)
        assert f"{missing}: no such file" in message and "number" in message
    assert "directory" in one_line_error(tmp_path)
    assert "directory" in one_line_error("")
    assert "cannot be read" in one_line_error("a\0b")


@pytest.mark.parametrize(
    ("name", "size", "first_id"),
    [
        ("gsm8k/test.jsonl", 1319, "1"),
        ("spec_bench/question.jsonl", 480, "81"),
        ("humaneval/HumanEval.jsonl", 164, "HumanEval/0"),
        ("mbpp/mbpp.jsonl", 974, "1"),
        ("mt_bench/question.jsonl", 80, "81"),
    ],
)
def test_data_sets(name, size, first_id):
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"the data set {name} is not on this machine")
    prompts = parse(path)
    assert len(prompts) == size
    assert prompts[0].id == first_id
    assert parse(f"{path}:50") == prompts[:50]
