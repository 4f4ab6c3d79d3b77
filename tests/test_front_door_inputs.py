"""Inputs that `generate`, `stream` and `decode` refuse, in one line with the remedy."""

import numpy as np
import pytest
import tiny_pair

import spec_jax as sj


PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """Returns a tiny model of random weights with a chat template; tokens are bytes."""
    folder = tiny_pair.write_chat(tmp_path_factory.mktemp("random"))
    return sj.load(folder, drafter="ngram", gamma_max=4)


NAMES = {
    "temperature": r"sampling=sj.Sampling\(temperature=...\)",
    "top_p": r"sampling=sj.Sampling\(top_p=...\)",
    "seed": r"sampling=sj.Sampling\(seed=...\)",
    "do_sample": r"sampling=sj.Sampling\(\), or nothing",
    "max_new_tokens": "max_tokens=...",
    "num_return_sequences": r"(generate\(..., )?n=...",
    "system_prompt": r"prefix=...",
    "logprobs": "log_probs=True or top_logprobs=K",
    "stop_token_ids": r"stop=\[ID, ...\]",
    "stop_strings": r"stop=\[TEXT, ...\]",
    "enable_thinking": r"chat=\{'enable_thinking': ...\}",
    "maxtokens": "max_tokens",
    "nonsense_of_all_kinds": "lm, prompt, max_tokens",
}
"""Names of other libraries and mistyped ones, and what is to be written instead."""


@pytest.mark.parametrize("name", NAMES)
def test_other_names_point_to_the_right_one(lm, name):
    """Fails if a message names the unexpected keyword and not what to write instead."""
    for call in (sj.generate, sj.stream, sj.decode, sj.check_lossless):
        message = f"^{call.__name__} has no argument '{name}': write {NAMES[name]}"
        with pytest.raises(TypeError, match=message):
            call(lm, PROMPT, **{name: 1})


