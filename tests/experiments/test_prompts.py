"""Conversations, in which turns follow the answers before them; prompts by length."""

import dataclasses
import shutil

import pytest
from script_runs import rows_of

from experiments import exactness, spec_round
from experiments.lib import cli, flags, prompt_files, prompts, runs, suite_plan
from spec_jax import loading


GEN_TOKENS, PAGE_SIZE = 6, 16
SIZES = {"gen_tokens": GEN_TOKENS, "page_size": PAGE_SIZE}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def pair(folders):
    target, draft = folders
    return loading.load(target, draft=draft, gamma_max=2, slab=3, drafter="ngram")


def prompt_of(id: str, text: str, *next_turns: str, **more) -> prompt_files.Prompt:
    return prompt_files.Prompt(
        **{"id": id, "text": text, "category": None, "next_turns": next_turns} | more
    )


PROMPTS = [
    prompt_of("1", "one"),
    prompt_of("2", "ask", "again", "and more", category="k"),
    prompt_of("3", "other", "turn"),
]


def answer_of(pair, ids: list[int], settings=None) -> str:
    """Returns the text of plain decoding, in a cache of another size."""
    run = runs.run_plain(
        pair,
        runs.Settings(gamma=1, capacity=96, sampling=settings, stop_ids=(0,), **SIZES),
        ids,
    )
    return pair.tokenizer.decode([token for token in run.tokens if token != 0])


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_later_turns_hold_the_answers_of_plain_decoding(pair, template):
    """Fails if a turn is left out, or its prompt lacks what was answered before."""
    words = dataclasses.replace(pair.tokenizer, chat_template=template)
    pair = dataclasses.replace(pair, tokenizer=words)
    prepared = prompts.prepare(pair, PROMPTS, raw=False, **SIZES)
    assert [prompt.id for prompt in prepared.prompts] == [
        *("1", "2 turn 1", "2 turn 2", "2 turn 3", "3 turn 1", "3 turn 2")
    ]
    assert [prompt.category for prompt in prepared.prompts[1:4]] == ["k"] * 3
    texts = [words.decode(ids) for ids in prepared.ids]
    ids = prepared.ids
    answers = {i: answer_of(pair, ids[i]) for i in (1, 2, 4)}
    if template is None:
        second = f"ask\n\n{answers[1]}\n\nagain"
        wanted = ["one", "ask", second, f"{second}\n\n{answers[2]}\n\nand more"]
        wanted += ["other", f"other\n\n{answers[4]}\n\nturn"]
    else:
        second = f"<user>ask<assistant>{answers[1]}<user>again<assistant>"
        third = f"{second}{answers[2]}<user>and more<assistant>"
        wanted = ["<user>one<assistant>", "<user>ask<assistant>", second, third]
        wanted += ["<user>other<assistant>"]
        wanted += [f"<user>other<assistant>{answers[4]}<user>turn<assistant>"]
    assert texts == wanted
    longest = max(map(len, ids)) + GEN_TOKENS
    assert longest <= prepared.capacity < longest + PAGE_SIZE


def test_an_answer_ends_at_a_stop_token(pair):
    """Fails if the stop token, or what follows it, is part of the answer's text."""
    (ids,) = prompts.encode(pair, [PROMPTS[0]], raw=True)
    (first, *_) = pair.tokenizer.encode(answer_of(pair, ids))
    words = dataclasses.replace(pair.tokenizer, stop_ids=(first,))
    stopping = dataclasses.replace(pair, tokenizer=words)
    asked = [prompt_of("1", "one", "two")]
    prepared = prompts.prepare(stopping, asked, raw=True, **SIZES)
    assert words.decode(prepared.ids[1]) == "one\n\n\n\ntwo"


