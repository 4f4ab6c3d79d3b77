"""What `generate`, `stream` and `decode` refuse, in a line that says what to write."""

import numpy as np
import pytest
import tiny_pair

import spec_jax as sj


PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A tiny model of random weights, with a chat template; a token is a byte."""
    folder = tiny_pair.write_chat(tmp_path_factory.mktemp("random"))
    return sj.load(folder, drafter="ngram", gamma_max=4)


NAMES = {
    "temperature": r"sampling=sj.Sampling\(temperature=...\)",
    "do_sample": r"sampling=sj.Sampling\(\), or nothing",
    "max_new_tokens": "max_tokens=...",
    "stop_token_ids": r"stop=\[ID, ...\]",
    "enable_thinking": r"chat=\{'enable_thinking': ...\}",
    "maxtokens": "max_tokens",
    "nonsense_of_all_kinds": "lm, prompt, max_tokens",
}
"""Names that others have, and what is to be written."""


@pytest.mark.parametrize("name", NAMES)
def test_other_names_point_to_the_right_one(lm, name):
    """Fails if a user of another library is told of an unexpected keyword alone."""
    for call in (sj.generate, sj.stream, sj.decode, sj.check_lossless):
        message = f"^{call.__name__} has no argument '{name}': write {NAMES[name]}"
        with pytest.raises(TypeError, match=message):
            call(lm, PROMPT, **{name: 1})


BAD = {
    "no prompt": ({"prompt": []}, "the list of prompts is empty: give at least one"),
    "an empty text": ({"prompt": ""}, "prompt is empty: there is no token to decode"),
    "no text at all": ({"prompt": 7}, "a prompt of type int: give text, token ids, me"),
    "a message": (
        {"prompt": {"role": "user", "content": "hi"}},
        "a prompt of type dict: messages are a list, even one, as in .*'role': 'user'",
    ),
    "options of no chat": (
        {"chat": {"enable_thinking": True}},
        "chat=.* is of chats, and no prompt has messages",
    ),
    "an option of no template": (
        {"prompt": [{"role": "user", "content": "hi"}], "chat": {"thinking": True}},
        "chat template: does not read thinking; its options are add_generation_prompt",
    ),
    "a token of another vocabulary": ({"prompt": [3, 264]}, r"264, outside \[0, 264\)"),
    "rows of ids": ({"prompt": np.ones((2, 2), int)}, r"prompt has shape \[2, 2\]"),
    "max_tokens": (
        {"max_tokens": 0},
        "max_tokens=0 must be a whole number of at least",
    ),
    "a long answer": (
        {"max_tokens": 3000},
        r"9 tokens and max_tokens=3000 make 3009 positions, and the model has 2048 "
        r"\(max_position_embeddings\): shorten one of them",
    ),
    "gamma": ({"gamma": 5}, r"gamma=5 is outside \[0, 4\]"),
    "a rule": ({"rule": "luck"}, "rule='luck' is not one of coupled, rejection, block"),
    "no slots": ({"num_slots": 0}, "num_slots=0 must be a whole number of at least 1"),
    "no page": ({"page_size": 0}, "page_size=0 must be a whole number of at least 1"),
    "a page larger than any text": (
        {"page_size": 10**9},
        r"page_size=1000000000 is above 2048, the positions of the model \("
        r"max_position_embeddings\): ask for smaller pages",
    ),
    "an empty stop text": ({"stop": ["ab", ""]}, "stop has an empty text, which every"),
    "stop bytes": ({"stop": b"ab"}, "stop=b'ab': give token ids and texts, as in stop"),
    "a large stop": ({"stop": [2**31]}, r"stop has token 2147483648, outside \[0, 264"),
    "sampling by number": (
        {"sampling": 0.7},
        "sampling=0.7: give a Sampling, or a lis",
    ),
    "no sampling for one": (
        {"prompt": ["a", "b"], "sampling": [sj.Sampling(), None]},
        r"sampling\[1\]=None: give a Sampling for each prompt; Sampling\(temperature=0",
    ),
    "sampling": (
        {"prompt": ["a", "b"], "sampling": [sj.Sampling()]},
        "1 settings of sampling for 2 prompts: give one for all, or one for each",
    ),
    "no sample": ({"n": 0}, "n=0 must be a whole number of at least 1"),
    "greedy samples": ({"n": 2}, "n=2 samples drawn greedily are one text: give a tem"),
    "more samples than a seed has": (
        {"n": 4097, "sampling": sj.Sampling()},
        "request=0 and sample=4096 of one seed: it has noise for",
    ),
    "fewer than no likely tokens": (
        {"top_logprobs": -1},
        "top_logprobs=-1 must be a whole number of at least 0",
    ),
    "more likely tokens than there are": (
        {"top_logprobs": 265},
        "top_logprobs=265 is above 264, the vocabulary",
    ),
    "an empty prefix": (
        {"prefix": ""},
        "prefix='': give one text, row of token",
    ),
    "a chat after a text": (
        {"prompt": [{"role": "user", "content": "hi"}], "prefix": "a"},
        "prefix= and the prompts are both of messages, or neither",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_inputs_are_refused_in_one_line(lm, bad):
    """With the values and the remedy, before anything is allocated or runs."""
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


def test_a_stream_is_of_one_sample(lm):
    message = r"^stream has no argument 'n': write generate\(..., n=...\) or decode"
    with pytest.raises(TypeError, match=message):
        sj.stream(lm, PROMPT, n=2)


def test_a_stream_is_of_one_prompt(lm):
    with pytest.raises(ValueError, match="stream takes one prompt, not 3: call it for"):
        sj.stream(lm, [PROMPT] * 3)