BAD = {
    "no prompt": ({"prompt": []}, "the list of prompts is empty: give at least one"),
    "an empty text": ({"prompt": ""}, "prompt is empty: there is no token to decode"),
    "no token for an answer of one": ({"prompt": "", "max_tokens": 1},
        "prompt is empty: there is no token to decode"),
    "no text at all": ({"prompt": 7}, "a prompt of type int: give text, token ids, me"),
    "a prompt of numbers": ({"prompt": [[1.5]]}, "give one row of token ids, whole n"),
    "a prompt of one number": ({"prompt": [1.0]}, "dtype float64: give one row of tok"),
    "a message": ({"prompt": {"role": "user", "content": "hi"}},
        "a prompt of type dict: messages are a list, even one, as in .*'role': 'user'"),
    "a message among prompts": ({"prompt": ["a", {"role": "user"}]},
        "a prompt of type dict: messages are a list"),
    "nothing among prompts": ({"prompt": ["a", None]},
        "a prompt of type NoneType: giv"),
    "options of no chat": ({"chat": {"enable_thinking": True}},
        "chat=.* is of chats, and no prompt has messages"),
    "options by place": ({"prompt": [{"role": "user"}], "chat": ["tools"]},
        r"chat=\['tools'\] is no mapping of names"),
    "an option of no template": (
        {"prompt": [{"role": "user", "content": "hi"}], "chat": {"thinking": True}},
        "chat template: does not read thinking; its options are add_generation_prompt",
    ),
    "a token of another vocabulary": ({"prompt": [3, 264]}, r"264, outside \[0, 264\)"),
    "rows of ids": ({"prompt": np.ones((2, 2), int)}, r"prompt has shape \[2, 2\]"),
    "max_tokens": ({"max_tokens": 0},
        "max_tokens=0 must be a whole number of at least"),
    "a long answer": (
        {"max_tokens": 3000},
        r"9 tokens and max_tokens=3000 make 3009 positions, and the model has 2048 "
        r"\(max_position_embeddings\): shorten one of them",
    ),
    "gamma": ({"gamma": 5}, r"gamma=5 is outside \[0, 4\]"),
    "half a gamma": ({"gamma": 1.5}, "gamma=1.5 must be a whole number in 0 .. 4"),
    "a rule": ({"rule": "luck"}, "rule='luck' is not one of coupled, rejection, block"),
    "no slots": ({"num_slots": 0}, "num_slots=0 must be a whole number of at least 1"),
    "slots in words": ({"num_slots": "a"}, "num_slots='a' must be a whole number of"),
    "no page": ({"page_size": 0}, "page_size=0 must be a whole number of at least 1"),
    "half a page": ({"page_size": 1.5}, "page_size=1.5 must be a whole number of at"),
    "a page larger than any text": (
        {"page_size": 10**9},
        r"page_size=1000000000 is above 2048, the positions of the model \("
        r"max_position_embeddings\): ask for smaller pages",
    ),
    "an empty stop text": ({"stop": ["ab", ""]}, "stop has an empty text, which every"),
    "half a stop text": ({"stop": "\ud800"},
        "stop text .* has half a character, which"),
    "a stop outside": ({"stop": np.array(300)}, "stop has token 300, outs"),
    "stop bytes": ({"stop": b"ab"}, "stop=b'ab': give token ids and texts, as in stop"),
    "stop numbers": ({"stop": [1.5]}, "stop has shape .* give one row of token ids"),
    "a stop number": ({"stop": 1.5}, "stop has shape .* give one row of token ids"),
    "a large stop": ({"stop": [2**31]}, r"stop has token 2147483648, outside \[0, 264"),
    "a negative stop": ({"stop": -1}, r"stop has token -1, outside \[0, 264\)"),
    "no stop": ({"stop": [None]}, "stop has shape .* give one row of token ids"),
    "many tokens": ({"max_tokens": 2**31}, "max_tokens=2147483648 is above 2147483647"),
    "sampling by number": ({"sampling": 0.7},
        "sampling=0.7: give a Sampling, or a lis"),
    "no sampling for one": (
        {"prompt": ["a", "b"], "sampling": [sj.Sampling(), None]},
        r"sampling\[1\]=None: give a Sampling for each prompt; Sampling\(temperature=0",
    ),
    "sampling": ({"prompt": ["a", "b"], "sampling": [sj.Sampling()]},
        "1 settings of sampling for 2 prompts: give one for all, or one for each"),
    "no sample": ({"n": 0}, "n=0 must be a whole number of at least 1"),
    "half a sample": ({"n": 1.5}, "n=1.5 must be a whole number of at least 1"),
    "greedy samples": ({"n": 2}, "n=2 samples drawn greedily are one text: give a tem"),
    "greedy samples of settings": ({"n": 2, "sampling": sj.Sampling(temperature=0)},
        "n=2 samples drawn greedily are one text: give a tem"),
    "more samples than a seed has": ({"n": 4097, "sampling": sj.Sampling()},
        "request=0 and sample=4096 of one seed: it has noise for"),
    "fewer than no likely tokens": ({"top_logprobs": -1},
        "top_logprobs=-1 must be a whole number of at least 0"),
    "more likely tokens than there are": ({"top_logprobs": 265},
        "top_logprobs=265 is above 264, the vocabulary"),
    "an empty prefix": ({"prefix": ""}, "prefix='': give one text, row of token"),
    "several prefixes": ({"prefix": ["a", "b"]}, "give one text, row of token ids or"),
    "a prefix of no kind": ({"prefix": 7},
        "a prompt of type int: give text, token ids"),
    "a chat after a text": (
        {"prompt": [{"role": "user", "content": "hi"}], "prefix": "a"},
        "prefix= and the prompts are both of messages, or neither",
    ),
    "a text after a chat": ({"prefix": [{"role": "system", "content": "hi"}]},
        "prefix= and the prompts are both of messages, or neither"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_inputs_are_refused_in_one_line(lm, bad):
    """Checks that one line names the values and the remedy, before anything runs."""
    arguments, message = BAD[bad]
    arguments = {"prompt": PROMPT, **arguments}
    with pytest.raises(ValueError, match=message) as caught:
        sj.generate(lm, **arguments)
    assert "\n" not in str(caught.value)
    own = arguments.keys() & {"num_slots", "n"}
    if not own and not isinstance(arguments["prompt"], list):
        with pytest.raises(ValueError, match=message):
            sj.stream(lm, **arguments)


def test_bad_settings_of_sampling_are_refused():
    with pytest.raises(ValueError, match="temperature"):
        sj.Sampling(temperature=-1.0)
    with pytest.raises(ValueError, match="top_k=20 would not change"):
        sj.Sampling(temperature=0.0, top_k=20)


def test_a_stream_is_of_one_sample_of_one_prompt(lm):
    message = r"^stream has no argument 'n': write generate\(..., n=...\) or decode"
    with pytest.raises(TypeError, match=message):
        sj.stream(lm, PROMPT, n=2)
    for name in ("tree", "batch_size"):  # The remedies of `generate` are refused here.
        with pytest.raises(
            TypeError, match=f"no argument '{name}': write one of lm, prompt"
        ):
            sj.decode(lm, PROMPT, **{name: 2})
    with pytest.raises(ValueError, match="stream takes one prompt, not 3: call it for"):
        sj.stream(lm, [PROMPT] * 3)


def test_values_that_are_false_are_no_defaults():
    """Fails if an empty folder's name or a slab of 0 means the default."""
    with pytest.raises(ValueError, match="tokenizer.json: no such file"):
        sj.load("")
    with pytest.raises(
        ValueError, match="gamma_max=7 needs 8 rows .* the target has 0"
    ):
        sj.load(drafter="ngram", slab=0)