def test_prompts_of_stated_lengths(pair):
    tokenizer = pair.tokenizer
    made_of = [
        prompt_of(str(i), x) for i, x in enumerate(("abcd", "efgh", "ijkl", "mnop"))
    ]
    asked = {"lengths": {"short": 3, "long": 9}, "per_length": 2, "raw": False}
    made = prompts.of_lengths(pair, made_of, **asked, **SIZES)
    texts = [tokenizer.decode(ids) for ids in made.ids]
    assert [(p.category, p.id) for p in made.prompts] == [
        *(("short", "1"), ("short", "3"), ("long", "1"), ("long", "3"))
    ]
    assert texts == ["fgh", "nop", "cd\n\n\nefgh", "kl\n\n\nmnop"]
    assert [p.text for p in made.prompts] == texts and made.capacity >= 9 + GEN_TOKENS
    for changes, message in (
        ({"per_length": 5}, "5 prompts .* there are 4"),
        ({"lengths": {"long": 99}}, "99 tokens .* have 25"),
    ):
        with pytest.raises(ValueError, match=message):
            prompts.of_lengths(pair, made_of, **asked | changes, **SIZES)


OPTIONS = {
    "enable_thinking=true": {"enable_thinking": True},
    'a=1,b="x"': {"a": 1, "b": "x"},
    '{"tools": [1, 2]}': {"tools": [1, 2]},
}


@pytest.mark.parametrize("text", OPTIONS)
def test_options_of_the_chat_template(pair, text):
    """Fails if a flag's options do not reach the prompts, or are ignored silently."""
    parser = cli.Parser("A script.")
    flags.add(parser, "raw")
    args = parser.parse_args(["--chat-option", text])
    assert args.chat_option == OPTIONS[text]
    template = "".join(f"{{{{ {name} }}}};" for name in OPTIONS[text])
    words = dataclasses.replace(pair.tokenizer, chat_template=template)
    other = dataclasses.replace(pair, tokenizer=prompts.with_options(args, words))
    (ids,) = prompts.encode(other, PROMPTS[:1], raw=False)
    shown = "".join(f"{value};" for value in OPTIONS[text].values())
    assert words.decode(ids) == shown
    with pytest.raises(ValueError, match="is of the chat template, and the model has"):
        prompts.with_options(args, pair.tokenizer)
    args.raw = True
    with pytest.raises(ValueError, match="is of the chat template, and --raw leaves"):
        prompts.with_options(args, words)
    assert prompts.with_options(parser.parse_args([]), words) is words


def test_options_are_told_where_bits_are_published(folders, tmp_path):
    """Fails if options of the template do not change the prompts of a plan and a run,
    or if the plan's header or the run's summary does not name them."""
    folder = shutil.copytree(folders[0], tmp_path / "target")
    template = "{{ messages[0].content }}{% if loud is defined %}!{{ loud }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    # Caches have one size, so that both runs share their programs.
    common = ["--target", str(folder), "--page-size", "128", "--gen-tokens", "4"]
    loud = ["--chat-option", "loud=true"]
    plans = {}
    for name, options in (("plain", []), ("loud", loud)):
        cell = ["--drafter", "ngram", "--dtype", "float32", "--prompts", "4"]
        args = exactness.parse_args([*common, *cell, *options])
        plans[name] = suite_plan.from_flags(args).header
    assert "chat_option" not in plans["plain"]["settings"]
    assert plans["loud"]["settings"]["chat_option"] == {"loud": True}
    told = [plans[name]["prompts"] for name in ("plain", "loud")]
    assert told[0] != told[1]
    run = ["--drafter", "ngram", "--gamma", "1", "--prompts", "1"]
    texts, said = [], []
    for name, options in (("plain", []), ("loud", loud)):
        path = tmp_path / f"{name}.jsonl"
        assert spec_round.main([*common, *run, "--out", str(path), *options]) == 0
        texts.append(rows_of(path, "prompt")[0]["prompt_ids"])
        said.append(rows_of(path, "summary")[0].get("chat_option"))
    assert texts[0] != texts[1] and said == [None, {"loud": True}]
