"""Conversations, in which turns follow the answers before them; prompts by length."""

import dataclasses
import shutil

import pytest
from script_runs import rows_from

from experiments import exactness, spec_round
from experiments.lib import flags, prompt_files, prompts, runs, suite_plan
from spec_jax import loading


GEN_TOKENS, PAGE_SIZE = 6, 16
SIZES = {"gen_tokens": GEN_TOKENS, "page_size": PAGE_SIZE}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def pair(folders):
    target, draft = folders
    return loading.load(target, draft=draft, gamma_max=2, slab=3, drafter="ngram")


def prompt_of(id: str, text: str, *next_turns: str, category=None):
    return prompt_files.Prompt(
        id=id, text=text, category=category, next_turns=next_turns
    )


PROMPTS = [
    prompt_of("1", "one"),
    prompt_of("2", "ask", "again", "and more", category="k"),
    prompt_of("3", "other", "turn"),
]


def answer_of(pair, ids: list[int]) -> str:
    """Returns the text of plain decoding, in a cache of another size."""
    settings = runs.Settings(lm=pair, gamma=1, capacity=96, stop_ids=(0,), **SIZES)
    tokens = runs.run_plain(settings, ids).tokens
    return pair.tokenizer.decode([token for token in tokens if token != 0])


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_later_turns_hold_the_answers_of_plain_decoding(pair, template):
    """Fails if a turn is left out, or its prompt lacks what was answered before."""
    words = dataclasses.replace(pair.tokenizer, chat_template=template)
    pair = dataclasses.replace(pair, tokenizer=words)
    prepared = prompts.prepare(pair, PROMPTS, raw=False, **SIZES)
    ids = [prompt.ids for prompt in prepared]
    names = "1, 2 turn 1, 2 turn 2, 2 turn 3, 3 turn 1, 3 turn 2".split(", ")
    assert [prompt.id for prompt in prepared] == names
    assert [prompt.category for prompt in prepared[1:4]] == ["k"] * 3
    first, second, other = (answer_of(pair, ids[i]) for i in (1, 2, 4))
    if template is None:
        chat = f"ask\n\n{first}\n\nagain"
        wanted = ["one", "ask", chat, f"{chat}\n\n{second}\n\nand more"]
        wanted += ["other", f"other\n\n{other}\n\nturn"]
    else:
        chat = f"<user>ask<assistant>{first}<user>again<assistant>"
        wanted = ["<user>one<assistant>", "<user>ask<assistant>", chat]
        wanted += [f"{chat}{second}<user>and more<assistant>"]
        wanted += ["<user>other<assistant>"]
        wanted += [f"<user>other<assistant>{other}<user>turn<assistant>"]
    assert [words.decode(one) for one in ids] == wanted
    longest = max(map(len, ids)) + GEN_TOKENS
    capacity = prompts.capacity_for(pair, prepared, **SIZES)
    assert longest <= capacity < longest + PAGE_SIZE


def test_an_answer_ends_at_a_stop_token(pair):
    """Fails if the stop token, or what follows it, is part of the answer's text."""
    (one,) = prompts.encode(pair.tokenizer, [PROMPTS[0]], raw=True)
    (first, *_) = pair.tokenizer.encode(answer_of(pair, one.ids))
    words = dataclasses.replace(pair.tokenizer, stop_ids=(first,))
    stopping = dataclasses.replace(pair, tokenizer=words)
    asked = [prompt_of("1", "one", "two")]
    _, second = prompts.prepare(stopping, asked, raw=True, **SIZES)
    assert words.decode(second.ids) == "one\n\n\n\ntwo"


def test_prompts_of_stated_lengths(pair):
    texts = ("abcd", "efgh", "ijkl", "mnop")
    made_of = [prompt_of(str(number), text) for number, text in enumerate(texts)]
    asked = {"lengths": {"short": 3, "long": 9}, "per_length": 2, "raw": False}
    made = prompts.of_lengths(pair, made_of, **asked)
    assert [(p.category, p.id, p.text) for p in made] == [
        *(("short", "1", "fgh"), ("short", "3", "nop")),
        *(("long", "1", "cd\n\n\nefgh"), ("long", "3", "kl\n\n\nmnop")),
    ]
    for prompt in made:
        assert pair.tokenizer.decode(prompt.ids) == prompt.text
    for changes, message in (
        ({"per_length": 5}, "5 prompts .* there are 4"),
        ({"lengths": {"long": 99}}, "99 tokens .* have 25"),
    ):
        with pytest.raises(ValueError, match=message):
            prompts.of_lengths(pair, made_of, **asked | changes)


def test_options_of_the_chat_template(pair):
    """Fails if a flag's options do not reach the prompts, or are ignored silently."""
    parse_args = flags.parser("A script.", "raw")
    for text, options in {
        "enable_thinking=true": {"enable_thinking": True},
        'a=1,b="x"': {"a": 1, "b": "x"},
        '{"tools": [1, 2]}': {"tools": [1, 2]},
    }.items():
        args = parse_args(["--chat-option", text])
        assert args.chat_option == options
        template = "".join(f"{{{{ {name} }}}};" for name in options)
        words = dataclasses.replace(pair.tokenizer, chat_template=template)
        other = prompts.with_options(args, words)
        (one,) = prompts.encode(other, PROMPTS[:1], raw=False)
        wanted = "".join(f"{value};" for value in options.values())
        assert words.decode(one.ids) == wanted
    with pytest.raises(ValueError, match="is of the chat template, and the model has"):
        prompts.with_options(args, pair.tokenizer)
    args.raw = True
    with pytest.raises(ValueError, match="is of the chat template, and --raw leaves"):
        prompts.with_options(args, words)
    assert prompts.with_options(parse_args([]), words) is words


def test_options_are_told_where_bits_are_published(folders, tmp_path):
    """Fails if the template's options change no prompt, or are not told."""
    folder = shutil.copytree(folders[0], tmp_path / "target")
    template = "{{ messages[0].content }}{% if loud is defined %}!{{ loud }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    # Caches have one size, so that both runs share their programs.
    common = ["--target", str(folder), "--page-size", "128", "--gen-tokens", "4"]
    common += ["--drafter", "ngram"]
    planned, texts, settings, said = [], [], [], []
    for options in ([], ["--chat-option", "loud=true"]):
        cell = ["--dtype", "float32", "--prompts", "4", *options]
        plan = suite_plan.from_flags(exactness.parse_args([*common, *cell]))
        planned.append(plan.header["prompts"])
        settings.append(plan.header["settings"].get("chat_option"))
        run = [*common, "--gamma", "1", "--prompts", "1", *options]
        prompt, summary = rows_from(spec_round.main, tmp_path, run)
        texts.append(prompt["prompt_ids"])
        said.append(summary.get("chat_option"))
    assert planned[0] != planned[1] and texts[0] != texts[1]
    assert settings == said == [None, {"loud": True}]
