"""Keywords of the calls in `generation`: their types, and remedies for unknown ones."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast, get_type_hints

from spec_jax import inputs, run as run_lib
from spec_jax.engine import requests as requests_lib, verification
from spec_jax.gamma import policy as policy_lib


class Settings(TypedDict, total=False):
    """Keywords of `decode` other than `n`; `generate` takes them too."""

    max_tokens: int
    sampling: run_lib.Sampling | Sequence[run_lib.Sampling] | None
    processors: requests_lib.Processors
    stop: inputs.Stop | None
    ignore_eos: bool
    chat: Mapping[str, Any] | None
    skip_special_tokens: bool
    log_probs: bool
    top_logprobs: int
    prefix: inputs.Prompt | None
    page_size: int


class StreamSettings(Settings, total=False):
    """Keywords of `stream`."""

    gamma: run_lib.Gamma
    policy_state: policy_lib.State
    rule: verification.Rule


class SpeculativeSettings(StreamSettings, total=False):
    """Keywords of `generate`."""

    num_slots: int | None


_REMEDIES = {
    name: remedy
    for names, remedy in {
        "temperature top_p top_k min_p seed": "sampling=sj.Sampling({name}=...)",
        "do_sample": "sampling=sj.Sampling(), or nothing for greedy decoding",
        "max_new_tokens max_length": "max_tokens=..., without prompt",
        "stop_token_ids eos_token_id": "stop=[ID, ...]",
        "stop_strings stop_sequences": "stop=[TEXT, ...]",
        "num_return_sequences num_samples best_of": "n=...",
        "n": "generate(..., n=...) or decode(..., n=...)",
        "logprobs top_log_probs": "log_probs=True or top_logprobs=K",
        "system system_prompt": "prefix=...",
        "enable_thinking tools": "chat={{'{name}': ...}}",
        "prompts messages inputs input_ids": "prompt=...",
        "num_speculative_tokens num_assistant_tokens": "gamma=...",
        "assistant_model draft": "sj.load(TARGET, draft=...)",
        "logits_processor logits_processors processor": "processors=...",
        "repetition_penalty presence_penalty frequency_penalty": (
            "processors=sj.processors.penalties(...)"
        ),
        "bad_words bad_words_ids": "processors=sj.processors.bad_words(...)",
        "min_tokens min_new_tokens": "processors=sj.processors.min_tokens(...)",
        "logit_bias": "processors=sj.processors.logit_bias(...)",
        "json_schema regex": "processors=sj.processors.{name}(..., lm)",
        "drafter": "sj.load(TARGET, drafter=...)",
        "tree": "gamma=sj.Tree(...), or sj.load(TARGET, tree=...)",
        "batch_size": "num_slots=...",
    }.items()
    for name in names.split()
}
"""Remedies for names that other libraries have, or other calls of this one."""

Call = TypeVar("Call", bound=Callable[..., Any])


def takes(names: type, *sources: Callable) -> Callable[[Call], Call]:
    """Gives a call the keywords of the TypedDict `names`, with defaults of `sources`.

    An unknown keyword raises a TypeError that names the right one.
    """
    given: dict[str, inspect.Parameter] = {}
    for source in sources:
        given |= inspect.signature(source).parameters

    def decorate(call: Call) -> Call:
        """Gives `call` a signature with all keywords, and a check of their names."""
        signature = inspect.signature(call)
        own = list(signature.parameters.values())[:-1]
        leading = [one for one in own if one.kind is not one.KEYWORD_ONLY]
        keywords = [given[name] for name in get_type_hints(names)]
        signature = signature.replace(
            parameters=leading + keywords + own[len(leading) :]
        )

        @functools.wraps(call)
        def checked(*args: Any, **settings: Any) -> Any:
            check_names(call.__name__, list(signature.parameters), settings)
            return call(*args, **settings)

        vars(checked)["__signature__"] = signature
        return cast(Call, checked)

    return decorate


def check_names(call: str, known: list[str], names: Iterable[str]) -> None:
    """Raises `TypeError` for a name that is not in `known`, with what to write."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1) or [", ".join(known)]
            remedy = _REMEDIES.get(name, close[0]).format(name=name)
            word, *more = remedy.split("=")
            if more and word.isidentifier() and word not in known:
                # Another call's keyword.
                remedy = _REMEDIES.get(word, f"one of {', '.join(known)}")
            raise TypeError(f"{call} has no argument {name!r}: write {remedy}")
